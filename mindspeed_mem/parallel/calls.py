"""The torch functions that a model calls, found by one forward without numbers: what `auto` chooses strategies for.

Calls are what rows of a plan name, so what is chosen can be run; a graph of torch.export has operators whose calls, and
the order of their tensors, are forgotten.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from mindspeed_mem.parallel.operators import function_name


@dataclass(eq=False)
class Value:
    """A tensor of the model: a parameter or buffer, an input, a constant, or what a call made."""

    name: str
    like: torch.Tensor
    kind: str
    call: Call | None = None
    """That made it."""
    place: int = 0
    """Among what that call made."""

    @property
    def bytes(self) -> int:
        return self.like.numel() * self.like.element_size()


@dataclass(eq=False)
class Call:
    """One call of a torch function by the forward of a module."""

    path: str
    name: str
    """Of its row: "fc1:linear.0"; "" where a plan cannot name it."""
    function: Callable
    leaves: list[Any]
    """Its arguments, flat; None in place of tensors."""
    tree: Any
    places: list[int]
    """Where among them the tensors are."""
    inputs: list[Value]
    outputs: list[Value] = field(default_factory=list)
    keeps_inputs: set[int] = field(default_factory=set)
    """Which backward needs."""
    keeps_outputs: set[int] = field(default_factory=set)
    keeps_bytes: int = 0
    """What else it keeps for backward."""

    def run(self, tensors: Any) -> Any:
        """The function with other tensors."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self.tree)
        return self.function(*args, **kwargs)


@dataclass
class Ends:
    """Of one call of a module."""

    path: str
    inputs: list[Value]
    first: int
    """The number of the first call of a function inside."""
    last: int = 0
    """And of the first one after it."""
    outputs: list[Value] = field(default_factory=list)


@dataclass
class Calls:
    """What one forward of a model consists of."""

    tensors: list[Value]
    """Parameters, buffers and the model's inputs."""
    calls: list[Call]
    results: list[Value]
    modules: list[Ends]


def calls_of(model: nn.Module, example: tuple | Mapping[str, Any]) -> Calls:
    """The calls of ``model(*example)`` or ``model(**example)``, which is not computed and changes nothing."""
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        named = dict(model.named_parameters()) | dict(model.named_buffers())
        state = {name: _like(tensor, fake) for name, tensor in named.items()}
        args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (tuple(example), {})
        bound = inspect.signature(model.forward).bind(*args, **kwargs)  # rows go by the order of arguments
        args, kwargs = bound.args, bound.kwargs
        args, kwargs = tree_map(lambda v: _like(v, fake) if isinstance(v, torch.Tensor) else v, (args, kwargs))
        recorder = _Recorder()
        for name, tensor in state.items():
            recorder.add(name, tensor, "parameter" if isinstance(named[name], nn.Parameter) else "buffer")
        leaves = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor) and one.dim()]
        for number, tensor in enumerate(leaves):
            recorder.add(f"input {number}", tensor, "input")
        hooks = []
        for path, module in model.named_modules():
            hooks.append(module.register_forward_pre_hook(recorder.enter(path), with_kwargs=True))
            hooks.append(module.register_forward_hook(recorder.leave, always_call=True))
        try:
            with torch.enable_grad(), recorder, torch.autograd.graph.saved_tensors_hooks(recorder.keep, lambda x: x):
                result = functional_call(model, state, args, kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        made = [recorder.values.get(id(one)) for one in tree_flatten(result)[0] if isinstance(one, torch.Tensor)]
        return Calls(recorder.tensors, recorder.calls, [one for one in made if one is not None], recorder.modules)


def _like(tensor: torch.Tensor, fake: FakeTensorMode) -> torch.Tensor:
    return fake.from_tensor(tensor.detach(), static_shapes=True).detach().requires_grad_(tensor.requires_grad)


class _Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.values: dict[int, Value] = {}
        self.tensors: list[Value] = []
        self.calls: list[Call] = []
        self.modules: list[Ends] = []
        self._frames: list[tuple[str, Counter[str], Ends]] = []
        self._kept: list[torch.Tensor] | None = None

    def add(self, name: str, tensor: torch.Tensor, kind: str) -> None:
        value = self.values[id(tensor)] = Value(name, tensor, kind)
        self.tensors.append(value)

    def enter(self, path: str) -> Callable:
        def note(module: nn.Module, args: tuple, kwargs: dict) -> None:
            bound = inspect.signature(module.forward).bind(*args, **kwargs)
            self._frames.append((path, Counter(), Ends(path, self._among(dict(bound.arguments)), len(self.calls))))

        return note

    def leave(self, module: nn.Module, args: Any, result: Any) -> None:
        *_, ends = self._frames.pop()
        ends.last, ends.outputs = len(self.calls), self._among(result)
        self.modules.append(ends)

    def _among(self, values: Any) -> list[Value]:
        """The tensors with dimensions, as rows count them."""
        found = [one for one in tree_flatten(values)[0] if isinstance(one, torch.Tensor) and one.dim()]
        return [self.values.get(id(one)) or Value("constant", one, "constant") for one in found]

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Autograd saves it."""
        if self._kept is not None:
            self._kept.append(tensor)
        return tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, tree = tree_flatten((args, kwargs))
        known = [self.values.get(id(one)) for one in leaves if isinstance(one, torch.Tensor)]
        if not self._frames or not any(one is not None and one.kind != "constant" for one in known):
            return func(*args, **kwargs)
        self._kept = []
        try:
            result = func(*args, **kwargs)
        finally:
            kept, self._kept = self._kept, None
        path, counts, _ = self._frames[-1]
        dunder = getattr(func, "__name__", "") in ("__get__", "__set__")
        name = "" if dunder else function_name(func)
        number = counts[name]
        counts[name] += not dunder
        made = [one for one in tree_flatten(result)[0] if isinstance(one, torch.Tensor)]
        if not made or all(id(one) in self.values for one in made) and not name.endswith("_"):
            return result
        places = [
            place
            for place, one in enumerate(leaves)
            if isinstance(one, torch.Tensor) and (id(one) in self.values or one.dim())
        ]
        tensors = [leaves[place] for place in places]
        inputs = [self.values.setdefault(id(one), Value("constant", one, "constant")) for one in tensors]
        row = f"{path}:{name}.{number}" if name else ""
        bare = [None if place in places else one for place, one in enumerate(leaves)]
        call = Call(path, row, func, bare, tree, places, inputs)
        self._note(call, tensors, made, kept)
        for place, tensor in enumerate(made):
            value = Value(f"{row or path}", tensor, "made", call, place)
            call.outputs.append(value)
            self.values[id(tensor)] = value
        self.calls.append(call)
        return result

    def _note(self, call: Call, tensors: list, made: list, kept: list) -> None:
        of_input = {one.untyped_storage()._cdata: place for place, one in reversed(list(enumerate(tensors)))}
        of_output = {one.untyped_storage()._cdata: place for place, one in reversed(list(enumerate(made)))}
        for tensor in {one.untyped_storage()._cdata: one for one in kept}.values():
            storage = tensor.untyped_storage()._cdata
            if storage in of_input:
                call.keeps_inputs.add(of_input[storage])
            elif storage in of_output:
                call.keeps_outputs.add(of_output[storage])
            else:
                call.keeps_bytes += tensor.numel() * tensor.element_size()
