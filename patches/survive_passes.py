"""A training call that runs out of device memory comes through.

Everything between two optimizer steps runs inside a call: forwards, backwards, what stages send and receive, the
reduction of gradients. Operators are guarded one by one; only what escapes that ends a call, and where no other rank is
concerned the call is repeated once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_mem import ranks
from mindspeed_mem.activation import compiled_calls
from mindspeed_mem.activation import engine as engines
from mindspeed_mem.activation.rerun import second_run
from mindspeed_mem.activation.rerun.arguments import tensors_in
from mindspeed_mem.activation.survive.step_retry import BeforeStep, RecordedIterator, forget_frames
from mindspeed_mem.activation.survive.survival import NoRoomError, Survival
from mindspeed_mem.passes import Listener, Precedence, Run, ScheduleCall
from mindspeed_mem.patching import join

logger = logging.getLogger(__name__)

_NEWS = "mindspeed_mem/out_of_memory"
_told: list[bool] = []


def _survival() -> Survival | None:
    engine = engines.current()
    return None if engine is None else engine.survival


_looked_at: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models whose compiled calls find room


class SurvivePasses(Listener):
    precedence = Precedence.SURVIVE

    def around_call(self, call: ScheduleCall, run: Run) -> Any:
        engine, survival = engines.current(), _survival()
        if engine is None or survival is None:
            return run(call)
        for model in call.models:
            if model not in _looked_at:
                _looked_at.add(model)
                compiled_calls.find_room(model)
        engine.passes.layer_given = lambda args, kwargs: survival.given(tensors_in((args, kwargs)))
        _take_back()
        if call.schedule != "forward_backward_no_pipelining" or call.forward_only:
            return _once(survival, call, run)
        return _twice(survival, call, run)

    def during_forward(self) -> AbstractContextManager[Any]:
        survival = _survival()
        return contextlib.nullcontext() if survival is None else survival.holding_all()


join("mindspeed_mem.passes:LISTENERS", SurvivePasses(), declared_by=__name__)


def _once(survival: Survival, call: ScheduleCall, run: Run) -> Any:
    try:
        with survival.guarded(outgrown=_outgrown(survival, call)):
            return run(call)
    except (RuntimeError, MemoryError) as error:
        if not survival.backend.is_out_of_memory(error):
            _hear(error)
            raise
        failed = survival.explained(error)
        _tell(failed)
        raise failed from (error if failed is not error else error.__cause__)


def _twice(survival: Survival, call: ScheduleCall, run: Run) -> Any:
    models = call.models
    zeroed = [vars(model).pop("_mindspeed_mem_zeroed", not hasattr(model, "zero_grad_buffer")) for model in models]
    before = BeforeStep(models, zeroed)
    iterator, call = _recorded(call)
    started, collectives, timers = survival.forwards, ranks.collectives(), _timers(models[0])
    sums = {id(values): (values, values.clone()) for values in _sums_for_the_log()}
    validated = _validated()
    with contextlib.ExitStack() as stack:
        for guard in second_run.GUARDS:
            stack.enter_context(guard())
        try:
            with survival.guarded(outgrown=_outgrown(survival, call)):
                return run(call)
        except (RuntimeError, MemoryError) as error:
            if not survival.backend.is_out_of_memory(error):
                _hear(error)
                raise
            failed = survival.explained(error)
    why_not = "the host is full" if survival.mover.host_full else ""
    why_not = why_not or _shared(models, collectives) or before.why_not(iterator, survival.forwards > started)
    if why_not:
        _tell(failed)
        raise NoRoomError(f"{failed}\n  the step was not tried again: {why_not}") from failed
    logger.warning("the step is tried again with all activations swapped: %s", str(failed).partition("\n")[0])
    forget_frames(failed)
    del failed
    before.put_back(iterator)
    survival.backend.give_back()  # what it kept in pieces, or a library lacked
    for timer in _timers(models[0]) - timers:
        timer.stop()
    for values in _sums_for_the_log():
        values.copy_(sums[id(values)][1]) if id(values) in sums else values.zero_()  # made by the first attempt
    for counts, earlier in validated:
        counts.clear()
        counts.update(earlier)
    if (engine := engines.current()) is not None and engine.adaptation is not None:
        engine.adaptation.begin_again()
    with survival.moving_everything():
        return _once(survival, call, run)


def _outgrown(survival: Survival, call: ScheduleCall) -> bool:
    """Stages hold several micro-batches at once, at most all."""
    length = call.seq_length or 0
    tokens = (call.micro_batch_size or 0) * length
    held = tokens * (call.micro_batches if call.stages > 1 and not call.forward_only else 1)
    return survival.policy.outgrown(tokens, length, held, keeps=not call.forward_only)


def _recorded(call: ScheduleCall) -> tuple[RecordedIterator | None, ScheduleCall]:
    """The iterator that remembers what it gave (None without data), and the call with it."""
    given = call.arguments.get("data_iterator")
    single = given[0] if isinstance(given, list) and given else given
    if single is None or isinstance(single, list):
        return None, call
    iterator = RecordedIterator(single)
    arguments = {**call.arguments, "data_iterator": [iterator] if isinstance(given, list) else iterator}
    return iterator, dataclasses.replace(call, arguments=arguments)


def _shared(models: Sequence[nn.Module], collectives: int | None) -> str:
    """Why a second attempt would leave other ranks behind; empty if it would not."""
    if any(getattr(getattr(model, "ddp_config", None), "overlap_grad_reduce", False) for model in models):
        return "gradients are reduced while backward runs (--overlap-grad-reduce)"
    if ranks.count() == 1:
        return ""
    state = sys.modules["megatron.core.parallel_state"]
    getters = ("tensor_model_parallel", "context_parallel", "expert_model_parallel", "expert_tensor_parallel")
    if any(getattr(state, f"get_{name}_world_size")() > 1 for name in getters):
        return "other ranks compute the same micro-batches with this one"
    if collectives is None or collectives != ranks.collectives():
        return "it has taken part in a collective, which cannot be taken back"
    return ""


def _timers(model: nn.Module) -> set[Any]:
    """Megatron's timers that run now: they refuse to be started twice."""
    timers = sys.modules["megatron.core.utils"].get_model_config(model).timers
    return {timer for timer in getattr(timers, "_timers", {}).values() if getattr(timer, "_started", False)}


def _sums_for_the_log() -> list[torch.Tensor]:
    """What Megatron adds up over micro-batches for its log: losses of experts, of further tokens, of indexers."""
    tracker = sys.modules.get("megatron.core.transformer.moe.moe_logging")
    if tracker is not None:  # from 0.18 on
        found = [entry.values for entry in tracker.get_moe_metrics_tracker().metrics.values()]
    else:
        homes = ("megatron.core.transformer.moe.moe_utils", "megatron.core.parallel_state")  # the latter before 0.13
        name = "get_moe_layer_wise_logging_tracker"
        getter = next((getattr(sys.modules[one], name) for one in homes if hasattr(sys.modules.get(one), name)), dict)
        entries: Iterable[Any] = getter().values()
        found = [values for entry in entries if (values := dict(entry).get("values")) is not None]
    others = (getattr(sys.modules.get(f"{_TRANSFORMER}.{one}"), name, None) for one, name in _HELPERS)
    trackers = [one.tracker for one in others if one is not None]  # one tensor in each, before 0.19
    return found + [held for one in trackers for held in one.values() if isinstance(held, torch.Tensor)]


_TRANSFORMER = "megatron.core.transformer"
_HELPERS = (
    ("multi_token_prediction", "MTPLossLoggingHelper"),
    ("experimental_attention_variant.dsa", "DSAIndexerLossLoggingHelper"),
)


def _validated() -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    """What Megatron's rerun state machine counts of results that it is shown, with copies."""
    rerun = getattr(sys.modules.get("megatron.core.rerun_state_machine"), "_GLOBAL_RERUN_STATE_MACHINE", None)
    found = (getattr(rerun, name, None) for name in ("validation_counts", "large_value_counts", "max_values"))
    return [(counts, dict(counts)) for counts in found if isinstance(counts, dict)]


def _tell(error: Exception) -> None:
    """Leave word for the other ranks: they notice only that this one is gone."""
    with contextlib.suppress(Exception):
        if dist.get_world_size() > 1:
            store = dist.distributed_c10d._get_default_store()
            store.set(_NEWS, f"rank {dist.get_rank()} ran out of device memory: {error}")
            _told.append(True)


def _take_back() -> None:
    """The job goes on after all: what was said is no longer news."""
    if _told:
        _told.clear()
        with contextlib.suppress(Exception):
            dist.distributed_c10d._get_default_store().delete_key(_NEWS)


def _hear(error: Exception) -> None:
    """Raise what another rank has left word of instead of what followed from it."""
    news = ""
    with contextlib.suppress(Exception):
        store = dist.distributed_c10d._get_default_store()
        news = store.get(_NEWS).decode() if store.check([_NEWS]) else ""
    if news:
        raise RuntimeError(news) from error
