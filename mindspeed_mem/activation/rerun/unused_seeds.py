"""What attention keeps as the seed of its dropout where there is no dropout: memory that nobody has written.

torch's fused kernels (flash, memory-efficient, cuDNN) return a seed and an offset either way, and backward is given
them; without dropout they are empty tensors (aten/src/ATen/native/transformers/cuda), so two runs need not agree.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

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
        attention = _with_dropout(op)
        if attention is not None and not attention.dropout(args, kwargs or {}):
            for place, made in enumerate(result):
                if isinstance(made, torch.Tensor) and attention.may_be_seed(place, made):
                    self._seen.append(local_of(made).untyped_storage())
        return result

    def are(self, tensor: torch.Tensor | None) -> bool:
        """Whether it is one of them."""
        if not self._seen or tensor is None or type(tensor := local_of(tensor)) is not torch.Tensor:
            return False
        if tensor.layout is not torch.strided:
            return False
        storage = tensor.untyped_storage()
        return any(storage._cdata == one._cdata for one in self._seen)


class _WithDropout(NamedTuple):
    """An operator that is told how much dropout there is, and returns several things."""

    seeds: frozenset[int] | None
    """Their places among what it returns; None (flash-attn's own operators) where that has no names."""
    argument: int
    default: float

    def dropout(self, args: tuple, kwargs: dict[str, Any]) -> float:
        return args[self.argument] if self.argument < len(args) else kwargs.get(_DROPOUT, self.default)

    def may_be_seed(self, place: int, made: torch.Tensor) -> bool:
        if self.seeds is not None:
            return place in self.seeds
        return made.dtype in (torch.int64, torch.uint64) and made.numel() <= 2


@functools.cache
def _with_dropout(op: Any) -> _WithDropout | None:
    """None: it returns no seeds."""
    schema = getattr(op, "_schema", None)
    names = [] if schema is None else [argument.name for argument in schema.arguments]
    if schema is None or _DROPOUT not in names or len(schema.returns) < 2:
        return None
    argument, returned = names.index(_DROPOUT), [one.name for one in schema.returns]
    seeds = frozenset(n for n, name in enumerate(returned) if name in _SEEDS) if any(returned) else None
    if seeds == frozenset():
        return None
    return _WithDropout(seeds, argument, schema.arguments[argument].default_value or 0.0)
