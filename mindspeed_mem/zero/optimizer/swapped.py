"""The optimizer's step for parameters that rest on the host: up to the device group by group, stepped there, and back.

Two buffers take turns, so that one group is on its way back while the next comes:

| later work | waits for | because |
|---|---|---|
| the first copies in | compute so far | the buffers may have a previous user on compute |
| a copy in | the copies out of the buffer's last group | they may still read it |
| a group's step | its copy in | the bytes must be there |
| a copy out | the group's step | the result must be written |
| compute, before a group's other tensors are freed | its copies out | they may still read them |

At the end the host waits for the last copy: what rests on the host is read by anybody, without asking.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed_mem.device import Backend, Event, Stream, is_host_device
from mindspeed_mem.zero.optimizer.host_adam import GradientScaling

IN_AFTER_COMPUTE = "swap in after compute"
IN_AFTER_OUT = "swap in after the buffer's last copy out"
STEP_AFTER_IN = "step after swap in"
OUT_AFTER_STEP = "swap out after step"
FREE_AFTER_OUT = "free after swap out"
WAITS = (IN_AFTER_COMPUTE, IN_AFTER_OUT, STEP_AFTER_IN, OUT_AFTER_STEP, FREE_AFTER_OUT)

GRAIN = 1024
"""Elements: parameters are cut at multiples of it, so that vector kernels treat every element as in the whole."""

_ALIGNMENT = 256  # bytes, of each tensor in a buffer
_MASTER, _GRADIENT = object(), object()

State = dict[Hashable, Any]
Steps = Callable[[dict[int, list[torch.Tensor]], "defaultdict[torch.Tensor, State]"], None]


@dataclass
class Swapped:
    """A parameter that rests on the host, with what its step needs."""

    group: int
    """Index of its parameter group."""
    param: torch.Tensor
    state: State
    """The optimizer's, on the host as far as it `travels`."""
    gradient: torch.Tensor
    count_on_device: bool = False
    """Whether the optimizer wants the step count where the parameter is."""
    made: dict[Hashable, torch.Tensor] = field(default_factory=dict)
    """States that the step makes."""


@dataclass
class _Piece:
    """A part of a parameter, elements start to stop, on the device for one step."""

    of: Swapped
    start: int
    stop: int
    stand_in: torch.Tensor = field(init=False)
    gradient: torch.Tensor | None = None
    """A copy, where the parameter's own is not on the device."""
    state: State = field(default_factory=dict)


@dataclass
class _Group:
    pieces: list[_Piece]
    arrived: Event = field(init=False)
    gone: Event = field(init=False)
    kept: list[torch.Tensor] = field(default_factory=list)  # outside the buffer, until `gone`


def travels(key: Hashable, value: Any, param: torch.Tensor) -> bool:
    """Whether this part of the optimizer's state of `param` is of the parameter's shape: it rests where that does."""
    return isinstance(value, torch.Tensor) and value.shape == param.shape and key != "step"


class SwappedStep:
    """One step of some parameters; `fetch` and `run` once each, then `drain` in any case.

    Args:
        streams: for the copies in and out, side streams of `backend`.
        group_bytes: of one buffer. There are two (one where copies block), and beside them on the device what the
            optimizer's own operators take for a group.
        divisible: whether a parameter may be stepped in parts. If not, a group holds at least one parameter, however
            large that is.
        host_like: makes a host tensor like another, for a state that a step has made.
    """

    def __init__(
        self,
        backend: Backend,
        streams: tuple[Stream, Stream],
        params: Sequence[Swapped],
        group_bytes: int,
        divisible: bool,
        host_like: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._backend, self._group_bytes = backend, group_bytes
        self._in, self._out = streams
        self._host_like, self.params = host_like, params
        self._groups = list(self._cut(params, divisible))
        sizes = [sum(_room(t) for p in g.pieces for t in self._inputs(p).values()) for g in self._groups]
        count = min(len(sizes), 1 if backend.copies_block else 2)
        self._buffers = [backend.empty(max(sizes)) for _ in range(count)]

    def fetch(self) -> None:
        """Start to copy the first groups in."""
        compute = self._backend.current_stream()
        self._backend.wait(self._in, self._backend.record(compute), IN_AFTER_COMPUTE)
        for number in range(len(self._buffers)):
            self._load(number)

    def run(self, step: Steps, scaling: GradientScaling) -> None:
        """Step all groups: ``step(stand-ins of each parameter group, state of each stand-in)`` is called for each."""
        for number, group in enumerate(self._groups):
            self._backend.wait(self._backend.current_stream(), group.arrived, STEP_AFTER_IN)
            self._step(group, step, scaling)
            self._send(group)
            if number + len(self._buffers) < len(self._groups):
                if group.kept:
                    self._backend.wait(self._backend.current_stream(), group.gone, FREE_AFTER_OUT)
                group.kept.clear()
                group.pieces.clear()
                self._backend.wait(self._in, group.gone, IN_AFTER_OUT)
                self._load(number + len(self._buffers))

    def drain(self) -> None:
        """The host waits for all copies; what they have used may be freed."""
        for stream in (self._in, self._out):
            self._backend.synchronize(self._backend.record(stream))

    # ---- groups

    def _cut(self, params: Sequence[Swapped], divisible: bool) -> Iterator[_Group]:
        pieces: list[_Piece] = []
        room = self._group_bytes
        for owner in params:
            elements, start = owner.param.numel(), 0
            each, tensors = self._bytes_per_element(owner)
            while start < elements:
                fits = max(room - tensors * _ALIGNMENT, 0) // each
                take = elements - start
                if take > fits:
                    take = fits // GRAIN * GRAIN if divisible else 0
                if not take and not pieces:
                    take = min(GRAIN, elements - start) if divisible else elements
                if take:
                    pieces.append(_Piece(owner, start, start + take))
                    room -= take * each + tensors * _ALIGNMENT
                    start += take
                else:
                    yield _Group(pieces)
                    pieces, room = [], self._group_bytes
        if pieces:
            yield _Group(pieces)

    def _bytes_per_element(self, owner: Swapped) -> tuple[int, int]:
        """On the device, and in how many tensors."""
        inputs = self._inputs(_Piece(owner, 0, 0))
        each = [tensor.element_size() for tensor in inputs.values()]
        if not owner.state:
            each += [owner.param.element_size()] * 2  # not known before the first step: as Adam has
        return sum(each), len(each)

    def _inputs(self, piece: _Piece) -> dict[Hashable, torch.Tensor]:
        """What a piece needs from the host, flat."""
        owner = piece.of
        found: dict[Hashable, torch.Tensor] = {_MASTER: owner.param}
        found |= {key: value for key, value in owner.state.items() if travels(key, value, owner.param)}
        if not self._backend.owns(owner.gradient):
            found[_GRADIENT] = owner.gradient
        return {key: _flat(value)[piece.start : piece.stop] for key, value in found.items()}

    # ---- one group

    def _load(self, number: int) -> None:
        group, buffer, offset = self._groups[number], self._buffers[number % len(self._buffers)], 0
        for piece in group.pieces:
            here: dict[Hashable, torch.Tensor] = {}
            for key, source in self._inputs(piece).items():
                target = buffer[offset : offset + source.nbytes]
                offset += _room(source)
                self._backend.copy(target, source.view(torch.uint8), self._in)
                here[key] = target.view(source.dtype)
            self._dress(piece, here)
        group.arrived = self._backend.record(self._in)

    def _dress(self, piece: _Piece, here: dict[Hashable, torch.Tensor]) -> None:
        """Give the piece its stand-in and state, made of the flat tensors `here`, which are not filled yet."""
        owner = piece.of
        whole = piece.stop - piece.start == owner.param.numel()
        shape = owner.param.shape if whole else (piece.stop - piece.start,)
        piece.stand_in = here.pop(_MASTER).view(shape)
        piece.gradient = here.pop(_GRADIENT, None)
        for key, value in owner.state.items():
            if key in here:
                piece.state[key] = here[key].view(shape)
            elif key == "step" and owner.count_on_device:
                piece.state[key] = _count_on(piece.stand_in.device, value)
            else:  # a copy for each part: the optimizer may count in place
                piece.state[key] = value.clone() if isinstance(value, torch.Tensor) else value

    def _gradient(self, piece: _Piece, scaling: GradientScaling) -> torch.Tensor:
        """Scaled, of the stand-in's dtype and shape; the gradient that was given stays as it is."""
        came = piece.gradient is not None
        grad = _flat(piece.of.gradient)[piece.start : piece.stop] if piece.gradient is None else piece.gradient
        grad = grad.to(piece.stand_in.dtype, copy=not came and not scaling.neutral)
        scaling.apply_(grad)
        return grad.view(piece.stand_in.shape)

    def _step(self, group: _Group, step: Steps, scaling: GradientScaling) -> None:
        chosen: dict[int, list[torch.Tensor]] = {}
        states: defaultdict[torch.Tensor, State] = defaultdict(dict)
        for piece in group.pieces:
            piece.stand_in.grad = self._gradient(piece, scaling)
            chosen.setdefault(piece.of.group, []).append(piece.stand_in)
            states[piece.stand_in] = piece.state
        step(chosen, states)

    def _send(self, group: _Group) -> None:
        """Copy back what the step has changed."""
        compute = self._backend.current_stream()
        results = [pair for piece in group.pieces for pair in self._results(piece, group)]
        self._backend.wait(self._out, self._backend.record(compute), OUT_AFTER_STEP)
        for target, source in results:
            self._backend.copy(target.view(torch.uint8), source.view(torch.uint8), self._out)
        group.gone = self._backend.record(self._out)

    def _results(self, piece: _Piece, group: _Group) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What goes back: targets on the host and sources on the device, flat.

        The state itself changes with a parameter's last piece: the pieces before all start from the same.
        """
        owner, here = piece.of, slice(piece.start, piece.stop)
        last = piece.stop == owner.param.numel()
        yield _flat(owner.param)[here], _flat(piece.stand_in)
        for key, value in piece.state.items():
            if travels(key, value, piece.stand_in):
                source = _flat(value.contiguous())
                if all(source.untyped_storage() is not buffer.untyped_storage() for buffer in self._buffers):
                    group.kept.append(source)
                yield _flat(self._rest(owner, key, value))[here], source
            elif last:
                owner.state[key] = _replaced(owner.state.get(key), value)
        if last:
            owner.state |= owner.made

    def _rest(self, owner: Swapped, key: Hashable, value: torch.Tensor) -> torch.Tensor:
        """Where a state of which `value` is a part rests; made if there was none before this step."""
        rest: Any = owner.made.get(key, owner.state.get(key))
        if not travels(key, rest, owner.param) or rest.dtype != value.dtype:
            like = torch.empty(owner.param.shape, dtype=value.dtype, device="meta")
            rest = owner.made[key] = self._host_like(like)
        return rest


def _count_on(device: torch.device, count: torch.Tensor) -> torch.Tensor:
    """A copy of the step count `count` on `device`."""
    if is_host_device(count.device):  # filled in: the host would wait for a copy from memory that is not pinned
        return torch.full_like(count, count.item(), device=device)
    return count.to(device, copy=True)


def _replaced(old: Any, new: Any) -> Any:
    """`new`, as the same tensor where it is one of the same kind."""
    kinds = [(type(t), t.shape, t.dtype, t.device) if isinstance(t, torch.Tensor) else None for t in (old, new)]
    return old.copy_(new) if kinds[0] is not None and kinds[0] == kinds[1] else new


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1)


def _room(tensor: torch.Tensor) -> int:
    """Bytes of a buffer that `tensor` takes."""
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
