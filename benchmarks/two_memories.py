"""Device memory and host memory told apart, also on a CPU, where both are the host's; and what moves between them.

On a CPU the pack keeps what rests on the host in buffers of its own (`Backend.host_empty`), which are not counted as
the device's. Other systems say ``.cpu()``, which on a CPU does nothing: `offloading` lets it do there what it does on a
device.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed_mem.device import Backend, is_host_device

GATHERS = ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_", "allgather_coalesced_")
SCATTERS = ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_")


class TwoMemories:
    """Which tensors lie on the host; there is one for a backend in a process."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.told_apart = not backend.is_host
        """Whether torch itself tells them apart."""
        self._hosts: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        if not self.told_apart:
            host_empty = backend.host_empty

            def recorded(nbytes: int) -> torch.Tensor:
                return self.mark(host_empty(nbytes))

            backend.host_empty = recorded

    def on_host(self, tensor: torch.Tensor) -> bool:
        if self.told_apart:
            return is_host_device(tensor.device)
        return tensor.untyped_storage() in self._hosts

    def mark(self, tensor: torch.Tensor) -> torch.Tensor:
        """On a CPU: `tensor` lies on the host."""
        self._hosts.add(tensor.untyped_storage())
        return tensor

    @contextlib.contextmanager
    def hosted(self) -> Iterator[None]:
        """Around work that is done on the host: what it allocates is the host's."""
        with self.backend.on_host():
            yield

    def copied(self, tensor: torch.Tensor, to_host: bool) -> torch.Tensor:
        """On a CPU: `tensor` if it lies there already, else a copy there."""
        if self.on_host(tensor) == to_host:
            return tensor
        if not to_host:
            return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        like = self.backend.host_empty(tensor.numel() * tensor.element_size())
        return like.view(tensor.dtype).view(tensor.shape).copy_(tensor)


@contextlib.contextmanager
def offloading(memories: TwoMemories) -> Iterator[None]:
    """Inside, somebody else's offload works on a CPU as on a device; elsewhere nothing changes.

    ``cpu()`` copies to the host, ``to(device)`` brings there what is on the device and up what is on the host (on a CPU
    both have one name), ``clone()``, ``float()`` and ``to(dtype)`` stay where they are, ``is_cuda`` tells. At torch's
    own methods: a function mode does not reach what runs in backward.
    """
    if memories.told_apart:
        yield
        return
    clone, cast, to, is_cuda = torch.Tensor.clone, torch.Tensor.float, torch.Tensor.to, torch.Tensor.is_cuda

    def stays(original):
        def method(tensor, *args, **kwargs):
            if not _plain(tensor) or not memories.on_host(tensor):
                return original(tensor, *args, **kwargs)
            with memories.hosted():
                return memories.mark(original(tensor, *args, **kwargs))

        return method

    def moved(tensor, *args, **kwargs):
        where = kwargs.get("device", args[0] if args else None)
        alone = len(args) + len(kwargs.keys() - {"non_blocking"}) == 1
        if not _plain(tensor) or not alone or not isinstance(where, (str, torch.device)):
            return stays(to)(tensor, *args, **kwargs)
        return memories.copied(tensor, to_host=not memories.on_host(tensor))

    methods = {
        "cpu": lambda tensor, *args, **kwargs: memories.copied(tensor, to_host=True),
        "pin_memory": lambda tensor, *args: tensor,
        "clone": stays(clone),
        "float": stays(cast),
        "to": moved,
        "is_cuda": property(lambda tensor: not memories.on_host(tensor) if _plain(tensor) else is_cuda.__get__(tensor)),
    }
    for name, method in methods.items():
        setattr(torch.Tensor, name, method)
    try:
        yield
    finally:
        for name in methods:
            delattr(torch.Tensor, name)  # what was inherited is there again


def _plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


class Traffic(TorchDispatchMode):
    """Counts inside what is copied between the memories, and what collectives gather and reduce; on this rank."""

    def __init__(self, memories: TwoMemories) -> None:
        super().__init__()
        self._memories = memories
        self.gathers = self.gathered_bytes = self.reductions = self.reduced_bytes = 0
        self.bytes_to_device = self.bytes_to_host = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Else what has been compiled would run uncompiled from then on, also for the variants that come later."""
        return True

    def figures(self) -> dict[str, int]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_") and type(value) is int}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any("DTensor" in kind.__name__ for kind in types):
            return NotImplemented  # seen again when it comes to the local tensors
        result = function(*args, **(kwargs or {}))
        name = function._schema.name
        self._count(name, args, result)
        if not self._memories.told_apart and name != "aten::copy_":
            self._stay(args, result)
        return result

    def _stay(self, args: tuple, result: object) -> None:
        """On a CPU: what is computed from what is on the host is there as well."""
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        if tensors and all(map(self._memories.on_host, tensors)):
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._memories.mark(leaf)

    def _count(self, name: str, args: tuple, result: object) -> None:
        space, _, short = name.partition("::")
        if short == "copy_":
            self._copy(args[1], args[0])
        elif short == "_to_copy" and self._memories.told_apart:
            self._copy(args[0], result)
        elif short == "_foreach_copy_":
            for target, source in zip(args[0], args[1], strict=True):
                self._copy(source, target)
        elif space == "c10d" and short in GATHERS:
            self.gathers += 1
            self.gathered_bytes += _bytes(args[0])
        elif space == "c10d" and (short in SCATTERS or short.startswith("allreduce")):
            self.reductions += 1
            self.reduced_bytes += _bytes(args[1] if short in SCATTERS else args[0])

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        above, below = not self._memories.on_host(target), not self._memories.on_host(source)
        if above != below:
            self.bytes_to_device += target.nbytes * above
            self.bytes_to_host += target.nbytes * below


def _bytes(tree: object) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
