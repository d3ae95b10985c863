"""A second attempt at a training step that ran out of memory: what the first has changed is put back before.

Only where this rank alone can do so without the others: collectives that it has taken part in cannot be taken back.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from mindspeed_mem.activation.rerun import rng
from mindspeed_mem.activation.rerun.changeable import GENERATORS, Changeable, beside_torch
from mindspeed_mem.activation.rerun.model_buffers import Buffer
from mindspeed_mem.activation.storage.records import version_of

_SMALL = 64 * 1024  # bytes; larger buffers of a model (tables) are not written to by its forward, but for vectors


class RecordedIterator:
    """Hands on what a data iterator gives, and after `rewind` the same once more."""

    def __init__(self, iterator: Iterator):
        self._iterator, self._next = iterator, 0
        self._given: list[tuple[Any, list[tuple[Changeable, Any]]]] = []
        """With those generators that it drew from, as they were then."""

    def __iter__(self) -> RecordedIterator:
        return self

    def __next__(self) -> Any:
        if self._next == len(self._given):
            before = [(place, place.read()) for place in (GENERATORS, *beside_torch())]
            batch = next(self._iterator)
            now = [(place, then, place.read()) for place, then in before]
            self._given.append((batch, [(place, after) for place, then, after in now if not place.same(after, then)]))
            self._next += 1
        else:
            batch, drawn = self._given[self._next]
            self._next += 1
            for place, after in drawn:
                place.write(after)
        return copy.copy(batch) if isinstance(batch, (dict, list)) else batch  # who takes it may take it apart

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    @property
    def used(self) -> bool:
        return self._next > 0

    def rewind(self) -> None:
        self._next = 0


class BeforeStep:
    """What a training call finds, so that it can be put back.

    Args:
        models: the model chunks, in their data parallel wrapper.
        zeroed: for each, whether its gradient buffers have been zeroed and nothing was added since.
    """

    def __init__(self, models: Iterable[Any], zeroed: Iterable[bool]):
        self.models = list(models)
        self._random = rng.capture(p for model in self.models for p in model.parameters())
        self._others = [(place, place.read()) for place in beside_torch()]
        self._zeroed = all(zeroed) and all(p.grad is None for m in self.models for p in m.parameters())
        modules = [module for model in self.models for module in model.modules()]
        holders = [_holder(module) for module in modules]
        self._buffers = [Buffer.of(one, name, _is_copied(one[name])) for one in holders for name in one]
        self._names = [(one, set(one)) for one in holders]

    def why_not(self, iterator: RecordedIterator | None, started: bool) -> str:
        """Why the call cannot be repeated; empty if it can.

        ``iterator``: what it took its micro-batches from; ``started``: whether a forward began.
        """
        if not self._zeroed:
            return "gradients of an earlier call were in the buffers"
        whole = [(one.tensor, one.version) for one in self._buffers if one.value is None and one.tensor is not None]
        if any(version_of(tensor) != version for tensor, version in whole):
            return "a buffer of the model was changed"
        if started and (iterator is None or not iterator.used):
            return "its micro-batches did not come from the data iterator"
        return rng.out_of_reach(module for model in self.models for module in model.modules())

    def put_back(self, iterator: RecordedIterator | None) -> None:
        """Make everything as it was before the call."""
        gc.collect()  # graphs of the failed attempt
        if iterator is not None:
            iterator.rewind()
        with torch.no_grad():
            for model in self.models:
                for parameter in model.parameters():
                    parameter.grad = None
                if hasattr(model, "zero_grad_buffer"):
                    model.zero_grad_buffer()
        for buffer in self._buffers:
            buffer.put()
        for holder, names in self._names:
            for name in holder.keys() - names:  # made by the attempt
                del holder[name]
        rng.restore(self._random)
        for place, then in self._others:
            place.write(then)


def _holder(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Where it has its buffers; a scripted module's are its own, and only what they contain is put back."""
    buffers = module._buffers
    return buffers if isinstance(buffers, dict) else dict(buffers.items())


def _is_copied(buffer: torch.Tensor | None) -> bool:
    return buffer is not None and (buffer.dim() == 1 or buffer.numel() * buffer.element_size() <= _SMALL)


def forget_frames(error: BaseException) -> None:
    """The frames that an error and its causes went through hold tensors: let go of them."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            todo += [one.__cause__, one.__context__]
