"""The passes of micro-batches: which one runs, what comes next, and what is decided at their beginnings and ends."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from mindspeed_mem.activation import regions
from mindspeed_mem.activation.idle_time import IdleTime
from mindspeed_mem.activation.in_flight import MicroBatchesInFlight
from mindspeed_mem.activation.native_operators import NativeOperators
from mindspeed_mem.activation.never_seen import NeverSeen
from mindspeed_mem.activation.no_effect_log import NoEffectLog
from mindspeed_mem.activation.observe.observation import Observation
from mindspeed_mem.activation.plan_in_force import PlanInForce
from mindspeed_mem.activation.position import Position
from mindspeed_mem.activation.second_runs import SecondRuns
from mindspeed_mem.activation.stage_balance import StageBalance
from mindspeed_mem.activation.storage.auto_distance import AutoDistances
from mindspeed_mem.activation.storage.ledger import LEDGER
from mindspeed_mem.activation.storage.micro_batch import MicroBatch
from mindspeed_mem.activation.storage.mover import Mover
from mindspeed_mem.activation.storage.pinned import PinnedWatch
from mindspeed_mem.activation.storage.records import Record
from mindspeed_mem.passes import BACKWARD, FORWARD, Pass

logger = logging.getLogger(__name__)


class Passes:
    """Told by a schedule when passes begin and end; without one, each run through the layers is a pass."""

    def __init__(
        self,
        position: Position,
        in_flight: MicroBatchesInFlight,
        in_force: PlanInForce,
        mover: Mover,
        auto: AutoDistances,
        second_runs: SecondRuns,
        observation: Observation,
        no_effect: NoEffectLog,
        natives: NativeOperators,
    ):
        self._position, self._in_flight, self._in_force, self._mover = position, in_flight, in_force, mover
        self._auto, self._second_runs = auto, second_runs
        self._observation, self._no_effect, self._natives = observation, no_effect, natives
        self.pinned, self.balance, self._idle_time = PinnedWatch(), StageBalance(), IdleTime(mover, in_force)
        self.scheduled = False
        """A schedule says when micro-batches begin and end."""
        self._stage: int | None = None  # of a pipeline that trains
        self._at_once: set[tuple[int | None, int]] = set()  # forwards with their backward next
        self._departed = False
        self._of_output: dict[int, tuple[tuple[int | None, int], weakref.ref[torch.Tensor]]] = {}
        self.operators_of: Counter[int] = Counter()
        """How many operators run forward in each model chunk, as far as one has run."""
        self.given: Callable[[tuple, Mapping[str, Any]], None] | None = None
        """Whoever wants to know what forwards without a schedule are given."""
        self.layer_given: Callable[[tuple, Mapping[str, Any]], None] | None = None
        """Whoever wants to know what layers are given in a schedule."""
        self._alone = 0  # forwards without a schedule so far
        self._thread: int | None = None  # in which one of them runs
        self._never_seen = NeverSeen(in_force, second_runs, no_effect)
        self._trains = False  # whether the call of a schedule does

    def enter_layer(self, layer: int) -> None:
        """A layer is about to run."""
        entered = self._never_seen.entered
        if entered is not None:
            entered.add(layer)
        micro_batch = self._position.micro_batch
        if micro_batch is None or (not self.scheduled and layer <= micro_batch.last_layer):
            micro_batch = self._new((None, 0))
        micro_batch.last_layer = layer

    def _new(self, key: tuple[int | None, int]) -> MicroBatch:
        if not self.scheduled:
            self._auto.next_call()
            if (before := self._position.micro_batch) is not None:
                before.finish_forward()
                self._note_moved(before)
        micro_batch = self._position.micro_batch = MicroBatch(self._mover, key)
        self._in_flight.add(micro_batch)
        self._natives.begin()
        return micro_batch

    # ---- without a schedule
    @property
    def alone_so_far(self) -> int:
        """Forwards that `alone` has run, of those that keep something for backward."""
        return self._alone

    def alone(self, call: Callable[[], Any], nodes: Callable[[Any], Collection[Any]]) -> Any:
        """Run the forward of a whole model that no schedule runs: it is a pass of its own.

        Args:
            call: the forward.
            nodes: of what it returns those of the graph by which gradients can reach it. The first that they reach
                begins its backward.

        Raises RuntimeError where another thread is in the middle of one.
        """
        if self._thread not in (None, threading.get_ident()):
            raise RuntimeError(
                "the attached model runs forward in two threads at the same time; allowed: one after the other, or in "
                "the other thread a copy of the model made before attach"
            )
        if self.scheduled or self._in_force.idle or not regions.may_save():
            return call()
        self._alone += 1
        self.begin_forward(self._alone, 0)
        self.scheduled, self._thread = True, threading.get_ident()
        try:
            output = call()
            micro_batch = self._position.micro_batch
            self.end_forward(None)
            if micro_batch is not None:
                begins = self._beginning(micro_batch)
                for node in nodes(output):
                    node.register_prehook(begins)
            self._idle_time.say_without()
            self._never_seen.alone_ended()
            return output
        finally:
            self._abandon()
            self.scheduled, self._thread = False, None

    def _beginning(self, micro_batch: MicroBatch) -> Callable[[Any], None]:
        """What is called where gradients reach outputs of one forward, several of them in one backward."""
        begun = -1

        def begins(_: Any) -> None:
            nonlocal begun
            backward = torch._C._current_graph_task_id()
            if backward != begun or backward == -1:
                begun = backward
                self._backward_alone(micro_batch)

        return begins

    def _backward_alone(self, micro_batch: MicroBatch) -> None:
        """Gradients have reached the output of a forward that no schedule ran."""
        micro_batch.begin_backward()
        profiler = self._observation.profiler
        if profiler is not None:
            profiler.end_pass()  # of another forward that has the same backward
            profiler.begin_pass(BACKWARD, micro_batch.key)
            torch.autograd.Variable._execution_engine.queue_callback(profiler.end_pass)

    # ---- calls of a schedule
    def begin_schedule(
        self,
        key: tuple,
        passes: Sequence[Pass] | None = None,
        stage: int | None = None,
        gather: Callable[[Any], list] | None = None,
    ) -> None:
        """A schedule call begins.

        Args:
            key: what its order depends on.
            passes: its order on this rank, where that is known beforehand.
            stage: this rank's stage of a pipeline that trains; None: there is no pipeline, or nothing is trained.
            gather: collects an object from all ranks of the pipeline.
        """
        self._abandon()
        self._auto.next_call()
        self.scheduled, self._stage = True, stage
        self._trains = any(one[0] == BACKWARD for one in passes or ())
        self._in_flight.order.begin(key, passes)
        if stage is None and self._trains:
            self._idle_time.say_without()
        self._at_once = {one[1:] for one, after in pairwise(passes or ()) if after == (BACKWARD, *one[1:])}
        if stage is not None and self._in_force.pp_aware and self.balance.begin(key) and gather is not None:
            for line in self.balance.compare(gather):
                logger.info(line)

    def end_schedule(self, completed: bool) -> None:
        departed = self._in_flight.order.end(completed)
        if departed and not self._departed:
            self._departed = True
            logger.warning("the schedule left its known order (%s): what runs next is taken from records", departed)
        if completed and any(self.operators_of.values()):
            self._second_runs.say_what_never_ran()
        if completed and self._trains:
            self._never_seen.call_trained()
        if completed and self._stage is not None and self._in_force.pp_aware:
            peak = self._mover.backend.peak()
            self.balance.end(self._stage, LEDGER.held.highest if peak is None else peak)
        self._abandon()
        self.scheduled = False

    def _abandon(self) -> None:
        self._second_runs.cut_tape(0)
        self._position.leave()
        self._idle_time.pass_begins(None)
        self._of_output.clear()

    # ---- passes
    def begin_forward(self, micro_batch: int | None, chunk: int) -> None:
        """The forward of one micro-batch through one model chunk begins on this rank."""
        key = micro_batch, chunk
        now = self._new(key)
        if self._stage is not None and self._in_force.pp_aware:
            at_once = key in self._at_once
            now.stays = self.balance.stays(self._in_flight.staying(), at_once, bool(self._at_once))
        now.ahead = self._idle_time.pass_begins(self._backward_after((FORWARD, *key)))
        observed = self._observation
        observed.counting = observed.census if observed.census is not None and observed.census.wants(chunk) else None
        if observed.profiler is not None:
            observed.profiler.begin_pass(FORWARD, key)

    def forward_reaches(self, micro_batch: MicroBatch) -> None:
        """One more operator starts in a forward that a backward follows."""
        micro_batch.forward_reaches(self.operators_of[micro_batch.key[1]])

    def end_forward(self, output: Any) -> None:
        """It has ended, the loss included; ``output`` is what the schedule will hand to `begin_backward`."""
        micro_batch, self._position.micro_batch = self._position.micro_batch, None
        if micro_batch is None:
            return
        observed = self._observation
        if observed.profiler is not None:
            observed.profiler.end_pass()
        micro_batch.ahead = None
        micro_batch.finish_forward()
        as_expected = self._natives.finish(micro_batch)
        if self._never_seen.entered is not None and self._in_force.config.swap.swap:
            self._never_seen.forward_ended(micro_batch)
        self.operators_of[micro_batch.key[1]] = micro_batch.count
        first = first_of(output)
        if isinstance(first, torch.Tensor):
            self._of_output[id(first)] = micro_batch.key, weakref.ref(first)
            by_graph = micro_batch.native or self._in_force.watch_only or self._in_force.output_gradients
            if by_graph and first.grad_fn is not None:  # no handle may hold it, but the graph has to
                first.grad_fn.register_prehook(lambda _: micro_batch.begin_backward())
        moved, nbytes = self._note_moved(micro_batch)
        if as_expected:  # otherwise it is what ran natively that holds it
            self.pinned.check(moved, output, self._in_force.num_layers)
        away = LEDGER.without.now - LEDGER.held.now + self._mover.late.nbytes
        self.balance.passed(nbytes, away, len(self._in_flight))
        if observed.counting is not None:
            observed.counting.finish(micro_batch.key[1])
        if self._in_force.recomputes:
            self._second_runs.judge(micro_batch)
        self._no_effect.flush()
        self._idle_time.pass_ended()

    def _note_moved(self, micro_batch: MicroBatch) -> tuple[list[Record], int]:
        """A forward pass has ended: so much may be late of what it moved. Returns what of that is needed yet, and its
        bytes."""
        moved = micro_batch.those_moved()
        nbytes = sum([record.nbytes for record in moved])
        if not self._in_force.everything:
            self._mover.late.pass_moved(micro_batch.key[1], nbytes)
        return moved, nbytes

    def begin_backward(self, output: Any) -> None:
        """The backward of the pass that returned ``output`` begins."""
        first = first_of(output)
        found = self._of_output.pop(id(first), None)
        if found is None or found[1]() is not first:
            return
        key = found[0]
        now = self._position.micro_batch = self._in_flight.get(key)
        ahead = self._idle_time.pass_begins(self._backward_after((BACKWARD, *key)))
        self._idle_time.backward_begins()
        if now is not None:
            if self._observation.profiler is not None:
                self._observation.profiler.begin_pass(BACKWARD, key)
            now.ahead = ahead
            now.begin_backward()

    def end_backward(self) -> None:
        if self._observation.profiler is not None:
            self._observation.profiler.end_pass()
        if self._position.micro_batch is not None:
            self._position.micro_batch.native.drop()
        self._position.micro_batch = None
        self._mover.release_late()
        self._idle_time.pass_ended()

    def _backward_after(self, now: Pass) -> MicroBatch | None:
        """The micro-batch whose backward follows this pass, if its forward is complete."""
        coming = self._in_flight.order.advance(now)
        if coming is None or coming[0] != BACKWARD:
            return None
        micro_batch = self._in_flight.get(coming[1:])
        return micro_batch if micro_batch is not None and micro_batch.forward_done else None


def first_of(output: Any) -> Any:
    """Of what an operator or a model returns, the first."""
    return output[0] if isinstance(output, (list, tuple)) and output else output
