"""Building a model without its memory: `lazy_init`. Each parameter's value is computed when its chunk is built.

    torch.manual_seed(7)
    with lazy_init():
        model = GPT2LMHeadModel(config)      # nothing is allocated; random numbers advance as they would
    model = GeminiDDP(model, device)         # chunk by chunk; each rank keeps its shards

Values are those of a build on the host without it, bit by bit, as long as the seed is the same on every rank.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import module as torch_modules

from mindspeed_mem.gemini.options import OptionError, refuse, refuse_unknown
from mindspeed_mem.gemini.recording import Disguise, Recorder, Tape


class lazy_init(contextlib.ContextDecorator):
    """Inside, what modules are built of has no memory; what would fill it is noted.

    Code inside may do anything with the new tensors but ask for their memory (`data_ptr()`); asking for values
    (`item()`, `tolist()`) computes them. Random numbers are the host's; what code asks for on another device is made.

    Args:
        dtype: to which floating-point parameters are rounded when they are computed; None: they stay as they are.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        if dtype is not None and not dtype.is_floating_point:
            raise OptionError(f"lazy_init: dtype is a floating-point type or None, not {dtype}")
        self.dtype = dtype
        self._inside: contextlib.ExitStack | None = None

    def __enter__(self) -> lazy_init:
        if self._inside is not None:
            raise RuntimeError("lazy_init: this context is entered already; use a new one")
        tape, inside = Tape(), contextlib.ExitStack()
        source = InitialValues(tape, self.dtype)

        def registered(module: torch.nn.Module, name: str, tensor: torch.Tensor | None) -> None:
            if tensor is not None and tape.knows(tensor):
                tensor.initial_value = functools.partial(
                    source.of, tensor.detach(), isinstance(tensor, torch.nn.Parameter)
                )

        for register in (
            torch_modules.register_module_parameter_registration_hook,
            torch_modules.register_module_buffer_registration_hook,
        ):
            inside.callback(register(registered).remove)
        inside.enter_context(Disguise(tape))
        inside.enter_context(Recorder(tape))
        self._inside = inside
        return self

    def __exit__(self, *failure: Any) -> None:
        inside, self._inside = self._inside, None
        inside.close()


class InitialValues:
    """Where the value of a lazily built tensor comes from."""

    def __init__(self, tape: Tape, dtype: torch.dtype | None) -> None:
        self._tape, self._dtype = tape, dtype

    def of(self, tensor: torch.Tensor, is_parameter: bool) -> torch.Tensor:
        value = self._tape.value(tensor)
        rounds = self._dtype is not None and is_parameter and value.is_floating_point()
        return value.to(self._dtype) if rounds else value


def initial_value(tensor: torch.Tensor) -> torch.Tensor:
    """The value of a parameter or buffer, computed now on the host if it was built lazily.

    Raises OptionError for a meta tensor that was not.
    """
    computed = getattr(tensor, "initial_value", None)
    if computed is not None:
        return computed()
    if tensor.is_meta:
        raise OptionError(
            f"a tensor of shape {tuple(tensor.shape)} is on the meta device, and nobody knows its value; build the "
            "model inside lazy_init(), or on a real device"
        )
    return tensor.detach()


@torch.no_grad()
def settle_parameters(module: torch.nn.Module) -> None:
    """Give lazily built parameters a device: others of their shape, without memory, take their places in `module`.

    `initial_value` computes what they stand for. Tied ones stay tied.
    """

    def placeholder(param: torch.nn.Parameter) -> torch.Tensor:
        if not hasattr(param, "initial_value"):
            initial_value(param)  # says what is wrong
        return torch.empty(1, dtype=param.dtype, device="cpu").expand(param.shape)

    _replace_meta(module, placeholder, keep_source=True)


@torch.no_grad()
def settle_buffers(module: torch.nn.Module, cast: Callable[[torch.Tensor], torch.Tensor] = lambda one: one) -> None:
    """Compute the lazily built buffers of `module`; `cast` gives each of them its device and dtype."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                if buffer not in made:
                    made[buffer] = cast(initial_value(buffer))
                owner._buffers[name] = made[buffer]


@torch.no_grad()
def materialize(module: torch.nn.Module) -> torch.nn.Module:
    """Compute all of `module`, built lazily, on the host; returns it. Its parameters are new objects."""
    _replace_meta(module, initial_value, keep_source=False)
    settle_buffers(module)
    return module


def _replace_meta(
    module: torch.nn.Module, value: Callable[[torch.nn.Parameter], torch.Tensor], keep_source: bool
) -> None:
    # Not torch.utils.swap_tensors: recurrent modules hold weak references to their weights, with which it refuses.
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for owner in module.modules():
        for name, param in list(owner._parameters.items()):
            if param is None or not param.is_meta:
                continue
            if param not in made:
                made[param] = torch.nn.Parameter(value(param), requires_grad=param.requires_grad)
                attributes = {k: one for k, one in param.__dict__.items() if keep_source or k != "initial_value"}
                made[param].__dict__.update(attributes)
            setattr(owner, name, made[param])


class ColoInitContext(lazy_init):
    """`lazy_init` under ColossalAI 0.1's name. device: has no meaning, since chunks decide where parameters are."""

    def __init__(self, device: Any = None, dtype: torch.dtype | None = None, **unknown: Any) -> None:
        refuse(refuse_unknown("ColoInitContext", unknown, ColoInitContext.__init__))
        super().__init__(dtype)


class LazyInitContext(lazy_init):
    """`lazy_init` under ColossalAI 0.3's name. default_device: has no meaning, as above."""

    def __init__(self, default_device: Any = None, **unknown: Any) -> None:
        refuse(refuse_unknown("LazyInitContext", unknown, LazyInitContext.__init__))
        super().__init__()

    @staticmethod
    def materialize(model: torch.nn.Module) -> torch.nn.Module:
        """Compute all of `model` on the host; returns it."""
        return materialize(model)
