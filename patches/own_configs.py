"""megatron.core: what a model's own configs say is checked like arguments, before it is wrapped, optimized or run.

Why here: a loop on megatron-core need not have arguments, only a TransformerConfig, a DistributedDataParallelConfig and
an OptimizerConfig. They come together where gradients get their buffers, where the optimizer is made, and where every
loop runs its models; nothing of ours has changed anything by then. Outermost of our patches on the first two.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from mindspeed_mem import features
from mindspeed_mem.passes import Listener, Precedence, ScheduleCall
from mindspeed_mem.patching import around, join

logger = logging.getLogger(__name__)

_found: WeakKeyDictionary[nn.Module, features.Settings] = WeakKeyDictionary()
"""What was on when a model was last checked."""
_optimizes = False
"""Whether Megatron has made an optimizer in this process."""
_said: set[str] = set()


@around("megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__")
def ddp_init(original, self, config, ddp_config, module, *args, **kwargs):
    features.check_configs(features.in_force(), [config, ddp_config, *_configs(module)])
    original(self, config, ddp_config, module, *args, **kwargs)


def _optimizer(original, config, model_chunks, *args, **kwargs):
    global _optimizes
    _optimizes = True
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
        configs = [one for model in new for one in _configs(model)]
        features.check_configs(settings, configs)
        _found.update(dict.fromkeys(new, settings))
        if new and not call.forward_only:
            _say_what_is_missing(settings, configs)


join("mindspeed_mem.passes:LISTENERS", OwnConfigs(), declared_by=__name__)


def _say_what_is_missing(settings: features.Settings, configs: Collection[Any]) -> None:
    """A loop that trains without what a feature works on would never meet it, without a word."""
    missing = []
    if settings.chunk.stage and not any(hasattr(one, "use_distributed_optimizer") for one in configs):
        missing.append(
            "--chunk-zero-stage has no effect: the model that trains is not in Megatron's DistributedDataParallel, "
            "whose buckets are the chunks. Wrap it in one with use_distributed_optimizer=True"
        )
    if settings.optimizer_parallel is not None and not _optimizes:
        missing.append(
            "--optimizer-parallel has no effect: a model trains, and its optimizer was not made by Megatron's "
            "get_megatron_optimizer. Have it made there, or call mindspeed_mem.optimizer_parallel.parallelize with it"
        )
    for text in missing:
        if text not in _said:
            _said.add(text)
            logger.warning(text)


def _configs(model: nn.Module) -> Collection[Any]:
    """All that the modules of a model have, each once: towers have their own."""
    found: dict[int, Any] = {}
    for module in model.modules():
        for config in (getattr(module, "config", None), getattr(module, "ddp_config", None)):
            if dataclasses.is_dataclass(config):
                found[id(config)] = config
    return found.values()
