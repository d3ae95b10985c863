"""Where recomputed operators begin and end in the forward: which runs become a `Replay`, and which a `Tape`."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from mindspeed_mem.activation import regions
from mindspeed_mem.activation.arguments import tensors_in
from mindspeed_mem.activation.frame import Frame
from mindspeed_mem.activation.records import STAYS, OverwrittenError
from mindspeed_mem.activation.replay import TAKE_OUT, MadeBy, Replay, once
from mindspeed_mem.activation.saved import SavedTensors
from mindspeed_mem.activation.tape import MANAGED, Tape
from mindspeed_mem.activation.trial import Operator, Trial, Trials


class RecomputedRegions(SavedTensors):
    """At most one recomputed operator runs at a time: the outermost that the plan names."""

    def __init__(self, device_type: str, counting: bool):
        super().__init__(device_type, counting)
        self.recomputes = False
        self._hooked = False  # our hook is in force: what is dropped can be made again
        self._modules: set[tuple[int, str]] = set()  # operators that are modules; the rest is inline code
        self._tape_depth = 0  # how many regions were running when the tape started, its own included
        self._tried: dict[tuple[int, str], bool] = {}  # inline operators: whether their tape repeats them
        self.trials = Trials()
        self.partners: frozenset[int] = frozenset()
        """The ranks with which this one runs collectives inside layers."""
        self._judged: set[int] = set()  # model chunks whose recomputed operators have been looked at
        self._ran: set[str] | None = set()  # who asked for what has run so far; None once that has been looked at

    def forget_runs(self) -> None:
        """Another plan comes into force: what earlier runs showed is no longer of interest."""
        self.recomputes = False
        self._tried, self._judged, self._ran = {}, set(), set()

    def _to_recompute(self, layer: int, path: str) -> bool:
        """Whether the operator that is about to start is to run again in backward."""
        if not self.recomputes or not self._hooked or not 0 <= layer < self.num_layers:
            return False
        wanted = self.plan.recompute(layer, path)
        if wanted is None or type(self._region) is Replay:
            return False
        if self._ran is not None:
            self._ran.add(wanted.entry)
        if not regions.may_save():
            self.notes.add(
                f"{wanted.entry} has no effect on {path or 'the layer'}", layer, "it is under another checkpoint there"
            )
            return False
        return True

    def once(self, make: Callable[[], Any]) -> Any:
        """What ``make()`` returns, and in an operator's second run what it returned in the first."""
        return once(self._region if type(self._region) is Replay else None, make)

    def _under_another_checkpoint(self, layer: int) -> None:
        for entry in self.plan.recompute_entries(layer):
            if self._ran is not None:
                self._ran.add(entry)
            self.notes.add(f"{entry} has no effect", layer, "it is under another checkpoint there")

    def _starts_from_managed(self, layer: int, path: str, args: tuple, kwargs: dict) -> bool:
        """Whether somebody else empties and refills an input in place: it may not be there when it is needed."""
        plain = (t.untyped_storage() for t in tensors_in((args, kwargs)) if t.layout is torch.strided)
        found = any(hasattr(storage, "_mem_managed") for storage in plain)
        if found:
            self.notes.add(f"recompute has no effect on {path or 'the layer'}", layer, MANAGED)
        return found

    # ---- modules and functions
    def _replayed(
        self,
        layer: int,
        path: str,
        call: Callable,
        args: tuple,
        kwargs: dict,
        begin: Callable,
        of: Operator,
        state: Any = None,
    ):
        """Run ``call`` as an operator to be recomputed. ``begin()`` starts its region, once its inputs are held."""
        self._about_to_run = layer, path
        frame = self._frame
        given = [(tensor, tensor._version) for tensor in tensors_in((args, kwargs))]
        training = of.training()
        verdict = of.verdict(training)
        places = None if verdict is None else verdict.places
        replay = Replay(layer, path, call, args, kwargs, self._hold, state, training, places)
        trial = Trial(of, replay, self.partners, self._device_type) if verdict is None else contextlib.nullcontext()
        begin()
        replay.number, replay.mover = frame.count, self.mover
        replay.stream = self.mover.backend.current_stream()
        self._region = replay
        try:
            with trial:
                result = call(*args, **kwargs)
        finally:
            self._region = None
        replay.ends()
        if verdict is None:
            trial.settle(result if path else None, any(tensor.numel() for tensor, _ in given) or not given)
            if replay.why_not:
                self.notes.add(f"recompute has no effect on {path or 'the layer'}", layer, replay.why_not)
                return result
        elif any(tensor._version != version for tensor, version in given):
            raise OverwrittenError(f"{replay} changes its input in place, so it cannot run again. {TAKE_OUT}")
        replay.returns(result if path else None, frame)  # what a whole layer returns stays
        if not given or any(tensor.numel() for tensor, _ in given):  # an expert may be without tokens
            frame.recomputed.append((layer, path, weakref.ref(replay)))
        return result

    def run_fused(self, call: Callable, args: tuple, kwargs: dict) -> Any:
        """Run a function that may be compiled: no tape can look into it, so it becomes a region of its own."""
        tape = self._region
        if self._counting:
            layer, path, inline = self._stack[-1] if self._stack else (-1, "", False)
            return self.census.watch.run_fused((layer, path) if inline else None, call, args, kwargs)
        if type(tape) is not Tape:
            return call(*args, **kwargs)
        self._suspend()
        try:
            of = self.trials.operator(tape.layer, tape.op, call)
            if of.refused():
                return call(*args, **kwargs)
            return self._replayed(tape.layer, tape.op, call, args, kwargs, lambda: None, of)
        finally:
            self._resume(tape)

    def _keep_output(self, result: Any) -> None:
        """What a layer returns stays: the next layers would have to run this one again, and all before it."""
        for leaf in tensors_in(result) if self.recomputes else ():
            if type(leaf) is torch.Tensor and leaf.layout is torch.strided:
                storage = leaf.untyped_storage()
                made_by = getattr(storage, "_mem_made_by", None)
                if made_by is not None:
                    made_by.replay.forgets(made_by.slot)
                    del storage._mem_made_by

    # ---- inline code
    def _start_tape(self, layer: int, path: str) -> None:
        if (
            self._region is None
            and (layer, path) not in self._modules
            and self._tried.get((layer, path), True)
            and self._to_recompute(layer, path)
        ):
            self._region = Tape(layer, path, self._frame.count, self._device_type)
            self._region.stream = self.mover.backend.current_stream()
            self._tape_depth = len(self._stack)
            self._region.__enter__()

    def _stop_tape(self, depth: int) -> None:
        """The region above ``depth`` ends as it should: if a tape runs there, drop what it can make again."""
        tape = self._region
        if type(tape) is not Tape or self._tape_depth <= depth:
            return
        self._suspend()
        if self._tape_depth != depth + 1:  # it was left without its marker: nobody knows where it ended
            return
        self._about_to_run = tape.layer, tape.op
        key = tape.layer, tape.op
        alive = tape.finish(self._hold, try_out=key not in self._tried)
        if tape.why_not or any(storage.nbytes() for storage, _ in alive):  # nothing shows nothing
            self._tried[key] = not tape.why_not
        if tape.why_not:
            self.notes.add(f"recompute has no effect on {tape.op}", tape.layer, tape.why_not)
            return
        for storage, number in alive:
            mark = getattr(storage, "_mem", None)
            record = mark() if isinstance(mark, weakref.ref) else None
            if record is not None:
                tape.makes(number, record)
                record.drop_for(tape)
            elif mark is None:
                storage._mem_made_by = MadeBy(tape, number)
        if not alive or any(storage.nbytes() for storage, _ in alive):
            self._frame.recomputed.append((*key, weakref.ref(tape)))

    def _cut_tape(self, depth: int) -> None:
        """What runs above ``depth`` is abandoned."""
        if type(self._region) is Tape and self._tape_depth > depth:
            self._suspend()

    def _suspend(self) -> None:
        tape, self._region = self._region, None
        tape.__exit__(None, None, None)

    def _resume(self, tape: Tape) -> None:
        tape.__enter__()
        self._region = tape

    # ---- what came of it
    def _say_what_never_ran(self) -> None:
        """After a training step: which entries name only operators that these layers turned out not to run."""
        if not self.recomputes or self._ran is None:
            return
        for layer in {layer for layer, _ in self._modules}:
            for entry in self.plan.recompute_entries(layer) - self._ran:
                self.notes.add(f"{entry} has no effect", layer, "none of the operators that it names has run")
        self._ran = None
        self.notes.flush()

    def _judge(self, frame: Frame) -> None:
        """Say which recomputed operators free nothing, or no more than inputs take that nobody else keeps."""
        if frame.key[1] in self._judged or not frame.recomputed:
            return
        self._judged.add(frame.key[1])
        runs = [(key, replay) for *key, ref in frame.recomputed if (replay := ref()) is not None]
        aliases = Counter(id(handle.alias.untyped_storage()) for _, replay in runs for handle in replay.held())
        freed = dict.fromkeys(((layer, path) for layer, path, _ in frame.recomputed), 0)
        taken = Counter()
        for key, replay in runs:
            freed[tuple(key)] += sum(record.nbytes for record in replay.records())
            for handle in replay.held():
                storage = handle.alias.untyped_storage()
                mine = aliases.pop(id(storage), 0)  # once for all that hold it
                stays = handle.record is None or handle.record.distance == STAYS
                if mine and stays and not _held_elsewhere(storage, mine):
                    taken[tuple(key)] += storage.nbytes()
        for (layer, path), nbytes in freed.items():
            if nbytes <= taken[layer, path]:
                why = "backward keeps nothing that it produces"
                if nbytes:
                    why = f"it frees {nbytes} bytes, and its inputs, kept for nothing else, take {taken[layer, path]}"
                self.notes.add(f"recompute of {path or 'the layer'} saves nothing", layer, why)


def _held_elsewhere(storage: torch.UntypedStorage, aliases: int) -> bool:
    """Whether anything holds it besides ``aliases`` tensors and the Python object for it."""
    return torch._C._storage_Use_Count(storage._cdata) > aliases + 1
