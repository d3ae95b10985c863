"""megatron.core: what a model's own configs say is checked like arguments, before it is wrapped, optimized or run.

Why here: a loop on megatron-core need not have arguments, only a TransformerConfig, a DistributedDataParallelConfig and
an OptimizerConfig. They come together where gradients get their buffers, where the optimizer is made, and where every
loop runs its models; nothing of ours has changed anything by then. Outermost of our patches on the first two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from mindspeed_mem import features
from mindspeed_mem.passes import Listener, Precedence, ScheduleCall
from mindspeed_mem.patching import around, join

_found: WeakKeyDictionary[nn.Module, features.Settings] = WeakKeyDictionary()
"""What was on when a model was last checked."""


@around("megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__")
def ddp_init(original, self, config, ddp_config, module, *args, **kwargs):
    features.check_configs(features.in_force(), [config, ddp_config, *_configs(module)])
    original(self, config, ddp_config, module, *args, **kwargs)


def _optimizer(original, config, model_chunks, *args, **kwargs):
    configs = [config, *(one for model in model_chunks for one in _configs(model))]
    features.check_configs(features.in_force(), configs)
    return original(config, model_chunks, *args, **kwargs)


around("megatron.core.optimizer:get_megatron_optimizer")(_optimizer)
around("megatron.core.optimizer.muon:get_megatron_muon_optimizer", optional=True)(_optimizer)


class OwnConfigs(Listener):
    precedence = Precedence.OWN_CONFIGS

    def begin_call(self, call: ScheduleCall) -> None:
        settings = features.in_force()
        new = [model for model in call.models if _found.get(model) is not settings]
        features.check_configs(settings, [one for model in new for one in _configs(model)])
        _found.update(dict.fromkeys(new, settings))


join("mindspeed_mem.passes:LISTENERS", OwnConfigs(), declared_by=__name__)


def _configs(model: nn.Module) -> Collection[Any]:
    """All that the modules of a model have, each once: towers have their own."""
    found: dict[int, Any] = {}
    for module in model.modules():
        for config in (getattr(module, "config", None), getattr(module, "ddp_config", None)):
            if dataclasses.is_dataclass(config):
                found[id(config)] = config
    return found.values()
