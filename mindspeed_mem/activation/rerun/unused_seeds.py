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
        facts = _facts_of(op)
        if facts is not None and not facts.dropout(args, kwargs or {}):
            for place, made in enumerate(result):
                if isinstance(made, torch.Tensor) and (place in facts.places if facts.named else _may_be_seed(made)):
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


def _may_be_seed(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.int64, torch.uint64) and tensor.numel() <= 2


class _Facts(NamedTuple):
    """Of an operator that knows dropout and returns several things."""

    named: bool
    """What it returns; else (flash-attn's own operators) seeds are told by what they are."""
    places: frozenset[int]
    """Of seeds, among what it returns."""
    argument: int
    default: float

    def dropout(self, args: tuple, kwargs: dict[str, Any]) -> float:
        return args[self.argument] if self.argument < len(args) else kwargs.get(_DROPOUT, self.default)


@functools.cache
def _facts_of(op: Any) -> _Facts | None:
    """None: it returns no seeds."""
    schema = getattr(op, "_schema", None)
    names = [] if schema is None else [argument.name for argument in schema.arguments]
    if schema is None or _DROPOUT not in names or len(schema.returns) < 2:
        return None
    argument = names.index(_DROPOUT)
    places = frozenset(n for n, one in enumerate(schema.returns) if one.name in _SEEDS)
    named = any(one.name for one in schema.returns)
    if named and not places:
        return None
    return _Facts(named, places, argument, schema.arguments[argument].default_value or 0.0)
