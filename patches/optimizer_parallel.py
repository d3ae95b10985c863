"""--optimizer-parallel: Megatron's plain optimizers, of which each data-parallel rank does its part.

Why here: all of them are made by one function, which is told the data-parallel group of their parameters (experts
have another than the rest). Inside Megatron's wrapper the torch optimizer is exchanged; gradient norms, clipping, loss
scaling and what a step skips are Megatron's, on whole gradients, and stay bit-identical. The fp32 masters of 16-bit
parameters are cut with the optimizer's states: what the wrapper keeps of a master has its shape and takes its
gradient, and the methods that read or write its values are the four below. Checkpoints stay Megatron's: they see whole
states and masters, on the host, so that any number of ranks reads them, with this option or without.
"""

from __future__ import annotations

import inspect
import logging
from itertools import chain

import torch.distributed as dist

from mindspeed_mem import features
from mindspeed_mem.optimizer_parallel import OptimizerParallelError, ParallelOptimizer
from mindspeed_mem.patching import around

logger = logging.getLogger(__name__)

_FLAG = "--optimizer-parallel"
_WRAPPER = "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params."


@around("megatron.core.optimizer:_get_megatron_optimizer_based_on_param_groups")
def built(original, config, model_chunks, *args, **kwargs):
    mode = features.in_force().optimizer_parallel
    if mode is None:
        return original(config, model_chunks, *args, **kwargs)
    optimizer = original(config, model_chunks, *args, **kwargs)
    given = inspect.signature(original).bind(config, model_chunks, *args, **kwargs).arguments
    group = given["data_parallel_group"]
    if optimizer.is_stub_optimizer or not optimizer.get_parameters():
        return optimizer
    what = "experts: " if any(g.get("is_expert_parallel") for g in optimizer.param_groups) else ""
    if group.size() == 1:
        _say(logging.WARNING, "%s has no effect: %sthere is one data-parallel rank", _FLAG, what)
        return optimizer
    try:
        optimizer.optimizer = ParallelOptimizer(optimizer.optimizer, group, mode, masters=_masters(optimizer))
    except OptimizerParallelError as error:
        kind = type(optimizer.optimizer).__name__
        raise features.FeatureError(
            [
                f"{_FLAG} {mode} cannot be combined with --optimizer {config.optimizer}, whose {kind} is none of those "
                "that are known to step each parameter, with sharding each element, by itself. Leave one of them out"
            ]
        ) from error
    for part in optimizer.optimizer.parts:
        if part.has_master:  # --log-params-norm reads them, and sums over ranks those that it is told are parts
            part.target.main_param, part.target.main_param_sharded = part.piece, True
    optimizer.init_state_fn = _for_own_part(optimizer.init_state_fn)
    _say(logging.INFO, "%s: %s%s", _FLAG, what, optimizer.optimizer.figures())
    return optimizer


@around(_WRAPPER + "_copy_main_params_to_model_params")
def copy_to_model(original, self):
    if not _parallel(self):  # else it was done by the step, and there are no whole masters
        original(self)


@around(_WRAPPER + "_copy_model_params_to_main_params")
def copy_from_model(original, self, *state_dict, **named):
    if not _parallel(self):
        return original(self, *state_dict, **named)
    assert not any((*state_dict, *named.values())), "as upstream"
    self.optimizer.reload_masters()


@around(_WRAPPER + "state_dict")
def state_dict(original, self, *args, **kwargs):
    """Collective: every rank of the data-parallel group has to call it."""
    found = original(self, *args, **kwargs)
    if _parallel(self):
        whole = self.optimizer.masters()
        found["fp32_from_fp16_params"] = [[whole[one] for one in group] for group in self.fp32_from_float16_groups]
    return found


@around(_WRAPPER + "load_state_dict")
def load_state_dict(original, self, state_dict):
    if not _parallel(self):
        return original(self, state_dict)
    key = "fp32_from_fp16_params" if "fp32_from_fp16_params" in state_dict else "fp32_from_fp16"
    original(self, {**state_dict, key: []})
    pairs = zip(*(chain(*groups) for groups in (self.fp32_from_float16_groups, state_dict[key])), strict=True)
    self.optimizer.set_masters(pairs)


def _parallel(optimizer):
    return isinstance(optimizer.optimizer, ParallelOptimizer)


def _masters(optimizer):
    """The model's 16-bit parameters by their fp32 masters."""
    groups = (getattr(optimizer, name, ()) for name in ("fp32_from_float16_groups", "float16_groups"))
    masters, parameters = (list(chain(*group)) for group in groups)
    return dict(zip(masters, parameters, strict=True))


def _for_own_part(init_state):
    """What makes the states that a checkpoint is loaded into: for this rank's part only. SGD has no such function."""
    if init_state is None:
        return None

    def init_own(optimizer, config=None):
        with optimizer.own_parts() as inner:
            init_state(inner, config)

    return init_own


def _say(level, *message):
    if dist.get_rank() == 0:
        logger.log(level, *message)
