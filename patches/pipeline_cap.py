"""--max-inflight-microbatches: pipeline schedules that hold fewer micro-batches; --pipeline-schedule zb and v: those
that run gradients of weights apart, on the parts as Megatron places them or in a V. All are run by our executor.

Megatron's loops cannot run these orders (`mindspeed_mem.schedule.order` says why). Only a training call that this
changes leaves Megatron's loop, and in a V evaluations, too; its passes are still Megatron's ``forward_step`` and
``backward_step``, looked up for each call, so that what others put around them stays in force.

The groups for what stages send are made in ``initialize_model_parallel``: every rank is there, as making groups needs
it; a training step may be that of a few.

On each chunk micro-batches keep their order: gradients are added up as in Megatron's loop, and are bit-identical.
Dropout draws other masks only where a cap makes the groups of virtual stages smaller, or gives them up: chunks take
turns earlier then.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_unflatten

from mindspeed_mem import features, ranks
from mindspeed_mem.passes import BACKWARD, WEIGHT, Listener, Pass, Precedence, Run, ScheduleCall
from mindspeed_mem.patching import around, join, upstream
from mindspeed_mem.schedule import (
    Placement,
    ScheduleError,
    executor,
    order,
    peak,
    problems,
    simulate,
    wires,
    without_virtual_stages,
)
from mindspeed_mem.schedule.checks import Limits
from mindspeed_mem.schedule.reductions import GradientReductions, ParameterGathers
from mindspeed_mem.schedule.weight_gradients import WEIGHT_GRADIENTS

logger = logging.getLogger(__name__)

_FLAG = "--max-inflight-microbatches"
# What the names are that Megatron's loops hand on, and what they call with.
_GROUPS = ("tp", "cp", "embd", "pos_embd", "pp", "dp_cp")
_GIVEN_GROUPS = "pg_collection" if upstream.within("megatron", since="0.15") else "grad_finalize_pgs"
_FINALIZES_WITH = ("force_all_reduce",) if upstream.within("megatron", since="0.16") else ()
_TYPES_MODELS = upstream.within("megatron", before="0.17")
# The settings of which it was said that they change nothing; with the chunks: it was seen whether fewer are better.
_said: set[str | tuple[int, int]] = set()


@around("megatron.core.parallel_state:initialize_model_parallel")
def initialize_model_parallel(original, *args, **kwargs):
    original(*args, **kwargs)
    state = sys.modules[original.__module__]
    pipeline = state.get_pipeline_model_parallel_group()
    now = features.in_force()
    if (now.max_inflight is None and not now.zero_bubble) or pipeline.size() == 1:
        return
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    wires.connect(
        pipeline,
        _device_of(pipeline),
        tuple(_placement(pipeline.size(), state.get_virtual_pipeline_model_parallel_world_size() or 1).lines()),
        backend=given.get("pipeline_model_parallel_comm_backend"),
    )


def _placement(stages: int, virtual_stages: int) -> Placement:
    return Placement(stages, virtual_stages, features.in_force().v_placement)


def _asked() -> str:
    """What asks for gradients of weights apart."""
    return f"--pipeline-schedule {'v' if features.in_force().v_placement else 'zb'}"


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Where its tensors are."""
    if dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    kind = torch._C._get_accelerator().type
    return torch.device(kind, torch.get_device_module(kind).current_device())


class CappedLoop(Listener):
    precedence = Precedence.LOOP

    def around_call(self, call: ScheduleCall, run: Run) -> Any:
        split, v = features.in_force().zero_bubble, features.in_force().v_placement
        if (call.cap is None and not split) or (call.forward_only and not v):
            return run(call)
        if call.schedule == "forward_backward_no_pipelining":
            if split:
                _say_idle(_asked(), "without pipeline stages none idles")
            if call.cap is not None:
                _say_idle(f"{_FLAG} {call.cap}", "without pipeline stages one micro-batch is in flight")
            return run(call)
        if (call.arguments.get("p2p_communicator") is None) != (call.arguments.get(_GIVEN_GROUPS) is None):
            return run(call)  # Megatron says what is wrong with that
        group_size = call.group_size if len(call.models) > 1 else None
        sizes = (call.stages, len(call.models), call.micro_batches)
        if split:
            return _run(_split(*sizes, None if v else group_size, call.cap, v, call.forward_only), call)
        assert call.cap is not None
        orders = _capped(*sizes, group_size, call.cap)
        if orders is not None:
            if len(call.models) > 1:
                _say_slower(orders, *sizes, call.cap)
            return _run(orders, call)
        if not problems(*sizes, group_size=group_size):
            most = max(peak(*sizes, group_size=group_size))
            unit = "micro-batches" if len(call.models) == 1 else "passes of one chunk"
            _say_idle(f"{_FLAG} {call.cap}", f"no stage of this schedule holds more than {most} {unit} at once")
        return run(call)


join("mindspeed_mem.passes:LISTENERS", CappedLoop(), declared_by=__name__)


def _run(orders: Sequence[Sequence[Pass]], call: ScheduleCall) -> list[Any]:
    """One training step or evaluation; returns what the loss function gave for each micro-batch, on the last rank."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.utils import get_model_config

    kwargs, models, stage = call.arguments, call.models, call.stage
    interleaved = call.schedule.endswith("with_interleaving")
    placement = _placement(len(orders), len(models))
    config = get_model_config(models[0])
    _refuse(config, kwargs)
    communicator, groups = kwargs.get("p2p_communicator"), _groups(kwargs.get(_GIVEN_GROUPS))
    pipeline = groups.pp if communicator is None else communicator.pp_group
    timers = config.timers
    if timers is not None:
        timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    devices = (parameter.device for model in models for parameter in model.parameters())
    device = next(devices, None) or torch.device(torch.cuda.current_device())  # a stage may have no parameters
    tokens = torch.zeros([], dtype=torch.int, device=device)
    results: list[Any] = []
    iterators = kwargs["data_iterator"]
    iterators = iterators if isinstance(iterators, list) else [iterators] * len(models)
    gathers = ParameterGathers(config.param_sync_func if interleaved else None, models)
    rest = (schedules.get_model_type(models[0]), config) if _TYPES_MODELS else (config,)
    last_of_chunk = {chunk: micro_batch for direction, micro_batch, chunk in orders[stage] if direction == BACKWARD}

    first_run = kwargs.get("first_val_step") if call.forward_only else None

    def forward(micro_batch, chunk, given):
        gathers.before(chunk)
        output, count = schedules.forward_step(
            kwargs["forward_step_func"],
            iterators[chunk],
            models[chunk],
            kwargs["num_microbatches"],
            given,
            results,
            config,
            cp_group_size=groups.cp.size(),
            collect_non_loss_data=kwargs.get("collect_non_loss_data", False),
            is_first_microbatch=micro_batch == 0 and first_run in (None, True),
            current_microbatch=micro_batch,
            vp_stage=chunk if interleaved else None,
            is_last_stage=placement.part(stage, chunk) == placement.parts - 1,
        )
        tokens.add_(count)
        return output

    split = any(direction == WEIGHT for direction, *_ in orders[stage])

    def backward(micro_batch, chunk, given, output, gradient):
        later = WEIGHT_GRADIENTS.collect((micro_batch, chunk)) if split else contextlib.nullcontext()
        last = micro_batch == last_of_chunk[chunk]
        with reductions.backward(chunk, last, weights_later=split), later:
            return schedules.backward_step(given, output, gradient, *rest)

    def weight(micro_batch, chunk):
        with reductions.backward(chunk, last=micro_batch == last_of_chunk[chunk]):
            WEIGHT_GRADIENTS.run((micro_batch, chunk))

    def release(output):
        schedules.deallocate_output_tensor(output, config.deallocate_pipeline_outputs and not call.forward_only)

    backend = config.pipeline_model_parallel_comm_backend
    carried = wires.Wires(
        pipeline,
        wires.connect(pipeline, device, tuple(placement.lines()), backend=backend),
        _shape(schedules, kwargs, config, groups, interleaved),
        config.pipeline_dtype,
        device,
        functools.partial(_timed, timers),
    )
    with GradientReductions(config.no_sync_func, config.grad_sync_func, models) as reductions:
        executor.run(
            orders,
            stage,
            placement,
            carried,
            forward=forward,
            backward=backward,
            release=release,
            weight=weight,
            turn=lambda output: output.detach().requires_grad_(),
        )
    if placement.v:
        results = _on_last_rank(results, tokens, pipeline)
    if call.forward_only:
        _end(timers)
        return results
    if config.finalize_model_grads_func is not None:
        more = {name: kwargs.get(name, False) for name in _FINALIZES_WITH}
        counted = tokens if config.calculate_per_token_loss else None
        config.finalize_model_grads_func(models, counted, **{_GIVEN_GROUPS: groups}, **more)
    if getattr(config, "fine_grained_activation_offloading", False):  # since 0.16: what a call recorded is over
        schedules.off_interface.reset()
    _end(timers)
    return results


def _end(timers: Any) -> None:
    if timers is not None:
        timers("forward-backward").stop()


def _on_last_rank(results: list[Any], tokens: torch.Tensor, pipeline: dist.ProcessGroup) -> list[Any]:
    """In a V the first rank makes losses and counts their tokens. The last one gets both: there Megatron's loops leave
    them, and scripts look for them."""
    members, stage = dist.get_process_group_ranks(pipeline), pipeline.rank()
    box: list[Any] = [None]
    if stage == 0:
        leaves, tree = tree_flatten((results, tokens))
        moved = [isinstance(leaf, torch.Tensor) and not leaf.is_cpu for leaf in leaves]
        box = [([leaf.cpu() if on else leaf for leaf, on in zip(leaves, moved, strict=True)], moved, tree)]
        dist.send_object_list(box, members[-1], group=pipeline)
        return []
    if stage < len(members) - 1:
        return []
    dist.recv_object_list(box, members[0], group=pipeline)
    leaves, moved, tree = box[0]
    leaves = [leaf.to(tokens.device) if on else leaf for leaf, on in zip(leaves, moved, strict=True)]
    results, counted = tree_unflatten(leaves, tree)
    tokens.copy_(counted)
    return results


def _groups(given: Any) -> Any:
    """The groups that a loop was given, or else Megatron's own."""
    from megatron.core import process_groups_config

    if given is not None:
        return given
    if upstream.within("megatron", since="0.15"):
        return process_groups_config.ProcessGroupCollection.use_mpu_process_groups(list(_GROUPS))
    state = sys.modules["megatron.core.parallel_state"]
    return SimpleNamespace(
        tp=state.get_tensor_model_parallel_group(),
        cp=state.get_context_parallel_group(),
        embd=state.get_embedding_group(check_initialized=False),
        pos_embd=state.get_position_embedding_group(check_initialized=False),
        pp=state.get_pipeline_model_parallel_group(),
        dp_cp=state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False),
    )


def _shape(schedules: Any, kwargs: Mapping[str, Any], config: Any, groups: Any, interleaved: bool) -> Sequence[int]:
    """Of what one stage sends to the next: (sequence, micro-batch, hidden), the sequence as this rank holds it."""
    (shape,) = schedules.get_tensor_shapes(
        seq_length=kwargs["seq_length"],
        micro_batch_size=kwargs["micro_batch_size"],
        decoder_seq_length=None if interleaved else kwargs.get("decoder_seq_length"),
        config=config,
        tp_group=groups.tp,
        cp_group=groups.cp,
    )
    return shape


@functools.lru_cache(maxsize=64)
def _capped(
    stages: int, virtual_stages: int, micro_batches: int, group_size: int | None, cap: int
) -> list[list[Pass]] | None:
    """The order of every stage under the cap; None where it changes nothing, or Megatron has no such schedule."""
    sizes = (stages, virtual_stages, micro_batches)
    if problems(*sizes, group_size=group_size):
        return None
    try:
        capped = order(*sizes, group_size=group_size, cap=cap)
    except ScheduleError as error:
        least = f"With {virtual_stages} virtual stages give {virtual_stages} or more"
        raise ScheduleError(f"{_FLAG} {cap}: {error}. {least}, or leave it out") from error
    return None if capped == order(*sizes, group_size=group_size) else capped


@functools.lru_cache(maxsize=64)
def _split(
    stages: int,
    virtual_stages: int,
    micro_batches: int,
    group_size: int | None,
    cap: int | None,
    v: bool,
    forward_only: bool,
) -> list[list[Pass]]:
    """The order of every stage with gradients of weights in passes of their own."""
    limits: Limits = {"group_size": group_size, "cap": cap, "split": True, "v": v}
    try:
        return order(stages, virtual_stages, micro_batches, **limits, forward_only=forward_only)
    except ScheduleError as error:
        raise ScheduleError(f"{_asked()}: {error}") from error


def _refuse(config: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise FeatureError with what the executor cannot do, before anything was sent."""
    found = []
    flag = _asked() if features.in_force().zero_bubble else _FLAG
    if kwargs.get("adjust_tensor_shapes_fn") is not None:
        found.append(f"{flag} needs one tensor of one shape between stages: adjust_tensor_shapes_fn has to be None")
    if isinstance(kwargs["model"], list) and len(kwargs["model"]) > 1 and not isinstance(kwargs["data_iterator"], list):
        found.append("data_iterator has to be a list with an iterator for each model chunk")
    if config.pipeline_dtype is None:
        found.append(f"{flag} needs pipeline_dtype, the dtype of what stages send, in the model's config")
    if found:
        raise features.FeatureError(found)


def _say_idle(setting: str, why: str) -> None:
    """Once for each setting, on rank 0."""
    if setting not in _said and ranks.number() == 0:
        logger.warning("%s has no effect: %s", setting, why)
    _said.add(setting)


def _say_slower(orders: Sequence[Sequence[Pass]], stages: int, chunks: int, micro_batches: int, cap: int) -> None:
    """Once for each cap, on rank 0, if the same memory would carry a faster pipeline without virtual stages."""
    if (cap, chunks) in _said or ranks.number() != 0:
        return
    _said.add((cap, chunks))
    ours, plain = simulate(orders, chunks), without_virtual_stages(stages, chunks, micro_batches, cap)
    if plain.makespan < ours.makespan:
        logger.warning(
            "%s %d over %d virtual stages idles %.1f%%, but %.1f%% without virtual stages and a cap of %d, which holds "
            "no more (equal stages, a backward as long as two forwards)",
            *(_FLAG, cap, chunks, 100 * ours.idle_share(), 100 * plain.idle_share(), cap // chunks),
        )


@contextlib.contextmanager
def _timed(timers: Any, name: str) -> Iterator[None]:
    """Within one of Megatron's timers, if there are any."""
    if timers is None:
        yield
        return
    timers(name, log_level=2).start()
    yield
    timers(name).stop()
