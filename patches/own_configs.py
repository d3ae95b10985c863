"""megatron.core: what a model's own configs say is checked like arguments, before it is wrapped, optimized or run.

Why here: a loop on megatron-core need not have arguments, only a TransformerConfig, a DistributedDataParallelConfig and
an OptimizerConfig. They come together where gradients get their buffers, where the optimizer is made, and where every
loop runs its models; nothing of ours has changed anything by then. Outermost of our patches on these functions.
"""

from __future__ import annotations

import dataclasses
from weakref import WeakKeyDictionary

from mindspeed_mem import features
from mindspeed_mem.patches import _schedule_calls as calls
from mindspeed_mem.patching import around

in_force = features.Settings()
"""The adaptor puts here what is on."""
_found: WeakKeyDictionary = WeakKeyDictionary()  # what was on when a model was last checked, by model


@around("megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__")
def ddp_init(original, self, config, ddp_config, module, *args, **kwargs):
    features.check_configs(in_force, [config, ddp_config, *_configs(module)])
    original(self, config, ddp_config, module, *args, **kwargs)


def _optimizer(original, config, model_chunks, *args, **kwargs):
    features.check_configs(in_force, [config, *(one for model in model_chunks for one in _configs(model))])
    return original(config, model_chunks, *args, **kwargs)


around("megatron.core.optimizer:get_megatron_optimizer")(_optimizer)
around("megatron.core.optimizer.muon:get_megatron_muon_optimizer", optional=True)(_optimizer)


def _schedule(original, **kwargs):
    new = [model for model in calls.models_of(kwargs) if _found.get(model) is not in_force]
    features.check_configs(in_force, [one for model in new for one in _configs(model)])
    _found.update(dict.fromkeys(new, in_force))
    return original(**kwargs)


for _name in ("no_pipelining", "pipelining_with_interleaving", "pipelining_without_interleaving"):
    around("megatron.core.pipeline_parallel.schedules:forward_backward_" + _name)(_schedule)


def _configs(model):
    """All that the modules of a model have, each once: towers have their own."""
    found = {}
    for module in model.modules():
        for config in (getattr(module, "config", None), getattr(module, "ddp_config", None)):
            if dataclasses.is_dataclass(config):
                found[id(config)] = config
    return found.values()
