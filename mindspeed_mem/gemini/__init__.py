"""Chunks on plain torch modules, without Megatron, with the API of ColossalAI's Gemini.

ColossalAI's own GPT-2 example, `examples/language/gpt/train_gpt_demo.py` of 0.1.11 to 0.1.13, runs with

    import mindspeed_mem.gemini as colossalai
    from mindspeed_mem.gemini import ...        # for each `from colossalai. ... import ...`
"""

from mindspeed_mem.gemini.chunk_manager import ChunkManager, init_chunk_manager
from mindspeed_mem.gemini.gemini_manager import GeminiManager
from mindspeed_mem.gemini.groups import ProcessGroup
from mindspeed_mem.gemini.launch import (
    disable_existing_loggers,
    get_current_device,
    get_default_parser,
    get_dist_logger,
    launch_from_torch,
)
from mindspeed_mem.gemini.lazy import LazyInitContext, lazy_init, materialize
from mindspeed_mem.gemini.low_level import LowLevelZeroOptimizer
from mindspeed_mem.gemini.optimizer import GeminiAdamOptimizer
from mindspeed_mem.gemini.options import OptionError
from mindspeed_mem.gemini.tensor_spec import (
    ColoInitContext,
    ColoParameter,
    ComputePattern,
    ComputeSpec,
    ReplicaSpec,
    ShardSpec,
)
from mindspeed_mem.gemini.wrapped_optimizer import HybridAdam, ZeroOptimizer
from mindspeed_mem.gemini.zero_ddp import GeminiDDP, ZeroDDP

__version__ = "0.1.13"
"""Of ColossalAI, whose API this is: its scripts choose by it."""

__all__ = [
    "ChunkManager",
    "ColoInitContext",
    "ColoParameter",
    "ComputePattern",
    "ComputeSpec",
    "GeminiAdamOptimizer",
    "GeminiDDP",
    "GeminiManager",
    "HybridAdam",
    "LazyInitContext",
    "LowLevelZeroOptimizer",
    "OptionError",
    "ProcessGroup",
    "ReplicaSpec",
    "ShardSpec",
    "ZeroDDP",
    "ZeroOptimizer",
    "disable_existing_loggers",
    "get_current_device",
    "get_default_parser",
    "get_dist_logger",
    "init_chunk_manager",
    "launch_from_torch",
    "lazy_init",
    "materialize",
]
