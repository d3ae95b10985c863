"""Where recomputed operators begin and end in the forward: which runs become a `ModuleRerun`, and which a `Tape`."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from mindspeed_mem.activation import regions
from mindspeed_mem.activation.no_effect_log import NoEffectLog
from mindspeed_mem.activation.plan_in_force import PlanInForce
from mindspeed_mem.activation.position import Position
from mindspeed_mem.activation.rerun import module_rerun
from mindspeed_mem.activation.rerun.arguments import tensors_in
from mindspeed_mem.activation.rerun.module_rerun import TAKE_OUT, ModuleRerun
from mindspeed_mem.activation.rerun.second_run import MadeBy
from mindspeed_mem.activation.rerun.state import Called
from mindspeed_mem.activation.rerun.tape import MANAGED, Programs, Tape
from mindspeed_mem.activation.rerun.trial import Trial, Trials, TriedOperator, in_managed_memory
from mindspeed_mem.activation.saved_tensors import SavedTensors
from mindspeed_mem.activation.storage import marks
from mindspeed_mem.activation.storage.micro_batch import MicroBatch
from mindspeed_mem.activation.storage.mover import Mover
from mindspeed_mem.activation.storage.records import STAYS, OverwrittenError, local_of, version_of


class SecondRuns:
    """At most one recomputed operator runs at a time: the outermost that the plan names."""

    def __init__(
        self, position: Position, in_force: PlanInForce, mover: Mover, saved: SavedTensors, no_effect: NoEffectLog
    ):
        self._position, self._in_force, self._mover, self._saved = position, in_force, mover, saved
        self._no_effect = no_effect
        self.hooked = False
        """Our hook is in force: what is dropped can be made again."""
        self.trials = Trials()
        self._tape_depth = 0  # how many operators were running when the tape started, its own included
        self._tried: dict[tuple[int, str], Programs] = {}  # inline operators: what their tapes repeat
        self._kept: set[tuple[int, str]] = set()  # those whose tapes do not repeat them
        self._judged: set[int] = set()  # model chunks whose recomputed operators have been looked at
        self._ran: set[str] | None = set()  # who asked for what has run so far; None once that has been looked at

    def forget(self) -> None:
        """Another plan comes into force: what earlier runs showed is no longer of interest."""
        self._tried, self._kept, self._judged, self._ran = {}, set(), set(), set()

    # ---- which operators
    def operator(
        self, layer: int, path: str, call: Callable, args: tuple, kwargs: dict, state: Any
    ) -> TriedOperator | None:
        """What is known of the operator that is about to start, if it is to run again in backward."""
        if not self._wanted(layer, path):
            return None
        if in_managed_memory((args, kwargs)):
            self._no_effect.add(f"recompute has no effect on {path or 'the layer'}", layer, MANAGED)
            return None
        of = self.trials.operator(layer, path, call, state)
        return None if of.refused() else of

    def _wanted(self, layer: int, path: str) -> bool:
        in_force = self._in_force
        if not in_force.recomputes or not self.hooked or not 0 <= layer < in_force.num_layers:
            return False
        wanted = in_force.recompute(layer, path)
        if wanted is None or type(self._position.rerun) is ModuleRerun:
            return False
        if not regions.hooks_may_be():
            return False
        if self._ran is not None:
            self._ran.add(wanted.entry)
        if not regions.may_save():
            stack = self._position.stack
            if not stack or in_force.recompute(*stack[-1][:2]) is None:  # else what contains it has been told
                why = "it is under another checkpoint there"
                self._no_effect.add(f"{wanted.entry} has no effect on {path or 'the layer'}", layer, why)
            return False
        return True

    def once(self, make: Callable[[], Any]) -> Any:
        """What ``make()`` returns, and in an operator's second run what it returned in the first.

        For what is another value by then, such as a count over micro-batches, or takes other ranks to find.
        """
        again = module_rerun.running()
        if again is not None:
            return again.noted_before()
        value, rerun = make(), self._position.rerun
        if type(rerun) is ModuleRerun:
            rerun.noted.append(value)
        return value

    def under_another_checkpoint(self, layer: int) -> None:
        """This layer runs before its backward, or again in it, by somebody else's checkpoint."""
        for entry in self._in_force.the_plan.recompute_entries(layer):
            if self._ran is not None:
                self._ran.add(entry)
            self._no_effect.add(f"{entry} has no effect", layer, "it is under another checkpoint there")

    # ---- modules and functions
    def run(
        self,
        layer: int,
        path: str,
        call: Callable,
        args: tuple,
        kwargs: dict,
        begin: Callable[[], None],
        of: TriedOperator,
        state: Any = None,
    ) -> Any:
        """Run ``call`` as an operator to be recomputed. ``begin()`` starts it, once its inputs are held."""
        position = self._position
        position.about_to_run = layer, path
        micro_batch = position.micro_batch
        assert micro_batch is not None
        given = tensors_in((args, kwargs))
        versions = [0 if tensor.is_inference() else tensor._version for tensor in given]  # as `version_of`
        settings, flags, verdict, program = of.as_it_is()
        places = None if verdict is None else verdict.places
        rerun = ModuleRerun(layer, path, self._mover, call, args, kwargs, self._saved.hold, state, settings, places)
        if program is not None and position.watch is None and self._saved.may_drop():
            rerun.saved.program = program
        trial = None
        if verdict is None:
            trial = Trial(of, flags, rerun, self._in_force.partners, self._mover.backend.tensor_type)
        begin()
        rerun.number = micro_batch.count
        position.rerun, position.known = rerun, rerun.saved.program is not None
        try:
            if trial is None:
                result = call(*args, **kwargs)
            else:
                with trial:
                    result = call(*args, **kwargs)
        finally:
            position.rerun, position.known = None, False
        rerun.ends(verdict is not None and verdict.draws)
        if trial is not None:
            trial.settle(result if path else None, any(tensor.numel() for tensor in given) or not given)
            if rerun.why_not:
                self._no_effect.add(f"recompute has no effect on {path or 'the layer'}", layer, rerun.why_not)
                return result
        elif list(map(version_of, given)) != versions:
            self._changes_input(rerun)
        if trial is None and not self._saved.every_record:
            of.ran(flags, rerun.saved)
        rerun.returns(result if path else None, micro_batch)  # what a whole layer returns stays
        if not given or any([tensor.numel() for tensor in given]):  # an expert may be without tokens
            micro_batch.recomputed.append((layer, path, weakref.ref(rerun)))
        return result

    def _changes_input(self, rerun: ModuleRerun) -> NoReturn:
        raise OverwrittenError(f"{rerun} changes its input in place, so it cannot run again. {TAKE_OUT}")

    def run_fused(self, call: Callable, args: tuple, kwargs: dict) -> Any:
        """Run a function that may be compiled: no tape can look into it, so it becomes an operator of its own."""
        tape = self._position.rerun
        if type(tape) is not Tape:
            return call(*args, **kwargs)
        with self.without(tape):
            of = self.trials.operator(tape.layer, tape.op, call)
            if of.refused():
                return call(*args, **kwargs)
            return self.run(tape.layer, tape.op, call, args, kwargs, lambda: None, of)

    def stays(self, result: Any) -> None:
        """What a layer returns stays: the next layers would have to run this one again, and all before it."""
        for leaf in map(local_of, tensors_in(result)):
            if type(leaf) is torch.Tensor and leaf.layout is torch.strided:
                found = marks.known(leaf.untyped_storage())
                if found is not None and found.made_by is not None:
                    found.made_by.rerun.stays(found.made_by.slot)
                    found.made_by = None

    stays_slowly = stays  # where the other is in C++

    # ---- inline code
    def start_tape(self, layer: int, path: str) -> None:
        """Inline operator ``path`` starts, outside of all that runs again."""
        position, micro_batch = self._position, self._position.micro_batch
        if (
            micro_batch is not None
            and (layer, path) not in self._in_force.modules
            and (layer, path) not in self._kept
            and self._wanted(layer, path)
        ):
            called = None if self._tried.get((layer, path)) else Called()
            tape = Tape(layer, path, micro_batch.count, self._mover, called)
            self._tape_depth = len(position.stack)
            self._resume(tape)

    def stop_tape(self, depth: int) -> None:
        """What runs above ``depth`` ends as it should: if a tape runs there, drop what it can make again."""
        position, micro_batch = self._position, self._position.micro_batch
        tape = position.rerun
        if type(tape) is not Tape or self._tape_depth <= depth:
            return
        self._suspend(tape)
        if self._tape_depth != depth + 1:  # it was left without its marker: nobody knows where it ended
            return
        key = position.about_to_run = tape.layer, tape.op
        alive = tape.finish(self._saved.hold, self._tried.setdefault(key, {}))
        if alive is None:  # all stays this time
            return
        if tape.why_not:
            self._kept.add(key)
            self._no_effect.add(f"recompute has no effect on {tape.op}", tape.layer, tape.why_not)
            return
        for storage, number in alive:
            found = marks.of(storage)
            record = found.record() if found.record is not None else None
            if record is not None:
                tape.makes(number, record)
                tape.take_if_kept(record)
            elif found.record is None and not found.stays:
                found.made_by = MadeBy(tape, number)
        if micro_batch is not None and (not alive or any(storage.nbytes() for storage, _ in alive)):
            micro_batch.recomputed.append((*key, weakref.ref(tape)))

    def cut_tape(self, depth: int) -> None:
        """What runs above ``depth`` is abandoned."""
        tape = self._position.rerun
        if type(tape) is Tape and self._tape_depth > depth:
            self._suspend(tape)

    @contextlib.contextmanager
    def without(self, tape: Tape) -> Iterator[None]:
        """Inside, what runs is no part of ``tape``."""
        self._suspend(tape)
        try:
            yield
        finally:
            self._resume(tape)

    def _suspend(self, tape: Tape) -> None:
        self._position.rerun = None
        if tape.called is not None:
            tape.called.__exit__()
        tape.__exit__(None, None, None)

    def _resume(self, tape: Tape) -> None:
        tape.__enter__()
        if tape.called is not None:
            tape.called.__enter__()
        self._position.rerun = tape

    # ---- what came of it
    def say_what_never_ran(self) -> None:
        """After training: which entries name only operators that these layers turned out not to run."""
        in_force = self._in_force
        if not in_force.recomputes or self._ran is None or in_force.plan is None:
            return
        layers = {layer for layer, _ in in_force.modules}
        for layer in layers:
            for entry in in_force.plan.recompute_entries(layer) - self._ran:
                self._no_effect.add(f"{entry} has no effect", layer, "none of the operators that it names has run")
        self._ran = None
        self._no_effect.flush()

    def judge(self, micro_batch: MicroBatch) -> None:
        """Say which recomputed operators free nothing, or no more than inputs take that nobody else keeps."""
        if micro_batch.key[1] in self._judged or not micro_batch.recomputed:
            return
        self._judged.add(micro_batch.key[1])
        runs = [((layer, path), rerun) for layer, path, ref in micro_batch.recomputed if (rerun := ref()) is not None]
        held = {id(rerun): [one for one in rerun.held() if one.alias.layout is torch.strided] for _, rerun in runs}
        aliases = Counter(id(handle.alias.untyped_storage()) for _, rerun in runs for handle in held[id(rerun)])
        freed = dict.fromkeys(((layer, path) for layer, path, _ in micro_batch.recomputed), 0)
        taken: Counter[tuple[int, str]] = Counter()
        for key, rerun in runs:
            freed[key] += sum(record.nbytes for record in rerun.records())
            for handle in held[id(rerun)]:
                storage = handle.alias.untyped_storage()
                mine = aliases.pop(id(storage), 0)  # once for all that hold it
                stays = handle.record is None or handle.record.distance == STAYS
                if mine and stays and not _held_elsewhere(storage, mine):
                    taken[key] += storage.nbytes()
        for (layer, path), nbytes in freed.items():
            if nbytes <= taken[layer, path]:
                why = "backward keeps nothing that it produces"
                if nbytes:
                    why = f"it frees {nbytes} bytes, and its inputs, kept for nothing else, take {taken[layer, path]}"
                self._no_effect.add(f"recompute of {path or 'the layer'} saves nothing", layer, why)


def _held_elsewhere(storage: torch.UntypedStorage, aliases: int) -> bool:
    """Whether anything holds it besides ``aliases`` tensors and the Python object for it."""
    return torch._C._storage_Use_Count(storage._cdata) > aliases + 1
