"""Where shards rest, in device memory or on the host, and how their content gets to the device and back.

Copies between the two run beside computation where the device can do that, on streams of the store's own:

| later work | waits for | because |
|---|---|---|
| a copy to the device | compute so far | what it writes to may have a previous user on compute |
| the use of what was brought | its copy | the bytes must be there (a collective starts on the copies' stream instead) |
| a copy to the device of what is still on its way here | that copy to the host | it reads what that one writes |
| a copy to the host | compute so far | the content must be there |
| compute, before a copy's source is freed | that copy | it may still read |

The host waits itself before it reads or writes what rests here: `Store.settle`.
"""

from __future__ import annotations

import collections
import contextlib
import weakref

import torch

from mindspeed_mem.device import Backend, Event, Stream

UP_AFTER_COMPUTE = "shard up after compute"
USE_AFTER_UP = "use after shard up"
UP_AFTER_DOWN = "shard up after gradients down"
DOWN_AFTER_COMPUTE = "gradient down after compute"
FREE_AFTER_DOWN = "free after gradient down"
WAITS = (UP_AFTER_COMPUTE, USE_AFTER_UP, UP_AFTER_DOWN, DOWN_AFTER_COMPUTE, FREE_AFTER_DOWN)

_LEAVING = 2
"""Copies to the host whose sources may be there at once, beside the one that begins."""


class Store:
    """Device memory: tensors lie where their model is, and everything is done by the compute stream."""

    on_host = False

    def like(self, tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        """An uninitialised contiguous tensor of the shape and dtype of `tensor`, here; None: its device is ours."""
        return torch.empty_like(tensor, device=device, memory_format=torch.contiguous_format)

    def bring(self, target: torch.Tensor, source: torch.Tensor) -> Event | None:
        """Copy `source`, which rests here, to `target` on the device; both one-dimensional, contiguous, of one dtype.

        Returns what to `meet` before `target` is used, or None if computation may go on with it.
        """
        target.copy_(source)
        return None

    def meet(self, event: Event) -> None:
        """Let computation wait for what `bring` returned."""

    def beside(self) -> contextlib.AbstractContextManager:
        """A collective that is started inside comes after all that was brought, and does not wait for computation."""
        return contextlib.nullcontext()

    def fetch(self, source: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Event] | None:
        """Start to bring a copy of `source`, which rests here or is on its way, to `device`; with what to `meet`.

        None where work on `source` itself holds up nobody.
        """
        return None

    def take(self, target: torch.Tensor, source: torch.Tensor, lasting: bool = False) -> None:
        """Copy `source` on the device to `target`, which rests here, as in `bring`.

        `source` may be changed or freed at once. With `lasting` it may be dropped only, until `settle`.
        """
        target.copy_(source)

    def settle(self) -> None:
        """Let the host wait for all copies to and from here."""


class HostStore(Store):
    """Host memory, pinned where that exists, outside what a CPU counts as device memory."""

    on_host = True

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._streams: tuple[Stream, Stream] | None = None
        self._busy: set[int] = set()  # their numbers, since the host has waited for them
        self._leaving: collections.deque[tuple[Event, torch.Tensor, torch.Tensor]] = collections.deque()

    def like(self, tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        if not tensor.numel():
            return torch.empty_like(tensor, device="cpu")
        held = self._backend.host_empty(tensor.numel() * tensor.element_size())
        _made.add(held.untyped_storage())
        return held.view(tensor.dtype).view(tensor.shape)

    def bring(self, target: torch.Tensor, source: torch.Tensor) -> Event | None:
        return super().bring(target, source) if self._backend.copies_block else self._up(target, source)

    def _up(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        backend, stream = self._backend, self._side(0)
        backend.wait(stream, backend.record(backend.current_stream()), UP_AFTER_COMPUTE)
        backend.copy(target.view(torch.uint8), source.view(torch.uint8), stream)
        return backend.record(stream)

    def meet(self, event: Event) -> None:
        self._backend.wait(self._backend.current_stream(), event, USE_AFTER_UP)

    def beside(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self._backend.copies_block else self._backend.on_stream(self._side(0))

    def fetch(self, source: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Event] | None:
        if self._backend.copies_block:
            return None
        memory = source.untyped_storage()._cdata
        for event, _, written in self._leaving:  # for what is not there somebody has waited
            if written.untyped_storage()._cdata == memory:
                self._backend.wait(self._side(0), event, UP_AFTER_DOWN)
        target = torch.empty_like(source, device=device)
        return target, self._up(target, source)

    def take(self, target: torch.Tensor, source: torch.Tensor, lasting: bool = False) -> None:
        if self._backend.copies_block:
            return super().take(target, source)
        backend, stream = self._backend, self._side(1)
        while self._leaving and (len(self._leaving) > _LEAVING or backend.done(self._leaving[0][0])):
            backend.wait(backend.current_stream(), self._leaving[0][0], FREE_AFTER_DOWN)
            self._leaving.popleft()
        kept = source if lasting else source.clone()  # the whole of which this is a part need not wait for the copy
        backend.wait(stream, backend.record(backend.current_stream()), DOWN_AFTER_COMPUTE)
        backend.copy(target.view(torch.uint8), kept.view(torch.uint8), stream)
        self._leaving.append((backend.record(stream), kept, target))

    def settle(self) -> None:
        for number in sorted(self._busy):
            self._backend.synchronize(self._backend.record(self._side(number)))
        self._busy.clear()
        self._leaving.clear()

    def _side(self, number: int) -> Stream:
        """The stream of that number, for work that somebody may have to wait for."""
        if self._streams is None:
            self._streams = self._backend.new_stream("shards up"), self._backend.new_stream("gradients down")
        self._busy.add(number)
        return self._streams[number]


DEVICE = Store()
_made: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()


def rests_on_host(tensor: torch.Tensor) -> bool:
    """Whether `tensor` lies in memory of a `HostStore`, which is filled anew while it is kept."""
    return tensor.untyped_storage() in _made


def device_of(backend: Backend) -> torch.device:
    """Where its tensors lie now: the accelerator that this process uses, or the host."""
    index = backend.index()
    return torch.device(backend.tensor_type) if index is None else torch.device(backend.tensor_type, index)


def norm_on(device: torch.device, tensor: torch.Tensor, norm_type: float = 2.0) -> torch.Tensor:
    """The fp32 norm of `tensor`, which may rest on the host, as `device` takes it of one that lies there; shape [].

    A copy is there for that, and then is dropped. The host adds up in another order, which over millions of elements
    is off by 1e-5: a norm would depend on where gradients rest. Whoever reads it waits for the copy as well.
    """
    here = tensor.to(device, non_blocking=tensor.is_pinned())
    return torch.linalg.vector_norm(here, norm_type, dtype=torch.float32)
