"""The registry through which every symbol is replaced (registry.py), and what upstream's sources were (upstream.py).

What torch's compiler is to leave out of its graphs: dynamo.py.
"""

from mindspeed_mem.patching.registry import REGISTRY, Direct, Patch, PatchError, Registry, around, join, replace

__all__ = ["REGISTRY", "Direct", "Patch", "PatchError", "Registry", "around", "join", "replace"]
