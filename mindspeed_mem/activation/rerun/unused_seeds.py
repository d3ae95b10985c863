"""What attention keeps as the seed of its dropout where there is no dropout: memory that nobody has written.

torch's fused kernels (flash, memory-efficient, cuDNN) return a seed and an offset either way, and backward is given
them; without dropout they are empty tensors (aten/src/ATen/native/transformers/cuda), so two runs need not agree.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_mem.activation.storage.records import local_of

_SEEDS = frozenset({"philox_seed", "philox_offset", "rng_state", "unused"})
_DROPOUT = "dropout_p"


class UnusedSeeds(TorchDispatchMode):
    """Inside, notes which storages are such seeds."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[torch.UntypedStorage] = []  # kept, so that no other has its address

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions stay compiled; what they do is out of its sight."""
        return True

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        places, dropout = _places(op)
        if places:
            given = args[dropout] if dropout < len(args) else (kwargs or {}).get(_DROPOUT, 0.0)
            if not given:
                seeds = [result[place] for place in places]
                self._seen += [local_of(seed).untyped_storage() for seed in seeds if isinstance(seed, torch.Tensor)]
        return result

    def are(self, tensor: torch.Tensor | None) -> bool:
        """Whether it is one of them."""
        if not self._seen or tensor is None or type(tensor := local_of(tensor)) is not torch.Tensor:
            return False
        if tensor.layout is not torch.strided:
            return False
        storage = tensor.untyped_storage()
        return any(storage._cdata == one._cdata for one in self._seen)


@functools.cache
def _places(op: Any) -> tuple[tuple[int, ...], int]:
    """Where an operator returns seeds of dropout, and which argument says how much of it there is."""
    schema = getattr(op, "_schema", None)
    if schema is None:
        return (), 0
    names = [argument.name for argument in schema.arguments]
    if _DROPOUT not in names or len(schema.returns) < 2:
        return (), 0
    return tuple(n for n, one in enumerate(schema.returns) if one.name in _SEEDS), names.index(_DROPOUT)
