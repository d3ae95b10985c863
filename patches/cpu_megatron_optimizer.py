"""The distributed optimizer's checkpoints with torch's AdamW, which stands in for TransformerEngine's and Apex'.

Its state differs from theirs: it does not exist before the first step, and holds a step count for each parameter.
And Megatron's offloaded optimizer is refused: it finds what it offloads by being CUDA's.
"""

from __future__ import annotations

import sys

import torch

from mindspeed_mem import features
from mindspeed_mem.patching import around

_MODULE = "megatron.core.optimizer.distrib_optimizer"


@around("megatron.core.optimizer:get_megatron_optimizer")
def _get_optimizer(original, config, *args, **kwargs):
    """Upstream takes what is not CUDA's for its copies on the host, and finds at the first step that nothing is."""
    if getattr(config, "optimizer_cpu_offload", False):
        raise features.FeatureError(
            [
                "--optimizer-cpu-offload (optimizer_cpu_offload of OptimizerConfig) has nothing to move on a cpu: "
                "optimizer states are on the host there. Leave it out, or train on an accelerator"
            ]
        )
    return original(config, *args, **kwargs)


@around(f"{_MODULE}:DistributedOptimizer.state_dict")
def _state_dict(original, self):
    """With a fresh optimizer, which is what loads a checkpoint, upstream finds no step count and asserts."""
    if _torch_adam(self):
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state[parameter]
                if not state:  # exactly what the first step would make
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
    return original(self)


@around(f"{_MODULE}:DistributedOptimizer.load_state_dict")
def _load_state_dict(original, self, state_dict):
    """Upstream gives all parameters one step tensor, which AdamW then raises once for each of them.

    Without an error: after the resume the bias correction is that of a much later step.
    """
    original(self, state_dict)
    if _torch_adam(self):
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                self.optimizer.state[parameter]["step"] = torch.tensor(float(group["step"]))


@around(f"{_MODULE}:DistributedOptimizer._set_main_param_and_optimizer_states")
def _set_states(original, self, model_param, tensors):
    """Written without no_grad on one path; and both kinds of checkpoint keep the step elsewhere: see above."""
    if _torch_adam(self):
        group, order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][order]
        tensors = {**tensors, "step": self.optimizer.state[main]["step"]}
    with torch.no_grad():
        original(self, model_param, tensors)


def _torch_adam(optimizer) -> bool:
    """Whether upstream fell back to torch's Adam for want of the fused ones."""
    if sys.modules[_MODULE].HAVE_APEX_OR_TE:
        return False
    return isinstance(optimizer.optimizer, (torch.optim.Adam, torch.optim.AdamW))


@around(f"{_MODULE}:quantize_param_shard", before="0.14")
def _quantize_param_shard(original, model_params, *args, **kwargs):
    """Asks for TransformerEngine's version even where there is no parameter in fp8."""
    if model_params:
        original(model_params, *args, **kwargs)
