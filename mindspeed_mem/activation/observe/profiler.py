"""Measures a few training calls: what operators keep, read and make, how long they take, and what memory they need.

The first call counts (`Census`), which slows it down, so that its times are thrown away. The next finds how much memory
is needed beyond activations, which costs time at every operator. The last is timed.
"""

from __future__ import annotations

import contextlib
import gc
from statistics import median
from typing import TYPE_CHECKING

import torch

from mindspeed_mem.activation.observe.census import Census
from mindspeed_mem.activation.observe.engine_cost import measure_host_cost
from mindspeed_mem.activation.observe.observed_ops import OUTSIDE, Node
from mindspeed_mem.activation.observe.outside_layers import OutsideBytes
from mindspeed_mem.activation.observe.put_off import PutOff
from mindspeed_mem.activation.observe.rank_profile import ChunkProfile, OperatorProfile, Outside, RankProfile
from mindspeed_mem.activation.observe.stopwatch import COPIES, PassTimes, Stopwatch
from mindspeed_mem.activation.observe.temporaries import Temporaries
from mindspeed_mem.passes import BACKWARD, FORWARD, WEIGHT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mindspeed_mem.activation.engine import Engine
    from mindspeed_mem.activation.storage.records import Handle
    from mindspeed_mem.device.link_speed import LinkSpeed

_TIMED = 2  # calls: one that is cut into intervals for their memory as well, and one that is not
CALLS = 1 + _TIMED
"""That are profiled in all."""
_ALIKE = 1.05  # the first of them counts, too, if it took no more than this times as long


class _Watch(Stopwatch):
    """Notices a backward that nobody tells of: what a model returned was no tensor that could be found."""

    untold: Callable[[tuple[int | None, int]], None]
    """Called at the first unpack of each."""

    def unpacks(self, kept: Handle) -> None:
        if self.forward is None and self.backward is None:
            key = self._saved.get(kept, (None,))[0]
            if key is not None:
                self.untold(key)
        super().unpacks(kept)

    @property
    def backward(self) -> tuple[int | None, int] | None:
        """Micro-batch and chunk of the backward that runs; None if none does."""
        now = self._pass
        return now.key if now is not None and now.direction == BACKWARD else None


class Profiler:
    """Attached to an engine from its making until it is `done`, or until `detach`.

    Whoever trains calls `begin_call` and `end_call` around each training call; the engine tells of passes.
    """

    def __init__(self, engine: Engine):
        """``engine`` survives (it has records of all that is saved)."""
        if engine.observation.profiler is not None:
            raise RuntimeError("this engine is being profiled already: detach that profiler first")
        assert engine.survival is not None
        self._engine, self._backend, self._observation = engine, engine.backend, engine.observation
        self._mover, self._policy = engine.survival.mover, engine.survival.policy
        self._census: Census | None = None  # complete
        self._memory: Temporaries | None = None  # of a complete call
        self._timed: list[Stopwatch] = []
        self._outside, self._put_off = OutsideBytes(), PutOff()
        self._between: list[float] = []
        self._now: _Watch | None = None
        self._cutting: Temporaries | None = None
        self._ended: object = None
        # What there was before the last call, and how many had been timed.
        self._before: tuple[Census | None, Temporaries | None, int] = None, None, 0
        self.unseen = 0
        """Calls that were completed and of whose backwards nobody told."""
        self._observation.profiler = self

    @property
    def done(self) -> bool:
        """Whether everything has been measured."""
        return len(self._timed) == _TIMED

    def detach(self) -> None:
        """Leave nothing on the engine; what has been measured stays here."""
        self._stop()
        if self._observation.profiler is self:
            self._observation.profiler = None

    # ---- calls and passes
    def begin_call(self) -> None:
        """A training call begins: forwards and backwards up to the optimizer."""
        self._stop()
        if self._ended is not None:
            self._between.append(self._backend.seconds_between(self._ended, self._backend.timestamp()))
        self._ended, self._before = None, (self._census, self._memory, len(self._timed))
        if self.done:
            return
        if self._census is None:
            self._observation.census = Census(self._engine.position.running, self._backend.tensor_type)
        elif self._memory is None:
            self._policy.note_peak()
            gc.collect()  # garbage is not there all the time
            self._cutting = Temporaries(self._backend)
        self._now = self._observation.stopwatch = _Watch(
            self._backend, self._engine.in_force.num_layers, self._boundary if self._cutting is not None else None
        )
        self._now.untold = self._untold
        self._mover.copying = self._now.copying

    def skips_call(self) -> None:
        """One begins that is not to be measured, nor what lies between that and others."""
        self._ended = None

    def begin_again(self) -> None:
        """The call that runs is run once more from its beginning: only that is measured."""
        if self._now is not None:
            self.end_call(completed=False)
            self.begin_call()

    def end_call(self, completed: bool) -> None:
        """It has ended; one that is not ``completed`` (an exception) is forgotten and measured once more."""
        now, cut = self._now, self._cutting
        if now is None:
            return
        if cut is not None:
            cut.operator_ends(movable=False, ran=now.name(OUTSIDE))
        census = self._stop()
        now.finish()
        if not completed or not any(one.direction == BACKWARD for one in now.passes):
            self.unseen += completed
            return
        if self._census is None:
            self._census = census
        else:
            self._memory = self._memory or cut
            self._timed.append(now)
        self._ended = self._backend.timestamp()

    def forget_last(self) -> None:
        """The call that has ended was none to be measured: another one is."""
        self._census, self._memory, calls = self._before
        del self._timed[calls:]
        self._ended = None

    def begin_pass(self, direction: str, key: tuple[int | None, int]) -> None:
        """A forward or backward of micro-batch and chunk ``key`` begins."""
        if self._now is not None:
            self._now.begin(direction, key)
            if direction == BACKWARD:
                self._put_off.begin(key[1])

    def _untold(self, key: tuple[int | None, int]) -> None:
        """Something reads what forward ``key`` saved, and nobody has told that its backward begins."""
        if not self._engine.passes.scheduled and torch._C._current_graph_task_id() != -1:
            self.begin_pass(BACKWARD, key)
            torch.autograd.Variable._execution_engine.queue_callback(self.end_pass)

    def end_pass(self) -> None:
        if self._now is not None:
            if self._now.forward is not None:
                self._outside.count(self._now, self._engine.in_force.num_layers, keep=self._census is not None)
            self._now.end()

    def begin_weights(self, key: tuple[int | None, int] | None) -> None:
        """The gradients of weights of the pass ``key`` (None: of the backward that runs, or ran last) are computed."""
        if self._now is not None and (key := key or self._now.latest) is not None:
            self._now.end()
            self._now.begin(WEIGHT, key)

    def puts_off(self, read: Handle | None, holds: Sequence[torch.Tensor]) -> Node:
        """A backward has put off the gradient of a weight, made from what ``read`` is of and from ``holds``; returns
        whose weight it is."""
        if self._now is None:
            return OUTSIDE
        node = self._now.saver(read)
        if not self._now.in_layers(node):
            node = OUTSIDE
        if read is not None and self._observation.census is not None:
            self._observation.census.for_weights(read)
        self._put_off.add(node, read, holds)
        return node

    def makes_weights(self, node: Node) -> None:
        """Those of this operator come now."""
        if self._now is not None:
            self._now.makes_weights(node)

    def _boundary(self, ran: Node, runs: Node) -> None:
        assert self._cutting is not None and self._now is not None
        name = self._now.name(ran)
        if runs == COPIES:
            self._cutting.copies_begin(name)
        elif ran == COPIES:
            self._cutting.copies_end()
        else:
            self._cutting.operator_ends(movable=self._now.in_layers(ran), ran=name)

    def _stop(self) -> Census | None:
        """Take everything off the engine that a call needs; returns its census."""
        if self._cutting is not None:
            self._policy.note_peak(self._cutting.peak)
        self._now = self._cutting = self._observation.stopwatch = None
        self._mover.copying = contextlib.nullcontext
        return self._observation.stop_census()

    # ---- figures
    def rank_profile(self, stage: int, link: LinkSpeed) -> RankProfile:
        """What has been measured, for pipeline stage ``stage``. Raises RuntimeError before all of it `is done <done>`.

        Times are medians over micro-batches. Where evaluations ran between two training calls, the shortest time
        between such calls counts.
        """
        if not self.done or self._memory is None or self._census is None:
            raise RuntimeError(f"{CALLS - len(self._timed)} more training calls are needed before there is a profile")
        passes = self.passes
        return RankProfile(
            stage=stage,
            chunks=tuple(self._chunk(chunk, passes, self._census) for chunk in sorted({one.chunk for one in passes})),
            static_bytes=self._memory.static,
            temporary_bytes=self._memory.most,
            step_seconds=min(self._between, default=0.0),
            link=link,
            host=measure_host_cost(self._backend),
        )

    @property
    def passes(self) -> list[PassTimes]:
        """The passes whose times count, in order."""
        first, second = (watch.passes for watch in self._timed)
        alike = sum(one.total for one in first) <= _ALIKE * sum(one.total for one in second)
        return [*first, *second] if alike else second

    def _chunk(self, chunk: int, passes: list[PassTimes], census: Census) -> ChunkProfile:
        each = (
            [one for one in passes if one.chunk == chunk and one.direction == way]
            for way in (FORWARD, BACKWARD, WEIGHT)
        )
        forwards, backwards, weights = each
        nodes = list(dict.fromkeys(node for one in forwards for node in one.operators))

        assert self._memory is not None
        most = self._memory.by

        waits = self._put_off.most(chunk)

        def temporary(what: object) -> dict[str, int]:
            backward = max(most.get((one, what), 0) for one in (BACKWARD, WEIGHT))
            return {"forward_temporary_bytes": most.get((FORWARD, what), 0), "backward_temporary_bytes": backward}

        def outside(where: str, counts: dict[int, int]) -> Outside:
            each = ([getattr(one, where) for one in some] for some in (forwards, backwards, weights))
            forward, backward, later = (median(some) if some else 0.0 for some in each)
            return Outside(
                forward_seconds=forward,
                backward_seconds=backward + later,
                bytes=counts.get(chunk, 0),
                weight_seconds=later,
                weight_bytes=waits.get(OUTSIDE, 0) if where == "after" else 0,
                gradient_bytes=self._put_off.gradients[chunk] if where == "after" else 0,
                **temporary((where, chunk)),
            )

        return ChunkProfile(
            layers=tuple(sorted({layer for layer, _ in nodes})),
            operators=tuple(
                OperatorProfile(
                    layer=layer,
                    op=op,
                    forward_seconds=_median((layer, op), forwards),
                    backward_seconds=_median((layer, op), backwards) + _median((layer, op), weights),
                    weight_seconds=_median((layer, op), weights),
                    weight_bytes=waits.get((layer, op), 0),
                    **temporary((layer, op)),
                )
                for layer, op in nodes
            ),
            storages=tuple(census.storages(chunk)),
            dataflow=census.dataflow(chunk),
            before=outside("before", self._outside.before),
            after=outside("after", self._outside.after),
        )


def _median(node: Node, passes: list[PassTimes]) -> float:
    return median(one.operators.get(node, 0.0) for one in passes) if passes else 0.0
