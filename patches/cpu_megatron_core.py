"""megatron.core without TransformerEngine, Apex and triton, which have no CPU builds: the pieces that still break."""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
from types import ModuleType
from typing import Any

from mindspeed_mem.patching import around, replace

_LAYERS = "megatron.core.tensor_parallel.layers"
_RANDOM = "megatron.core.tensor_parallel.random"


@around("megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__")
def _norm_with_sequence_parallel(original, cls, config, *args, **kwargs):
    """torch's norms know nothing of sequence parallelism, and need not: only their gradients have to be summed.

    Upstream refuses because it does not mark the parameters; finalize_model_grads sums over what is marked. It also
    refuses --no-persist-layer-norm's opposite, the default, which is only a choice among Apex' kernels.
    """
    without = copy.copy(config)
    without.sequence_parallel = without.persist_layer_norm = False
    norm = original(cls, without, *args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


@around("megatron.core.extensions.transformer_engine:TENorm.__new__", optional=True)
def _torch_norm(original, cls, config, hidden_size, eps=1e-5):
    """Named by the stacks of hybrid models, and of T5 also with local layers."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    if cls is WrappedTorchNorm:  # MindSpeed up to core_r0.15.3 puts a norm of its own in the place of both
        return original(cls, config, hidden_size, eps)
    return WrappedTorchNorm(config, hidden_size, eps)


@around("megatron.core.models.bert.bert_layer_specs:get_bert_layer_with_transformer_engine_spec")
def _local_bert(original):
    """pretrain_bert.py makes it when it is imported, whether it is to be used or not."""
    return sys.modules[original.__module__].bert_layer_local_spec


@around("megatron.core.fusions.fused_softmax:FusedScaleMaskSoftmax.is_kernel_available")
def _no_softmax_kernel(original, self, *args, **kwargs):
    """The fused kernels, on by default for 16-bit types, are CUDA's."""
    return False


@around(f"{_RANDOM}:CheckpointWithoutOutput.__init__", since="0.14")
def _checkpoint_without_fp8(original, self, fp8=False):
    """Upstream asks ``fp8 is not None`` with a default of False, and then for names of TransformerEngine.

    Hit by selective recomputation of layernorm and moe_act.
    """
    original(self, None if fp8 is False else fp8)


@around(f"{_RANDOM}:CudaRNGStatesTracker.fork")
@contextlib.contextmanager
def _quiet_fork(original, self, *args, **kwargs):
    """Without the warning that the host's generator moved: it is the device's here, so it always does."""
    logger = logging.getLogger(_RANDOM)
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, logger, "disabled", logger.disabled)
        stack.enter_context(original(self, *args, **kwargs))
        stack.callback(setattr, logger, "disabled", True)  # while it ends
        yield


# The router's product: a name whose import failed with TransformerEngine's, then compared with None.
replace("megatron.core.transformer.moe.moe_utils:te_general_gemm", None, declared_by=__name__, create=True)

# True upstream because its imports succeed without TransformerEngine, with mocks that isinstance does not take.
replace("megatron.core.transformer.multi_latent_attention:HAVE_TE", False, declared_by=__name__, since="0.14")


def _accumulate(total_input, grad_output, main_grad):
    """main_grad += grad_output^T total_input, for [tokens, in] and [tokens, out]."""
    main_grad.add_(grad_output.t().to(main_grad.dtype) @ total_input.to(main_grad.dtype))


def _weight_gradients() -> ModuleType:
    """Apex' extension for --gradient-accumulation-fusion, which is on by default, in one line of torch."""
    module: Any = ModuleType("fused_weight_gradient_mlp_cuda", _weight_gradients.__doc__)
    module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = _accumulate
    return module


replace(f"{_LAYERS}:fused_weight_gradient_mlp_cuda", _weight_gradients(), declared_by=__name__, create=True)
replace(f"{_LAYERS}:_grad_accum_fusion_available", True, declared_by=__name__)
