"""Random number states, so that what runs again draws the same numbers. A patch adds Megatron's
trackers by replacing `capture` and `restore`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mindspeed_mem.activation import hot_path

if TYPE_CHECKING:
    from mindspeed_mem.device import Backend


class _States(NamedTuple):
    """The host's state, and those of devices by their index."""

    host: torch.Tensor
    devices: dict[int | None, torch.Tensor]


class _Source:
    backend: Backend | None = None


host_is_all = False
"""Whether the host's generator is that of the device, too."""


def follow(backend: Backend) -> None:
    """Take the generators of this device, besides the host's."""
    global host_is_all
    _Source.backend, host_is_all = backend, backend.is_host


def host_state() -> torch.Tensor:
    """The state of the host's generator: the very tensor of last time where C++ can tell that nobody drew since."""
    return torch.get_rng_state()


def device_state(index: int | None, fresh: Callable[[], Any]) -> Any:
    """What ``fresh()`` returns, the state of that device's generator (None: the current one's); as `host_state`."""
    native, backend = hot_path.native, _Source.backend
    if native is None or backend is None or (generator := backend.generator(index)) is None:
        return fresh()
    return native.device_state(generator, fresh)


def capture(tensors: Iterable[torch.Tensor] = ()) -> Any:
    """The states now: the host's, the current device's, and those of devices that ``tensors`` are on."""
    backend = _Source.backend
    if backend is None or backend.is_host:
        return _now(())
    return _now({backend.index()} | {t.get_device() for t in tensors if t.device.type == backend.tensor_type})


def capture_as(states: Any) -> Any:
    """The states now of what ``states`` has earlier ones of."""
    return _now(states.devices) if isinstance(states, _States) else capture()


def _now(devices: Iterable[int | None]) -> _States:
    backend = _Source.backend
    if backend is None:
        return _States(host_state(), {})
    return _States(host_state(), {one: device_state(one, functools.partial(backend.rng_state, one)) for one in devices})


def restore(states: Any) -> None:
    """Go on from what `capture` returned."""
    torch.set_rng_state(states.host)
    backend = _Source.backend
    if backend is not None:
        for index, state in states.devices.items():
            backend.set_rng_state(state, index)


def out_of_reach(modules: Iterable[torch.nn.Module]) -> str:
    """Which of ``modules`` draws from a state that nobody can put back; empty if none does.

    On devices a library keeps the state of the dropout between layers of recurrent ones (cuDNN, MIOpen), and each run
    moves it on, a second one too.
    """
    if _Source.backend is None or _Source.backend.is_host:
        return ""
    for one in modules:
        if isinstance(one, torch.nn.RNNBase) and one.training and one.dropout:
            return f"the dropout of its {type(one).__name__} goes on from a state that a library keeps and runs change"
    return ""


def move_on(states: Any) -> None:
    """Let the generators that ``states`` are of be elsewhere than in these."""
    torch.rand(1, device="cpu")  # whatever the default device is
    backend = _Source.backend
    if backend is not None and not backend.is_host:
        for index in states.devices if isinstance(states, _States) else (None,):
            torch.rand(1, device=backend.tensor_type if index is None else f"{backend.tensor_type}:{index}")


def same(states: Any, others: Any) -> bool:
    """Whether nothing was drawn between the two; False where that cannot be told."""
    native = hot_path.native
    return (native is not None and native.same_states(states, others)) or _same(states, others)


def _same(states: Any, others: Any) -> bool:
    if isinstance(states, torch.Tensor) and isinstance(others, torch.Tensor):
        # A tracker's that was not drawn from: whoever draws puts another tensor there.
        return states is others or torch.equal(states, others)
    if isinstance(states, (tuple, list)) and isinstance(others, (tuple, list)):
        return len(states) == len(others) and all(map(_same, states, others))
    if isinstance(states, dict) and isinstance(others, dict):
        return states.keys() == others.keys() and all(_same(states[key], others[key]) for key in states)
    return states is None and others is None


@contextlib.contextmanager
def as_of(states: Any) -> Iterator[None]:
    """Inside, the generators go on from ``states``; afterwards as if nothing had been drawn."""
    now = capture_as(states)
    restore(states)
    try:
        yield
    finally:
        restore(now)
