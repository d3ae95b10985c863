"""What operators are known to need: room for it is made before they run, so that their allocations do not fail.

An allocation that fails makes torch's allocator give back all that it keeps and wait for the device first. What an
operator returns is seen when it runs for the first time; what it lacked beyond that is learnt each time that it fails
all the same, and so is how much room an allocator has to have, in pieces, beyond what it is asked for. Of sizes that an
operator has not been given before (experts get other tokens each time) it is taken to need as much as of others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from mindspeed_mem.device.op_rules import storages

_MOST = 1 << 16
"""Kinds of calls that are remembered; where shapes keep changing, all are forgotten beyond it."""


class OpNeeds:
    """Bytes by operator and sizes of its arguments; ``owns`` says of a tensor whether it lies in device memory."""

    def __init__(self, owns: Callable[[torch.Tensor], bool]) -> None:
        self._owns = owns
        self._known: dict[tuple, int] = {}
        self._beyond: dict[tuple, int] = {}  # what calls that were known lacked all the same
        # At most: parts of what an operator is given, and bytes; of what it returns, and of what it lacked beyond that.
        self._like: dict[Any, tuple[float, int]] = {}
        self._like_beyond: dict[Any, tuple[float, int]] = {}
        self.margin = 0
        """Bytes of room that are of no use, as far as allocations have failed in spite of them."""
        self.left = 0
        """Room that there is at least, less `margin`, as somebody has seen who looked at it."""

    def key(self, op: Any, args: tuple, kwargs: dict) -> tuple | None:
        """Of a call; None for one that allocates nothing."""
        if getattr(op, "is_view", False):
            return None
        return op, *map(_kind, args), *map(_kind, kwargs.values())

    def of(self, key: tuple | None, args: tuple, kwargs: dict) -> int:
        """What such a call with these arguments needs, as far as anybody knows."""
        if key is None:
            return 0
        known = self._known.get(key)
        if known is not None:
            return known + self._beyond.get(key, 0)
        like = [table[key[0]] for table in (self._like, self._like_beyond) if key[0] in table]
        given = _given(args, kwargs) if like else 0
        return max((min(int(part * given), most) for part, most in like), default=0)

    def saw(self, key: tuple | None, result: Any, args: tuple, kwargs: dict) -> None:
        """What such a call returned."""
        if key is None or key in self._known:
            return
        if len(self._known) >= _MOST:
            self._known.clear()
            self._beyond.clear()
        before, new = storages(args, kwargs), {}
        for leaf in tree_iter(result):
            if type(leaf) is torch.Tensor and leaf.layout is torch.strided and self._owns(leaf):
                storage = leaf.untyped_storage()
                new[storage._cdata] = storage.nbytes()
        self._learn(key, sum(nbytes for storage, nbytes in new.items() if storage not in before), args, kwargs)

    def lacked(self, key: tuple | None, nbytes: int, room: int | None, args: tuple, kwargs: dict) -> None:
        """Such a call asked for so many bytes in vain, with this room left."""
        self.left = 0
        if key is not None and key not in self._known:
            self._learn(key, nbytes, args, kwargs)
        elif key is not None:
            self._beyond[key] = self._beyond.get(key, 0) + nbytes
            _resembles(self._like_beyond, key[0], self._known[key] + self._beyond[key], args, kwargs)
        if room is not None and nbytes:
            self.margin = max(self.margin, room - nbytes)

    def forget(self) -> None:
        """Memory is used in another way from now on: what calls lacked beyond what they return is not known of it."""
        self._beyond.clear()
        self._like_beyond.clear()
        self.margin = self.left = 0

    def _learn(self, key: tuple, nbytes: int, args: tuple, kwargs: dict) -> None:
        self._known[key] = nbytes
        _resembles(self._like, key[0], nbytes, args, kwargs)


def _resembles(table: dict[Any, tuple[float, int]], op: Any, nbytes: int, args: tuple, kwargs: dict) -> None:
    part, most = table.get(op, (0.0, 0))
    given = _given(args, kwargs)
    table[op] = max(part, nbytes / given if given else 0.0), max(most, nbytes)


def _kind(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return None if argument.is_nested else (argument.dtype, argument.shape, argument.is_cpu)
    if isinstance(argument, (list, tuple)):
        return tuple(map(_kind, argument))
    return argument if isinstance(argument, (int, float, torch.dtype, torch.device)) else None


def _given(args: tuple, kwargs: dict) -> int:
    tensors = (leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor))
    return sum(one.nbytes for one in tensors if one.layout is torch.strided)
