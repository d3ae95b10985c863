"""What a forward does, operator by operator: seen by a `Watch`, known as a `Course`."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mindspeed_mem.activation.storage.ledger import Token
from mindspeed_mem.activation.storage.micro_batch import MicroBatch
from mindspeed_mem.activation.storage.records import HOST, STAYS, Owner, Record

if TYPE_CHECKING:
    from mindspeed_mem.activation.plan_in_force import PlanInForce

Signature = tuple[Any, ...]
"""What a layer takes (shapes, dtypes, whether they need gradients), and whether it trains: what it saves depends on
that."""


class Save(NamedTuple):
    """A tensor that is saved, of a storage that leaves."""

    owner: Owner
    """Who produced the storage."""
    made_by: tuple[int, str]
    """The same, without its number."""
    owned: bool
    """As the ledger has it."""
    nbytes: int
    distance: int


class Course:
    """What a forward of one kind does, by the numbers of its operators (from 1)."""

    __slots__ = (
        "operators",
        "hooked",
        "quiet",
        "inside",
        "again",
        "saves",
        "signed",
        "kept",
        "layers",
        "natively",
        "held",
        "small_bytes",
        "switches",
        "uses",
        "at",
        "index",
    )

    def __init__(self) -> None:
        self.operators: list[tuple[int, str]] = [(-1, "")]
        """Layer and path."""
        self.hooked: list[bool] = [False]
        """Whether the hook is to be in force while it runs, what it contains included."""
        self.quiet: list[tuple[int, str, bool] | None] = []
        """As `operators`, and whether they are inline code; None for those of which anybody wants to know when they
        run."""
        self.inside: list[tuple[int, str, bool] | None] = []
        """The same for what runs where the hook is in force: who made what is saved there is known. Empty if it is
        not."""
        self.again: list[tuple[int, str, bool] | None] = []
        """The same for what runs in a recomputed operator."""
        self.saves: dict[int, tuple[Save | bool, ...]] = {}
        """Of each tensor saved in turn when so many operators have started what is known, or whether it needs a
        handle."""
        self.signed: set[int] = set()
        """Those whose backward is to be told, though they have no hook: something is due there."""
        self.kept: dict[int, tuple[int, int]] = {}
        """Bytes that need no handle: those that a layer's operators made, and others."""
        self.layers: list[tuple[int, Signature]] = []
        self.natively = 0
        """How many tensors are saved without a handle."""
        self.held = 0
        """How many storages that have left are held by others all the same."""
        self.small_bytes = 0
        """Of what is selected and saved without a handle, since it is too small."""
        self.switches = True
        """What runs is written down: second runs take what operators make."""
        self.uses = 0
        self.at = self.index = 0  # where the forward that goes by it is: operators started, tensors saved since

    def differs(self, other: Course) -> set[int]:
        """Where other bytes are saved, if both run the same operators."""
        if self.operators != other.operators or self.layers != other.layers:
            return set()
        places = self.kept.keys() | other.kept.keys() | self.saves.keys() | other.saves.keys()
        return {n for n in places if (self.kept.get(n), self.saves.get(n)) != (other.kept.get(n), other.saves.get(n))}

    def same(self, other: Course) -> bool:
        return all(
            getattr(self, name) == getattr(other, name)
            for name in ("operators", "hooked", "saves", "signed", "kept", "layers")
        )


class _Entry:
    """A storage that the ledger counts: who saves it."""

    __slots__ = ("watch", "number", "savers", "token_bytes", "owned", "held", "small")

    def __init__(self, watch: Watch, number: int, token: Token):
        self.watch: Watch | None = watch
        self.number = number
        self.savers: set[tuple[int, bool]] = set()  # operators, and whether that tensor needs a handle
        self.token_bytes, self.owned = token.nbytes, token.owned
        self.held = False  # it is counted in any case
        self.small = False  # it stays for its size


class Watch:
    """Follows one forward in which everything goes through the hook.

    Args:
        varying: where what is saved differs from forward to forward (experts): it always has handles.
    """

    def __init__(self, varying: Collection[int]) -> None:
        self._varying = varying
        self._operators: list[tuple[int, str]] = [(-1, "")]
        self._inline = [False]
        self._parents = [0]
        self._results = [False]  # whether what it returns is known
        self._open: list[int] = [0]
        self._needed: set[int] = set()
        self._saves: dict[int, list[Save | bool]] = {}
        self._small_bytes = 0
        self._saved: list[tuple[int, bool]] = []
        self._numbers: list[int] = []
        self._entries: list[_Entry] = []

    def starts(self, layer: int, path: str, marker: bool) -> None:
        self._parents.append(self._open[-1])
        self._open.append(len(self._operators))
        self._operators.append((layer, path))
        self._inline.append(marker)
        self._results.append(not marker)

    def returns(self) -> None:
        """The result of what runs is known: code between two markers that is all of a module."""
        self._results[self._open[-1]] = True

    def stops(self, depth: int) -> None:
        del self._open[depth + 1 :]

    def saves(self, number: int, token: Token | None, handle: bool, again: bool, of: Record | None = None) -> None:
        """What runs saves a tensor, when ``number`` operators have started. ``handle``: it needs one; ``again``: it is
        in an operator that runs again; ``of``: of a storage that leaves, or is too small for that."""
        running = self._open[-1]
        entry = None if token is None else self._entry(token, number)
        if of is not None and of.distance == STAYS and not again:
            handle = False
            if entry is not None and not entry.small:
                entry.small = True
                self._small_bytes += of.nbytes
        handle = handle or again or number in self._varying or (entry is not None and entry.number in self._varying)
        if handle:
            self._needed.add(running)
        if not again:
            save: Save | bool = handle
            if of is not None and token is not None and number not in self._varying and of.distance != STAYS:
                save = Save((of.layer, of.op, of.number), (of.layer, of.op), token.owned, of.nbytes, of.distance)
            self._saves.setdefault(number, []).append(save)
        self._saved.append((running, handle))
        if not self._numbers or self._numbers[-1] != number:
            self._numbers.append(number)
        if entry is not None:
            entry.savers.add((running, handle))

    def holds(self, token: Token | None) -> None:
        """A storage is counted whatever saves it."""
        if token is not None:
            self._entry(token, 0).held = True

    def _entry(self, token: Token, number: int) -> _Entry:
        entry: _Entry | None = token.entry
        if entry is None or entry.watch is not self:
            known = entry is not None
            entry = token.entry = _Entry(self, number, token)
            entry.held = known  # by an earlier forward
            self._entries.append(entry)
        return entry

    def course(self, micro_batch: MicroBatch, in_force: PlanInForce, layers: list[tuple[int, Signature]]) -> Course:
        """What was seen, once the forward has ended."""
        plan, course = in_force.the_plan, Course()
        needed, again = self._needed, set[int]()
        for number, (layer, path) in enumerate(self._operators):
            known = 0 <= layer < in_force.num_layers
            if known and plan.recompute(layer, path) is not None:
                again.add(number)
            if number in again or (known and plan.decision(layer, path) is not None):
                needed.add(number)  # also an expert that had no tokens
        moved = micro_batch.those_moved()
        course.held = held(moved)
        signed = {self._numbers[-1]} if self._numbers else set()
        for record in moved:
            position = bisect_right(self._numbers, record.last_use + record.distance)
            if position:
                signed.add(self._numbers[position - 1])
        needed |= {number for number in signed if not self._results[number]}
        for number in range(1, len(self._operators)):
            course.hooked.append(number in needed or course.hooked[self._parents[number]])
        course.operators, course.layers, course.switches = self._operators, layers, in_force.recomputes
        course.signed = {number for number in signed if not course.hooked[number]}
        heard = [hooked or number in course.signed for number, hooked in enumerate(course.hooked)]
        quiet = zip(heard, self._operators, self._inline, strict=True)
        course.quiet = [None if one else (*running, inline) for one, running, inline in quiet]
        kept: Counter[tuple[int, bool]] = Counter()
        for entry in self._entries:
            if not entry.held and not any(handle and course.hooked[saver] for saver, handle in entry.savers):
                kept[entry.number, entry.owned] += entry.token_bytes
        course.kept = {number: (kept[number, True], kept[number, False]) for number, _ in kept}
        course.saves = {number: tuple(saves) for number, saves in self._saves.items()}
        if not self._varying:
            course.again = [(*running, inline) for running, inline in zip(self._operators, self._inline, strict=True)]
            course.inside = [None if number in again else entry for number, entry in enumerate(course.again)]
        course.small_bytes = self._small_bytes
        course.natively = sum(not (handle and course.hooked[saver]) for saver, handle in self._saved)
        for entry in self._entries:
            entry.watch = None  # the token may outlive this
        return course


def held(moved: Sequence[Record]) -> int:
    return sum([record.state == HOST and record.storage() is not None for record in moved])


UNKNOWN = Course()
"""Of which no operator is known: each takes the hook."""
