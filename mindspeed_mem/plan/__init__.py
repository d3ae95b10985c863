"""The memory plan: what a user asked to leave device memory or to recompute, by layer and operator.

`load_memory_config` reads and checks the file, `resolve` joins it with the operators a model has, and the resulting
`MemoryPlan` answers for every (layer, operator).
"""

from mindspeed_mem.plan.checks import MemoryConfigError
from mindspeed_mem.plan.config import LayerSwap, MemoryConfig, OpSwap, SwapConfig, load_memory_config
from mindspeed_mem.plan.memory_plan import MemoryPlan, Swap
from mindspeed_mem.plan.operators import llama_names, match
from mindspeed_mem.plan.recomputation import Recompute
from mindspeed_mem.plan.recompute_config import RecomputeConfig, RecomputeRule, StageCounts
from mindspeed_mem.plan.resolving import resolve

__all__ = [
    "LayerSwap",
    "MemoryConfig",
    "MemoryConfigError",
    "MemoryPlan",
    "OpSwap",
    "Recompute",
    "RecomputeConfig",
    "RecomputeRule",
    "StageCounts",
    "Swap",
    "SwapConfig",
    "llama_names",
    "load_memory_config",
    "match",
    "resolve",
]
