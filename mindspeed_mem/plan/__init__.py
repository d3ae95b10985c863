"""The memory plan: what a user asked to leave device memory, by layer and operator.

`load_memory_config` reads and checks the file, `resolve` joins it with the operators a model has, and the resulting
`MemoryPlan` answers for every (layer, operator).
"""

from mindspeed_mem.plan.config import (
    LayerSwap,
    MemoryConfig,
    MemoryConfigError,
    OpSwap,
    RecomputeConfig,
    SwapConfig,
    load_memory_config,
)
from mindspeed_mem.plan.memory_plan import MemoryPlan, Swap, resolve
from mindspeed_mem.plan.operators import both_names, match

__all__ = [
    "LayerSwap",
    "MemoryConfig",
    "MemoryConfigError",
    "MemoryPlan",
    "OpSwap",
    "RecomputeConfig",
    "Swap",
    "SwapConfig",
    "both_names",
    "load_memory_config",
    "match",
    "resolve",
]
