"""megatron.core.optimizer.optimizer: an optimizer step in which memory becomes tight is guarded operator by operator.

Why here: every optimizer of Megatron is one of these classes or inherits their ``step``.
"""

from __future__ import annotations

from mindspeed_mem.activation import engine as engines
from mindspeed_mem.patching import around


def _step(original, self, *args, **kwargs):
    engine = engines.current()
    if engine is None or engine.survival is None:
        return original(self, *args, **kwargs)
    with engine.survival.guarded():
        return original(self, *args, **kwargs)


for _class in ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer"):
    around(f"megatron.core.optimizer.optimizer:{_class}.step")(_step)
