"""Chunks on plain torch modules, without Megatron, with the API of ColossalAI's Gemini."""

from mindspeed_mem.gemini.chunk_manager import ChunkManager, init_chunk_manager
from mindspeed_mem.gemini.gemini_manager import GeminiManager
from mindspeed_mem.gemini.groups import ProcessGroup
from mindspeed_mem.gemini.lazy import ColoInitContext, LazyInitContext, lazy_init, materialize
from mindspeed_mem.gemini.optimizer import GeminiAdamOptimizer
from mindspeed_mem.gemini.options import OptionError
from mindspeed_mem.gemini.zero_ddp import GeminiDDP, ZeroDDP

__all__ = [
    "ChunkManager",
    "ColoInitContext",
    "GeminiAdamOptimizer",
    "GeminiDDP",
    "GeminiManager",
    "LazyInitContext",
    "OptionError",
    "ProcessGroup",
    "ZeroDDP",
    "init_chunk_manager",
    "lazy_init",
    "materialize",
]
