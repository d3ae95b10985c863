"""Building a model without its memory: `lazy_init`. Each parameter's value is computed when its chunk is built.

    torch.manual_seed(7)
    with lazy_init():
        model = GPT2LMHeadModel(config)      # nothing is allocated; random numbers advance as they would
    model = GeminiDDP(model, device)         # chunk by chunk; each rank keeps its shards

Values are those of a build on the host without it, bit by bit, as long as the seed is the same on every rank.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.modules import module as torch_modules
from torch.utils._pytree import tree_leaves, tree_map

from mindspeed_mem.gemini.options import OptionError, refuse, refuse_unknown
from mindspeed_mem.zero.plain.construction import Construction, Disguise, Recorder


class lazy_init(contextlib.ContextDecorator):
    """A context in which modules are built without memory; the operations that would fill them are recorded.

    Code inside may do anything with the new tensors except ask for their memory (`data_ptr()`); asking for values
    (`item()`, `tolist()`) computes them. Random numbers are drawn on the host. Tensors that code explicitly asks for on
    another device are allocated there.

    Args:
        dtype: the type to which floating-point parameters are rounded when they are computed; None: no rounding.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        if dtype is not None and not dtype.is_floating_point:
            raise OptionError(f"lazy_init: dtype is a floating-point type or None, not {dtype}")
        self.dtype = dtype
        self._inside: contextlib.ExitStack | None = None
        self._values: InitialValues | None = None

    def __enter__(self) -> lazy_init:
        if self._inside is not None:
            raise RuntimeError("lazy_init: this context is entered already; use a new one")
        self._values, inside = InitialValues(Construction(), self.dtype), contextlib.ExitStack()

        def registered(module: torch.nn.Module, name: str, tensor: torch.Tensor | None) -> None:
            if tensor is not None:
                self._take(tensor)

        def joined(module: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
            if child is not None:  # perhaps a copy, whose tensors nobody has registered
                for tensor in itertools.chain(child.parameters(), child.buffers()):
                    self._take(tensor)

        for register, hook in (
            (torch_modules.register_module_parameter_registration_hook, registered),
            (torch_modules.register_module_buffer_registration_hook, registered),
            (torch_modules.register_module_module_registration_hook, joined),
        ):
            inside.callback(register(hook).remove)
        inside.callback(self._values.close)
        inside.enter_context(Disguise(self._values.tape))
        inside.enter_context(Recorder(self._values.tape))
        self._inside = inside
        return self

    def __exit__(self, *failure: Any) -> None:
        inside, self._inside = self._inside, None
        assert inside is not None, "entered"
        inside.close()
        self._values = None

    def _take(self, tensor: torch.Tensor) -> None:
        """A module has `tensor`."""
        assert self._values is not None, "entered"
        self._values.keep(tensor)


_IS_META = operator.attrgetter("is_meta")
_live: weakref.WeakSet[InitialValues] = weakref.WeakSet()


class InitialValues:
    """What the tensors built in one context stand for. Lives as long as one of them that a module has."""

    def __init__(self, tape: Construction, dtype: torch.dtype | None) -> None:
        self.tape, self._dtype = tape, dtype
        self._kept: list[weakref.ref[torch.Tensor]] = []
        _live.add(self)

    def __deepcopy__(self, memo: Any) -> InitialValues:
        return self

    def keep(self, tensor: torch.Tensor) -> None:
        """A module has `tensor`."""
        if not torch.nn.parameter.is_lazy(tensor) and self.tape.knows(tensor):
            vars(tensor)["initial_values"] = self  # which lives as long as it
            self._kept.append(weakref.ref(tensor))

    def close(self) -> None:
        """The context is over: changes from now on are not on the tape."""
        for tensor in (kept() for kept in self._kept):
            if tensor is not None:
                vars(tensor)["version_on_tape"] = tensor._version
        self._kept.clear()

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its value, computed now on the host."""
        value = self.tape.value(tensor)
        rounds = self._dtype is not None and isinstance(tensor, torch.nn.Parameter) and value.is_floating_point()
        return value.to(self._dtype) if rounds else value


def initial_value(tensor: torch.Tensor) -> torch.Tensor:
    """The value of a parameter or buffer, computed now on the host if it was built lazily.

    Raises OptionError for a tensor without content that was not, or that was changed after its context.
    """
    return _source(tensor)()


def _source(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """What computes the value of `tensor`. Raises as `initial_value`."""
    if not tensor.is_meta:
        if hasattr(tensor, "initial_value"):
            return tensor.initial_value
        if tensor.numel() and not tensor.untyped_storage().nbytes():
            raise OptionError(
                f"a tensor of shape {tuple(tensor.shape)} has no memory: it lies in the chunks of another model; load "
                "that one's state_dict() into a module built anew"
            )
        return tensor.detach
    values = next((one for one in _live if one.tape.knows(tensor)), None)
    if values is not None and getattr(tensor, "version_on_tape", tensor._version) == tensor._version:
        return lambda: values.of(tensor)
    # Converted buffers are others, of which nobody knows where they come from: one message has to do.
    raise OptionError(
        f"a tensor of shape {tuple(tensor.shape)} is on the meta device, and nobody knows its value: it was not built "
        "inside lazy_init(), or it was changed or converted after it, when there is no content to change; do that "
        "inside, or build on a real device, or load values into the wrapped model"
    )


@torch.no_grad()
def settle_parameters(module: torch.nn.Module) -> None:
    """Give lazily built parameters a device: others of their shape, without memory, take their places in `module`.

    `initial_value` computes what they stand for. Tied ones stay tied.
    """
    _replace(module, _IS_META, lambda param: _placeholder(param, param.shape, _source(param)))


@torch.no_grad()
def take_parts(
    module: torch.nn.Module, cuts: Mapping[torch.nn.Parameter, Callable[[torch.Tensor], torch.Tensor]]
) -> None:
    """Let what `cuts` make of parameters take their places in `module`; it is computed when its chunk is built.

    Parts carry the attribute `tensor_model_parallel`.
    """

    def part(param: torch.nn.Parameter) -> torch.nn.Parameter:
        source, cut = _source(param), cuts[param]
        made = _placeholder(param, cut(torch.empty(param.shape, device="meta")).shape, lambda: cut(source()))
        vars(made)["tensor_model_parallel"] = True
        return made

    _replace(module, cuts.__contains__, part)


def _placeholder(
    param: torch.nn.Parameter, shape: torch.Size, source: Callable[[], torch.Tensor]
) -> torch.nn.Parameter:
    """A parameter without memory, which stands for what `source` computes."""
    empty = torch.empty((), dtype=param.dtype, device="cpu").expand(shape)
    made = torch.nn.Parameter(empty, requires_grad=param.requires_grad)
    vars(made)["initial_value"] = source
    return made


@torch.no_grad()
def settle_buffers(module: torch.nn.Module, cast: Callable[[torch.Tensor], torch.Tensor] = lambda one: one) -> None:
    """Compute the lazily built buffers of `module`; `cast` gives each of them its device and dtype.

    Tensors in other attributes are computed as well, and stay on the host, as nobody moves those of a plain build.
    """
    made: dict[torch.Tensor, torch.Tensor] = {}
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                if buffer not in made:
                    made[buffer] = cast(initial_value(buffer))
                owner._buffers[name] = made[buffer]

    def settled(one: Any) -> Any:
        if not _is_unsettled(one):
            return one
        if one not in made:
            made[one] = initial_value(one)
        return made[one]

    for owner in module.modules():
        for name, held in vars(owner).items():
            if isinstance(held, (torch.Tensor, list, tuple, dict)) and any(map(_is_unsettled, tree_leaves(held))):
                setattr(owner, name, tree_map(settled, held))


def _is_unsettled(one: Any) -> bool:
    """Whether `one` is a lazily built tensor that is no parameter: a parameter's place is its module."""
    known = isinstance(one, torch.Tensor) and one.is_meta and not isinstance(one, torch.nn.Parameter)
    return known and any(values.tape.knows(one) for values in _live)


@torch.no_grad()
def materialize(module: torch.nn.Module) -> torch.nn.Module:
    """Compute all of `module`, built lazily, on the host; returns it. Its parameters are new objects."""
    settle_buffers(module)
    _replace(module, _IS_META, lambda one: torch.nn.Parameter(initial_value(one), requires_grad=one.requires_grad))
    return module


def _replace(
    module: torch.nn.Module,
    chosen: Callable[[torch.nn.Parameter], bool],
    replacement: Callable[[torch.nn.Parameter], torch.nn.Parameter],
) -> None:
    """Others take the places of the parameters `chosen`, with all that they carry. Tied ones stay tied."""
    # Not torch.utils.swap_tensors: recurrent modules hold weak references to their weights, with which it refuses.
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for owner in module.modules():
        for name, param in list(owner._parameters.items()):
            if param is None or not (param in made or chosen(param)):
                continue
            if param not in made:
                made[param] = replacement(param)
                made[param].__class__ = type(param)
                ours = ("initial_values", "initial_value", "version_on_tape")
                for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                    if getattr(param, hooks) is not None:
                        setattr(made[param], hooks, getattr(param, hooks))
                made[param].__dict__.update({key: one for key, one in vars(param).items() if key not in ours})
            setattr(owner, name, made[param])


class LazyInitContext(lazy_init):
    """`lazy_init` under ColossalAI 0.3's name. default_device: has no meaning, as above."""

    def __init__(self, default_device: Any = None, **unknown: Any) -> None:
        refuse(refuse_unknown("LazyInitContext", unknown, LazyInitContext.__init__))
        super().__init__()

    @staticmethod
    def materialize(model: torch.nn.Module) -> torch.nn.Module:
        """Compute all of `model` on the host; returns it."""
        return materialize(model)
