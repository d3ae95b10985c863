"""What modules are set to, noted when an operator runs first: a second run finds them as they were then.

Whether they are in training mode, plain values among their attributes (the number of the use of a shared block), lists
and tuples of such (names of adapters), which modules they have, and which tensors are their parameters and buffers:
`torch.func.functional_call` exchanges these for the time of a forward. What else modules refer to is as it is then.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from operator import is_
from typing import Any, NamedTuple

import torch

from mindspeed_mem.activation import hot_path
from mindspeed_mem.activation.regions import TAG

PLAIN: frozenset[type] = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
_PLAIN_OR_TUPLES = PLAIN | {tuple}
UNKNOWN, ABSENT = object(), object()
"""In the place of a value that is not plain, which is not noted as it might hold memory; and where there was none."""
OF_ANY_MODULE = frozenset(vars(torch.nn.Module()))
_NO_SETTINGS = OF_ANY_MODULE | {TAG}
_OF_TORCH = {torch.Tensor, torch.nn.Parameter, type(None)}

Tensors = tuple[torch.Tensor | None, ...]


class Kind(NamedTuple):
    """What to note of a module. What looks at all of them for each operator goes by the order of these."""

    reference: weakref.ref[torch.nn.Module]
    names: tuple[str, ...]
    """Of its attributes that are settings."""
    with_tensors: bool
    """Whether parameters and buffers are noted, too."""
    attributes: tuple[str, ...]
    """All that it has, in their order."""
    children: tuple[int, ...] | None
    """Which modules it has; None: these are not seen. No other module takes the number of one that is alive."""
    seen: frozenset[str]
    """All attributes that it has had: those among them that are none of the settings stay none."""
    names_of_children: tuple[str, ...]


Noted = tuple[torch.nn.Module, Kind, bool, tuple[Any, ...], tuple[str, ...], Tensors, tuple[bool, ...]]
"""A module, its kind, whether it was in training mode, values of the kind's names, names of its parameters and buffers
with these, and which of them were to get gradients."""


def kinds_of(modules: Iterable[torch.nn.Module], before: Iterable[Kind] = ()) -> list[Kind]:
    """What to note of each of these modules; ``before``: what was noted of some of them."""
    known = {id(module): kind for kind in before if (module := kind.reference()) is not None}
    return [_kind_of(module, vars(module), known.get(id(module))) for module in modules]


def _kind_of(module: torch.nn.Module, attributes: dict[str, Any], before: Kind | None) -> Kind:
    if before is None:
        before = Kind(weakref.ref(module), (), True, (), None, _NO_SETTINGS, ())
    new = [name for name, value in attributes.items() if name not in before.seen and is_setting(value)]
    children, places = attributes.get("_modules"), (attributes.get("_parameters"), attributes.get("_buffers"))
    with_tensors = before.with_tensors and all(isinstance(place, dict) for place in places)  # TorchScript's are others
    seen = before.seen.union(attributes)
    kind = Kind(before.reference, (*before.names, *new), with_tensors, tuple(attributes), None, seen, ())
    return _with_children(kind, children) if isinstance(children, dict) else kind


def _with_children(kind: Kind, children: dict[str, torch.nn.Module | None]) -> Kind:
    return kind._replace(children=tuple(map(id, dict.values(children))), names_of_children=tuple(dict.keys(children)))


def is_setting(value: Any) -> bool:
    return type(value) in PLAIN or (type(value) in (list, tuple) and PLAIN.issuperset(map(type, value)))


def modes(kinds: Iterable[Kind]) -> tuple[bool, ...]:
    """Which modules are in training mode now."""
    found = []
    for reference, *_ in kinds:
        if (module := reference()) is not None:
            found.append(module.training)
    return tuple(found)


def still_apply(kinds: Iterable[Kind]) -> bool:
    """Whether all are alive, with the attributes and modules that they had when it was asked what to note."""
    for reference, _, _, had, children, *_ in kinds:
        if (module := reference()) is None:
            return False
        attributes = module.__dict__
        if tuple(attributes) != had:
            return False
        if children is not None and tuple(map(id, dict.values(attributes["_modules"]))) != children:
            return False
    return True


def note(kinds: Iterable[Kind]) -> list[Noted]:
    """What they are set to now, where `still_apply`."""
    if hot_path.native is not None:
        return hot_path.native.note_settings(kinds)
    noted: list[Noted] = []
    for kind in kinds:
        reference, names, with_tensors, *_ = kind
        if (module := reference()) is None:
            continue
        attributes = module.__dict__
        values = tuple(map(attributes.get, names, repeat(ABSENT)))
        if not PLAIN.issuperset(map(type, values)) and not (
            _PLAIN_OR_TUPLES.issuperset(map(type, values))
            and PLAIN.issuperset(map(type, chain.from_iterable(filter(tuple.__instancecheck__, values))))
        ):
            values = tuple(map(_noted, values))
        of_tensors, tensors = (), ()
        if with_tensors:
            parameters, buffers = attributes["_parameters"], attributes["_buffers"]
            of_tensors, tensors = (*parameters, *buffers), (*parameters.values(), *buffers.values())
        wanted = tuple(map(getattr, tensors, repeat("requires_grad"), repeat(False)))
        noted.append((module, kind, module.training, values, of_tensors, tensors, wanted))
    return noted


def _noted(value: Any) -> Any:
    if value is not ABSENT and not is_setting(value):
        return UNKNOWN
    return list(value) if type(value) is list else value  # what others append to it is none of this, and may be large


def are(noted: Iterable[Noted]) -> bool:
    """Whether modules are set as they were, for all that one can see at once."""
    for module, kind, training, values, of_tensors, tensors, wanted in noted:
        attributes = module.__dict__
        if module.training != training or tuple(attributes) != kind[3]:
            return False
        if kind[4] is not None and tuple(map(id, dict.values(attributes["_modules"]))) != kind[4]:
            return False
        found = tuple(map(attributes.get, kind[1], repeat(ABSENT)))
        if not all(map(is_, found, values)) and not all(map(_same, found, values)):
            return False
        if of_tensors:
            parameters, buffers = attributes["_parameters"], attributes["_buffers"]
            now = (*parameters.values(), *buffers.values())
            if (*parameters, *buffers) != of_tensors or not all(map(is_, now, tensors)):
                return False
            if tuple(map(getattr, now, repeat("requires_grad"), repeat(False))) != wanted:
                return False
    return True


def of_others(noted: Iterable[Noted]) -> list[Noted]:
    """Without what has become another since: what modules change in their own run is none of a program's settings."""
    found: list[Noted] = []
    for module, kind, training, values, of_tensors, tensors, wanted in noted:
        attributes = vars(module)
        left = {n: then for n, then in zip(kind.names, values, strict=True) if _same(attributes.get(n, ABSENT), then)}
        kind = kind._replace(names=(*left,), attributes=tuple(attributes), seen=kind.seen.union(attributes))
        if kind.children is not None:
            kind = _with_children(kind, attributes["_modules"])
        if of_tensors and not are([(module, kind, module.training, (*left.values(),), of_tensors, tensors, wanted)]):
            kind, of_tensors, tensors, wanted = kind._replace(with_tensors=False), (), (), ()
        found.append((module, kind, training, (*left.values(),), of_tensors, tensors, wanted))
    return found


@contextlib.contextmanager
def as_of(noted: Sequence[Noted]) -> Iterator[None]:
    """Within, modules are set as they were; afterwards as they are now, without what is made once more within: a table,
    a layer when it is first asked for."""
    modules: dict[int, Any] = {id(module): module for module, *_ in noted} | {id(None): None}
    with contextlib.ExitStack() as stack:
        for module, kind, training, values, of_tensors, tensors, wanted in noted:
            if module.training != training:
                stack.callback(setattr, module, "training", module.training)
                module.training = training
            attributes = vars(module)
            for place in (attributes, attributes.get("_parameters"), attributes.get("_buffers")):
                if isinstance(place, dict):  # TorchScript's are others
                    stack.callback(_put_back, place, dict(place), kind.with_tensors)
            if kind.children is not None and modules.keys() >= {*kind.children}:  # else its first run has made them
                children = attributes["_modules"]
                stack.callback(_set_all, children, dict(children))
                _set_all(children, dict(zip(kind.names_of_children, map(modules.get, kind.children), strict=True)))
            for name in [name for name in attributes if name not in kind.seen and is_setting(attributes[name])]:
                del attributes[name]
            for name, then in zip(kind.names, values, strict=True):
                if not _same(attributes.get(name, ABSENT), then):
                    _write(attributes, name, list(then) if type(then) is list else then)
            if of_tensors:
                _exchange(attributes["_parameters"], of_tensors, tensors, _is_lent)
                _exchange(attributes["_buffers"], of_tensors, tensors, _is_another)
            for tensor, want in zip(tensors, wanted, strict=True):
                if tensor is not None and tensor.is_leaf and tensor.requires_grad != want:
                    stack.callback(tensor.requires_grad_, tensor.requires_grad)
                    tensor.requires_grad_(want)
        yield


def _same(value: Any, then: Any) -> bool:
    if value is then or then is UNKNOWN:
        return True
    if type(value) is not type(then) or not is_setting(value):
        return False
    if type(value) in (list, tuple):
        return len(value) == len(then) and (all(map(is_, value, then)) or all(map(_same, value, then)))
    return value == then and repr(value) == repr(then)  # 0.0 equals -0.0


def _write(place: dict[str, Any], name: str, value: Any) -> None:
    if value is ABSENT:
        place.pop(name, None)
    else:
        place[name] = value


def _set_all(children: dict[str, Any], to: dict[str, Any]) -> None:
    """Their order counts."""
    if tuple(children) != tuple(to) or not all(map(is_, dict.values(children), to.values())):
        children.clear()
        children.update(to)


def _put_back(place: dict[str, Any], before: dict[str, Any], with_tensors: bool) -> None:
    for name in (*before, *[name for name in place if name not in before]):
        now, earlier = place.get(name, ABSENT), before.get(name, ABSENT)
        if now is not earlier and not any(_is_gathered(one, with_tensors) for one in (now, earlier)):
            _write(place, name, earlier)


def _is_gathered(value: Any, with_tensors: bool) -> bool:
    """Whether it may be a tensor that somebody gathers and shards (FSDP)."""
    return isinstance(value, torch.Tensor) and not (with_tensors and type(value) in _OF_TORCH)


def _exchange(place: dict, names: tuple[str, ...], then: Tensors, is_other: Callable) -> None:
    for name, tensor in zip(names, then, strict=True):  # by their names: one that was set anew has moved to the end
        if name in place and is_other(place[name], tensor):
            place[name] = tensor


def _is_another(now: torch.Tensor | None, then: torch.Tensor | None) -> bool:
    return now is not then and {type(now), type(then)} <= _OF_TORCH


def _is_lent(now: torch.Tensor | None, then: torch.Tensor | None) -> bool:
    """Whether somebody has exchanged one parameter for the other, neither gathered nor sharded it (FSDP)."""
    if now is None or then is None or not _is_another(now, then):
        return False
    if any(one.is_nested or one.layout is not torch.strided for one in (now, then)):
        return True
    if (now.shape, now.dtype, now.device) != (then.shape, then.dtype, then.device):
        return False
    storage, another = then.untyped_storage(), now.untyped_storage()
    alike = (now.storage_offset(), now.stride()) == (then.storage_offset(), then.stride())  # or a view of it, detached
    return storage.nbytes() > 0 and (alike or storage._cdata != another._cdata)
