"""Random states that torch hands out are host memory: where CPU memory stands for a device's, they do not count as it.

A device's states lie on the host. On the CPU the same calls allocate what a memory limit counts, some kilobytes each
time, and may fail in places where nobody can make room. At torch's own functions, because a generator allocates where
no dispatch mode sees it, and all who ask (Megatron's tracker, checkpointing, fork_rng) go through them. Without a limit
nothing changes.
"""

from __future__ import annotations

from mindspeed_mem.device.limited_cpu import on_host
from mindspeed_mem.patching import around


@around("torch.random:get_rng_state")
def _get_rng_state(original, *args, **kwargs):
    """The host generator's."""
    with on_host():
        return original(*args, **kwargs)


@around("torch.cuda.random:get_rng_state")
def _get_device_rng_state(original, *args, **kwargs):
    """The device's, which here is the host's as well."""
    with on_host():
        return original(*args, **kwargs)
