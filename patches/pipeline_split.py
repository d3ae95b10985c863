"""--split-backward, --pipeline-schedule zb: linear layers put off the gradients of their weights.

Why here: every linear layer of Megatron's local spec, experts and the output layer included, is one autograd function,
``LinearWithGradAccumulationAndAsyncCommunication``. Its own backward makes the gradient of its input, with what
tensor and sequence parallelism send for it: it is told to leave the weight to others, as it can for the embedding's.
A weight's gradient that is missing in backward makes DistributedDataParallel's hook run without one; that call waits.
Whatever is no such layer computes as always.

In Megatron's own loops weights follow right after the backward of their pass; in ours (`pipeline_cap`) when the order
says so. A profile is told what is put off, and when it is computed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from mindspeed_mem import features, ranks
from mindspeed_mem.activation import engine as engines
from mindspeed_mem.activation.storage.for_weights import OnHost
from mindspeed_mem.activation.storage.ledger import LEDGER
from mindspeed_mem.activation.storage.records import OverwrittenError
from mindspeed_mem.passes import Listener, Precedence, ScheduleCall
from mindspeed_mem.patching import around, join
from mindspeed_mem.schedule.weight_gradients import WEIGHT_GRADIENTS

logger = logging.getLogger(__name__)

_LAYERS = "megatron.core.tensor_parallel.layers"
_PASS = "the backward that runs"
_FOLLOWED: Any = WeakTensorKeyDictionary()
"""Parameters whose gradients a DistributedDataParallel takes when they are there."""


class SplitBackward(Listener):
    precedence = Precedence.LEFT_OVER

    def __init__(self) -> None:
        self._before = 0
        self.several_tokens = False
        """The model predicts more than the next token: the output layer's weight is used several times in a pass."""
        self.embedded: set[torch.nn.Parameter] = set()
        """Weights of embeddings which, tied to an output layer, would be added up in another order if put off: what the
        embedding makes of them comes in several parts, or nobody waits to take the sum of a pass as a whole."""
        self._hooks: list[RemovableHandle] = []
        self._calls: Counter[torch.nn.Parameter] = Counter()
        """Of embeddings, in the forward that runs."""

    def begin_call(self, call: ScheduleCall) -> None:
        if not call.forward_only:
            self._before = WEIGHT_GRADIENTS.count
            config = sys.modules["megatron.core.utils"].get_model_config(call.models[0])
            self.several_tokens = bool(getattr(config, "mtp_num_layers", None))
            self.embedded = set()
            for model in call.models:
                self._follow_embeddings(model)

    def end_call(self, call: ScheduleCall, completed: bool) -> None:
        if call.forward_only:  # a training step may contain an evaluation
            return
        self.embedded = set()
        self._calls.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        left = WEIGHT_GRADIENTS.clear()
        if completed and left:
            raise RuntimeError(f"gradients of weights were put off in {left} passes and never computed")
        alone = call.stages == 1 and features.in_force().zero_bubble  # which is said elsewhere
        if completed and WEIGHT_GRADIENTS.count == self._before and not alone:
            _say_idle()

    def begin_forward(self, micro_batch: int | None, chunk: int) -> None:
        self._calls.clear()

    def _follow_embeddings(self, model: torch.nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, sys.modules[_LAYERS].VocabParallelEmbedding):
                if module.weight not in _FOLLOWED:
                    self.embedded.add(module.weight)
                self._hooks.append(module.register_forward_hook(self._embeds))

    def _embeds(self, module: Any, *unused: Any) -> None:
        self._calls[module.weight] += 1
        if self._calls[module.weight] > 1:
            self.embedded.add(module.weight)


_CALLS = SplitBackward()
join("mindspeed_mem.passes:LISTENERS", _CALLS, declared_by=__name__)


def _profiler() -> Any:
    engine = engines.current()
    return None if engine is None else engine.observation.profiler


@contextlib.contextmanager
def _profiled(key: Hashable) -> Iterator[None]:
    """Around the computing of what was put off in the pass ``key``."""
    if (profiler := _profiler()) is None:
        yield
        return
    profiler.begin_weights(key if key != _PASS else None)
    try:
        yield
    finally:
        profiler.end_pass()


join("mindspeed_mem.schedule.weight_gradients:WEIGHT_GRADIENTS.around", _profiled, declared_by=__name__)


@functools.cache
def _say_idle() -> None:
    if ranks.number() == 0:
        logger.warning(
            "%s: none of this stage's layers is a linear layer of Megatron's local spec "
            "(--transformer-impl local), or one of TransformerEngine's that can delay gradients of weights (2.3 or "
            "newer, without --tp-comm-overlap); all others compute them at once",
            _idle(),
        )


def _idle() -> str:
    now = features.in_force()
    if now.v_placement:
        return "--pipeline-schedule v splits no backward"
    return f"{'--pipeline-schedule zb' if now.zero_bubble else '--split-backward'} has no effect"


@around("megatron.core.pipeline_parallel.schedules:backward_step")
def backward_step(original, *args, **kwargs):
    # Whose loop this is computes them later, or it is Megatron's where zero bubble has no stages.
    if WEIGHT_GRADIENTS.collecting or features.in_force().zero_bubble:
        return original(*args, **kwargs)
    with WEIGHT_GRADIENTS.collect(_PASS):
        result = original(*args, **kwargs)
    WEIGHT_GRADIENTS.run(_PASS)
    return result


@around("megatron.core.distributed.distributed_data_parallel:DistributedDataParallel._make_backward_post_hook")
def make_backward_post_hook(original, self, param):
    hook = original(self, param)
    _FOLLOWED[param] = True

    def once_it_is_there(*unused):
        if not WEIGHT_GRADIENTS.awaits(param):
            hook(*unused)

    return once_it_is_there


@around(_LAYERS + ":LinearWithGradAccumulationAndAsyncCommunication.backward")
def linear_backward(original, ctx, grad_output):
    # Not the saved weight, of which somebody else's hooks may have made another tensor.
    parameter = getattr(ctx.next_functions[1][0], "variable", None)
    if not WEIGHT_GRADIENTS.collecting or parameter is None or _is_special(ctx, parameter):
        return original(ctx, grad_output)
    engine, later, read = engines.current(), None, None
    if engine is None:
        inputs, weight = ctx.saved_tensors
    else:
        (inputs, weight), later, read = engine.saved.for_weights(ctx)
    result = original(_WithoutWeight(ctx, inputs, weight), grad_output)
    layers = sys.modules[_LAYERS]
    grad_bias = None
    if ctx.use_bias:
        grad_bias = layers.prepare_input_tensors_for_wgrad_compute(grad_output, grad_output)[0].sum(dim=0)
    gathered_by = ctx.tp_group if ctx.sequence_parallel else None
    fused = ctx.gradient_accumulation_fusion
    gradient, inputs = grad_output.detach(), inputs.detach()
    away = None if engine is None else engine.saved.output_gradient(gradient)
    profiler = None if engine is None else engine.observation.profiler
    node = None if profiler is None else profiler.puts_off(read, (gradient,))
    sources = later or _Here(inputs), away or _Here(gradient)
    compute = _WeightGradient(parameter, *sources, gathered_by, fused, node)
    holds = tuple(one.tensor for one in sources if isinstance(one, _Here))
    on_host = tuple(one for one in sources if isinstance(one, OnHost))
    WEIGHT_GRADIENTS.put_off(parameter, compute, holds, functools.partial(_fetch, on_host) if on_host else None)
    if engine is not None:  # of the inputs it may have counted their operator's, until its backward
        for held in holds:
            LEDGER.enter(held.untyped_storage(), owned=False)
    return (result[0], None, grad_bias, *result[3:])


def _is_special(ctx: Any, parameter: torch.nn.Parameter) -> bool:
    """Whether somebody treats this weight otherwise: Megatron puts its gradient off, gathers the weight, or adds up
    what several output layers and embeddings make of it, in an order that would be another; or hooks, or whoever runs
    the backward, want to see its gradient in the backward, or do not want it at all."""
    return (
        torch.is_grad_enabled()  # a graph of the backward is asked for
        or not _reached(ctx.next_functions[1][0])
        or parameter in _CALLS.embedded
        or (_CALLS.several_tokens and getattr(parameter, "is_embedding_or_output_parameter", False))
        or ctx.grad_output_buffer is not None
        or getattr(ctx, "gtp_remat_size", 1) > 1  # since 0.19
        or getattr(ctx, "_fwd_used_autocast", False)
        or bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
    )


def _reached(accumulates: Any) -> bool:
    """Whether the backward that runs hands gradients to this parameter's node."""
    try:
        return torch._C._will_engine_execute_node(accumulates)
    except RuntimeError:  # torch.autograd.grad was asked for them
        return False


class _WithoutWeight:
    """A linear layer's context, as Megatron's backward reads it, with nothing to be done for weight and bias.

    Megatron leaves out the gradient of an output layer's weight where it collects output gradients; then it marks the
    weight as done, if that bears the mark, which an alias does not.
    """

    main_grad = None
    use_bias = False
    gradient_accumulation_fusion = True
    wgrad_deferral_limit = 0

    def __init__(self, ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> None:
        self._ctx = ctx
        # Like a parameter it needs a gradient: by that torch chooses among kernels, whose sums have other last bits.
        self.saved_tensors = inputs, weight.detach().requires_grad_()
        self.grad_output_buffer: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def _fetch(on_host: tuple[OnHost, ...]) -> None:
    for one in on_host:
        one.fetch()


class _Here:
    """What the gradient of a weight is made from, on the device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self._version = tensor, tensor._version

    def get(self) -> torch.Tensor:
        if self.tensor._version != self._version:
            raise ChangedError
        return self.tensor


class ChangedError(RuntimeError):
    """What a gradient is made from is not what it was."""


class _WeightGradient:
    """Makes the gradient of a linear layer's weight, as Megatron does."""

    def __init__(
        self,
        parameter: torch.nn.Parameter,
        inputs: _Here | OnHost,
        grad_output: _Here | OnHost,
        gathered_by: Any,
        fused: bool,
        node: Any,
    ) -> None:
        self._parameter, self._inputs, self._grad_output = parameter, inputs, grad_output
        self._gathered_by, self._fused, self._node = gathered_by, fused, node

    def __call__(self) -> torch.Tensor | None:
        if self._node is not None and (profiler := _profiler()) is not None:
            profiler.makes_weights(self._node)
        try:
            grad_output, inputs = self._grad_output.get(), self._inputs.get()
        except (ChangedError, OverwrittenError) as error:
            raise RuntimeError(
                f"what a weight of shape {tuple(self._parameter.shape)} needs for its gradient was changed in place "
                "after the backward pass of its layer: leave --split-backward out"
            ) from error
        layers = sys.modules[_LAYERS]
        if self._gathered_by is not None:
            inputs = self._gathered(layers, inputs)
        grad_output, inputs = layers.prepare_input_tensors_for_wgrad_compute(grad_output, inputs)
        return self._add(layers, grad_output, inputs) if self._fused else grad_output.t().matmul(inputs)

    def _gathered(self, layers: Any, inputs: torch.Tensor) -> torch.Tensor:
        """The whole sequence, in Megatron's own buffer for it."""
        shape = [inputs.shape[0] * self._gathered_by.size(), *inputs.shape[1:]]
        whole = layers.get_global_memory_buffer().get_tensor(shape, inputs.dtype, "mpu")
        layers.dist_all_gather_func(whole, inputs, group=self._gathered_by)
        return whole

    def _add(self, layers: Any, grad_output: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor | None:
        """Add it to ``main_grad`` by Apex' kernel, for DistributedDataParallel to find a placeholder."""
        parameter: Any = self._parameter
        kernel = "fp32" if parameter.main_grad.dtype == torch.float32 else "fp16"
        fused = layers.fused_weight_gradient_mlp_cuda
        getattr(fused, f"wgrad_gemm_accum_{kernel}")(inputs, grad_output, parameter.main_grad)
        if not hasattr(parameter, "grad_added_to_main_grad"):
            return None
        parameter.grad_added_to_main_grad = True
        make = torch.zeros if getattr(parameter, "zero_out_wgrad", False) else torch.empty
        return make(parameter.main_grad.shape, dtype=inputs.dtype, device=inputs.device)
