"""The engine: executes a memory plan on the activations that operators save for backward.

It is a handful of parts, each handed what it needs. `OperatorRuns` says which operator of which layer runs;
`SavedTensors` turns what autograd keeps into handles on records, one per storage; `MicroBatch` says when each record
leaves and comes back, and `Mover` copies; `SecondRuns` runs what the plan recomputes; `Passes` hears from the schedule.
`Survival` is there with --survive-oom only.
"""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch

from mindspeed_mem import ranks, reserve
from mindspeed_mem.activation import hot_path
from mindspeed_mem.activation import taking_over as taking_over  # whoever has an engine has its hot path
from mindspeed_mem.activation.figures import EngineFigures, OperatorFigures
from mindspeed_mem.activation.in_flight import MicroBatchesInFlight
from mindspeed_mem.activation.native_operators import NativeOperators
from mindspeed_mem.activation.no_effect_log import NoEffectLog
from mindspeed_mem.activation.observe.census import Census
from mindspeed_mem.activation.observe.observation import Observation
from mindspeed_mem.activation.operator_runs import OperatorRuns
from mindspeed_mem.activation.passes import Passes
from mindspeed_mem.activation.plan_in_force import PlanInForce
from mindspeed_mem.activation.position import Position
from mindspeed_mem.activation.rerun import rng
from mindspeed_mem.activation.saved_tensors import SavedTensors
from mindspeed_mem.activation.second_runs import SecondRuns
from mindspeed_mem.activation.storage.auto_distance import AutoDistances
from mindspeed_mem.activation.storage.ledger import LEDGER
from mindspeed_mem.activation.storage.mover import Mover
from mindspeed_mem.activation.storage.staying import smallest_worth
from mindspeed_mem.activation.survive.eviction import EvictingMover
from mindspeed_mem.activation.survive.survival import Survival, ask_before_failing
from mindspeed_mem.activation.wording import MEGATRON, Wording
from mindspeed_mem.device import Backend
from mindspeed_mem.device.extensions import unheeded
from mindspeed_mem.device.slabs import HostSlabs
from mindspeed_mem.patching import REGISTRY, dynamo
from mindspeed_mem.plan import MemoryConfig
from mindspeed_mem.plan.config import SwapConfig

logger = logging.getLogger(__name__)


class FollowsCalls(Protocol):
    """Whoever follows a run from training call to training call (`Adaptation`, which is of a room above)."""

    has_settled: bool
    """Has settled on a plan, once at least."""

    @property
    def is_over(self) -> bool:
        """Plans no more, on any rank: nobody has to tell of calls."""

    def begin(self, call: Any, ranks: Any, facts: Callable[[], dict[str, Any]]) -> None: ...

    def begin_again(self) -> None: ...

    def end(self, completed: bool, micro_batches: int | None = None) -> None: ...

    def report(self) -> tuple[tuple[str, ...], str]:
        """Lines on rank 0, and since when its figures count; empty: from the start."""


class Engine:
    """The parts of one process, put together.

    Args:
        config: what is swapped and recomputed.
        host_limit_bytes: how much activations may take on the host; None: no limit.
        watch_only: move nothing; every operator goes through handles, counted by a census, until forwards repeat it.
        survive: have a `Survival`.
        wording: what settings are called in messages.
    """

    def __init__(
        self,
        config: MemoryConfig,
        backend: Backend,
        host_limit_bytes: int | None = None,
        watch_only: bool = False,
        survive: bool = False,
        wording: Wording = MEGATRON,
    ):
        self.backend, self.wording = backend, wording
        rng.follow(backend)
        self._stalled_before = backend.stall_seconds()
        no_effect = NoEffectLog(lambda: self.in_force.tells)
        self.auto = AutoDistances(backend, lambda layer: self.in_force.the_plan.operators_in(layer))
        self.in_force = PlanInForce(config, self.auto, watch_only, all_layers=survive)
        self.position = position = Position()
        in_flight = MicroBatchesInFlight(position)
        slabs = HostSlabs(backend, host_limit_bytes)
        evicting = EvictingMover(backend, slabs, in_flight.turn) if survive else None
        self.mover = evicting or Mover(backend, slabs)
        self.mover.auto = self.auto
        self.observation = Observation(Census(position.running, backend.tensor_type) if watch_only else None)
        self.saved = saved = SavedTensors(
            position, self.in_force, self.mover, self.observation, no_effect, every_record=survive
        )
        self.second_runs = SecondRuns(position, self.in_force, self.mover, saved, no_effect)
        natives = NativeOperators(position, self.in_force)
        self.passes = Passes(
            position,
            in_flight,
            self.in_force,
            self.mover,
            self.auto,
            self.second_runs,
            self.observation,
            no_effect,
            natives,
        )
        self.operators = OperatorRuns(
            position, self.in_force, saved, self.second_runs, self.passes, self.observation, natives, self.resolve
        )
        self.survival = None if evicting is None else Survival(position, self.in_force, evicting, saved, wording)
        if evicting is not None:
            ask_before_failing(backend, _survival_of_the_moment)
        self.takes_asked = False
        """What is asked of single modules (asked.py) joins the plan."""
        self.adaptation: FollowsCalls | None = None
        """What finds a plan meanwhile, where that was asked for."""
        self.models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        """Those for which all ranks have made the plan."""
        self.attached_to: weakref.ref[torch.nn.Module] | None = None
        """The plain model that it was started for."""

    # ---- the plan
    def resolve(self, gather: Callable[[Any], list] | None = None, partners: Collection[int] = ()) -> None:
        """Make the plan, as `PlanInForce.resolve`."""
        self.in_force.resolve(gather, partners)
        swap, limit = self.in_force.config.swap, self.backend.nominal_limit()
        if swap.window_bytes is None:
            self.mover.late.allow(reserve.late_copies(limit or 0), all_of_it=False)
        else:
            self.mover.late.allow(swap.window_bytes, all_of_it=True)
        if swap.swap and swap.window_bytes and self.backend.copies_block and self.in_force.tells:
            line = f"swap_config.window_bytes has no effect: copies of {self.backend.type} are never late"
            self.in_force.tell(logging.WARNING, line)
        if swap.smallest_bytes is not None:
            self.mover.staying.smallest = swap.smallest_bytes
        elif swap.swap:
            self.mover.staying.smallest = smallest_worth(self.backend)
        if self.survival is not None:
            self.survival.knows_layers()
        self._settle()

    def look_everywhere(self, wanted: bool) -> None:
        """Look at all layers for now, whatever the plan selects, or no more. Not in the middle of a step."""
        self.in_force.look_everywhere(wanted)
        self._settle()

    def _settle(self) -> None:
        """What is wrapped around operators is there only if the plan has a use for it."""
        if in_use is self:
            (REGISTRY.rest if self.in_force.idle else REGISTRY.wake)()

    def adopt(
        self, config: MemoryConfig, gather: Callable[[Any], list], partners: Collection[int] = (), tell: bool = True
    ) -> None:
        """Execute another configuration from the next training step on. Collective, between two steps.

        Args:
            gather: collects an object from all ranks.
            partners: the ranks with which this one runs collectives inside layers.
            tell: log what the plan does, and what in it has no effect.

        Raises MemoryConfigError, on all ranks; there is no plan then.
        """
        self.second_runs.forget()
        self.mover.staying.for_weights.clear()
        self.mover.staying.largest_gradient = 0
        self.in_force.adopt(config, tell)
        self.resolve(gather, partners)
        if self.survival is not None:
            self.survival.begins_anew(planned=config.swap.swap)

    def run_fused(self, call: Callable, args: tuple, kwargs: dict) -> Any:
        """Run a function that may be compiled, inside an inline operator."""
        if self.survival is None:
            if self.position.rerun is None and self.observation.counting is None:  # nobody has to look into it
                return call(*args, **kwargs)
            return self.operators.run_fused(call, args, kwargs)
        return self.survival.run_compiled(self.operators.run_fused, call, args, kwargs)

    def run_compiled(self, module: torch.nn.Module, call: Callable, args: tuple, kwargs: dict) -> Any:
        """Run what the calls of a module are that is compiled, and that is an operator or in one."""
        if self.survival is None:
            return call(*args, **kwargs)
        return self.survival.run_compiled(lambda call, args, kwargs: call(*args, **kwargs), call, args, kwargs, module)

    @property
    def manages(self) -> bool:
        """It has a plan to execute, or survives; otherwise somebody only looks on."""
        config = self.in_force.config
        return self.survival is not None or config.swap.swap or config.recompute.active

    # ---- what it did
    def report(self) -> EngineFigures:
        """What this rank did so far."""
        mover, slabs, balance = self.mover, self.mover.slabs, self.passes.balance
        adaptive, since = (None, "") if self.adaptation is None else self.adaptation.report()
        return EngineFigures(
            rank=ranks.number(),
            bytes_out=mover.bytes_out,
            bytes_in=mover.bytes_in,
            copies_out=mover.copies_out,
            copies_in=mover.copies_in,
            peak_bytes=LEDGER.held.highest,
            peak_owned_bytes=LEDGER.owned.highest,
            peak_bytes_without=LEDGER.without.highest,
            held_bytes=LEDGER.held.now,
            stall_seconds=self.backend.stall_seconds() - self._stalled_before,
            host_peak_bytes=slabs.peak_in_use,
            host_allocations=slabs.allocations,
            stayed_bytes=mover.staying.no_room_bytes,
            smallest_bytes=mover.staying.smallest,
            small_bytes=mover.staying.small_bytes,
            evicted_bytes=mover.evicted_bytes,
            evictions=mover.evictions,
            passes_kept=balance.stayed,
            passes=balance.seen,
            moved_by_operator=_by_operator(mover.moved),
            recomputed_bytes=mover.dropped.total(),
            recomputed_by_operator=_by_operator(mover.dropped, mover.second_runs),
            pinned=self.passes.pinned.rows(),
            swaps=_swaps(self.in_force.config.swap),
            recomputes=self.in_force.recomputes,
            manages=self.manages,
            adaptive=adaptive,
            since=since,
        )


def _by_operator(
    nbytes: Counter[tuple[int, str]], runs: Counter[tuple[int, str]] | None = None
) -> tuple[OperatorFigures, ...]:
    return tuple(
        OperatorFigures(layer=layer, op=op, bytes=n, runs=0 if runs is None else runs[layer, op])
        for (layer, op), n in sorted(nbytes.items())
    )


def _swaps(config: SwapConfig) -> bool:
    """Whether it names anything, or leaves that to the default policy."""
    entries = config.layer_swap, config.op_swap
    return config.swap and (entries == (None, None) or any(entries))


in_use: Engine | None = None
"""This process's; `use` sets it. Read here by what runs with every operator."""


def start(
    config: MemoryConfig,
    backend: Backend,
    host_limit_bytes: int | None = None,
    watch_only: bool = False,
    survive: bool = False,
    wording: Wording = MEGATRON,
) -> Engine:
    """Make this process's engine, replacing an earlier one (whose handles stay valid)."""
    _say_what_is_unheeded(hot_path.native is not None)
    dynamo.keep_out()
    engine = Engine(config, backend, host_limit_bytes, watch_only, survive, wording)
    LEDGER.forget()
    use(engine)
    return engine


@functools.cache
def _say_what_is_unheeded(native: bool) -> None:
    if (line := unheeded(native)) is not None:
        logger.warning(line)


def use(engine: Engine | None) -> Engine | None:
    """Make ``engine`` this process's engine from now on; return the earlier one. Not in the middle of a step."""
    global in_use
    in_use, earlier = engine, in_use
    if hot_path.native is not None:
        hot_path.native.use(engine)
    if engine is not None:
        engine._settle()
    return earlier


def current() -> Engine | None:
    return in_use


def attached_model() -> torch.nn.Module | None:
    """The model to which this process's engine is attached; None: to none, or nobody has it any more."""
    model = None if in_use is None else in_use.attached_to
    if model is not None and model() is not None:
        gc.collect()
    return None if model is None else model()


def _survival_of_the_moment() -> Survival | None:
    return None if in_use is None else in_use.survival


def stop() -> None:
    """No engine from now on; handles that autograd still holds stay valid."""
    earlier = use(None)
    if earlier is not None:
        earlier.backend.lift_reserve()
