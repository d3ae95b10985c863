"""What an operator may change besides its result: found after its first run.

Its modules' attributes and buffers, generators, and what the Python functions that ran name and take: globals,
closures, arguments, and whatever these contain, a few levels deep, with what classes have besides methods. Tensors deep
in there count if anybody has written to them in place since they were made.
"""

from __future__ import annotations

import array
import dis
import gc
import random
import re
import sys
import threading
import weakref
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from enum import EnumMeta
from functools import lru_cache, partial
from itertools import islice
from operator import is_
from types import CodeType, FrameType, FunctionType, MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any

import torch

from mindspeed_mem.activation.rerun import changeable
from mindspeed_mem.activation.rerun.arguments import attributes_of
from mindspeed_mem.activation.rerun.bits import AT_ONCE
from mindspeed_mem.activation.rerun.changeable import PLAIN_KINDS, REBOUND, Changeable, is_a
from mindspeed_mem.activation.rerun.settings import ABSENT, OF_ANY_MODULE
from mindspeed_mem.activation.storage import marks

_MODEL, _OTHERS, _COMPILER = range(3)
_DEPTH, _MANY = 3, 256  # how deep in containers and objects; larger containers are taken as they are
_ATTRIBUTE = re.compile(r"\.(\w+)(?:\[[^\]]*\])*$")
_FOREIGN = {"torch", "torch_npu", "numpy", "mindspeed_mem", *sys.stdlib_module_names}
FOREIGN: list[str] = []
"""Beginnings of the names of more modules whose functions and objects belong to no operator."""
_OF_A_MODULE = OF_ANY_MODULE - {"training", "_buffers"}
_CONTAINERS = {dict, list, set, deque, Counter, OrderedDict, defaultdict}
OBJECTS = {SimpleNamespace, Namespace, threading.local}
_BYTES = {bytearray, array.array}
_NOT_LOOKED_INTO = (*PLAIN_KINDS, type, torch.autograd.function.FunctionCtx)
_NO_ARGUMENTS = (*_NOT_LOOKED_INTO, torch.Tensor, tuple)
_SHALLOW, _FEW = 2, 64  # how deep in modules tensors count whoever has written to them; modules of others


class _Seen(set[int]):
    """What has been looked at, by identity."""

    room = AT_ONCE
    """Elements of tensors that may still be looked at although nobody is known to have written to them."""


class Called:
    """Notes which Python functions run while it is entered; not under a profiler, which it would replace."""

    def __init__(self) -> None:
        # of whom a code is (see `_whose`), by its identity: codes of two files may be equal
        self._whose: dict[int, tuple[int, CodeType]] = {}
        self._compiles: FrameType | None = None  # under which nothing of the model runs
        self.found: dict[tuple[int, ...], tuple[CodeType, dict[str, Any], list[tuple[str, Any]]]] = {}
        """Code, globals, and by name what its closure held and its arguments were."""

    def __enter__(self) -> Called:
        self._mine = sys.getprofile() is None
        if self._mine:
            sys.setprofile(self._note)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if self._mine:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if self._compiles is not None:
            if event == "return" and frame is self._compiles:
                self._compiles = None
            return
        if event != "call":
            return
        code = frame.f_code
        known = self._whose.get(id(code))
        if known is None:
            known = self._whose[id(code)] = _whose(frame.f_globals.get("__name__")), code
        if known[0] == _COMPILER:
            self._compiles = frame
        elif known[0] == _MODEL:
            there = frame.f_locals
            held = [(name, there[name]) for name in code.co_freevars if name in there]
            held = [one for one in held if not issubclass(type(one[1]), _NOT_LOOKED_INTO)]
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            taken = [(name, there[name]) for name in names if name in there]
            held += [one for one in taken if not _left_out(type(one[1]))]
            key = id(code), *(id(value) for _, value in held)
            self.found[key] = code, frame.f_globals, held


def _whose(module: Any) -> int:
    if module == "torch._dynamo.convert_frame":
        return _COMPILER
    return _OTHERS if is_foreign(module) else _MODEL


def _left_out(kind: type) -> bool:
    """Nothing is looked for in such arguments. (Iterators' abstract class would run Python, which dynamo compiles.)"""
    return issubclass(kind, _NO_ARGUMENTS) or (hasattr(kind, "__next__") and hasattr(kind, "__iter__"))


def places_of(modules: Iterable[torch.nn.Module], state: Any, called: Called) -> tuple[list[Changeable], str]:
    """What may change when these modules run: theirs, what ``state`` has, and what the functions name that ran. And why
    that cannot be put back; empty if it can."""
    try:
        found = _places_of(modules, state, called)
    except Exception as error:  # of an object that nobody can look at; other ranks must not wait for this one
        return [], f"what it may change cannot be looked at ({type(error).__name__}: {error})"
    names = dict.fromkeys(place.name for place in found if place.write is changeable.never)
    return found, f"it may go on with an iterator ({', '.join(names)}), which each run moves on" if names else ""


def _places_of(modules: Iterable[torch.nn.Module], state: Any, called: Called) -> list[Changeable]:
    found = changeable.beside_torch()
    seen = _Seen()
    for root in modules:
        for path, module in root.named_modules():
            _attributes(weakref.ref(module), path or type(root).__name__, found, seen, 0)
            _class(type(module), found, seen, 0)
    if state is not None:
        _visit(changeable.reference(state), type(state).__name__, found, seen, 0)
    codes: set[int] = set()
    named: set[str] = set()
    for code, names, held in called.found.values():
        if id(code) not in codes:
            codes.add(id(code))
            named.update(code.co_names, [one for one in code.co_consts if type(one) is str])
            for there, known in in_modules(code, names, held):
                _names(known, there, found, seen)
            found += _cells(code)
        for name, value in held:
            _visit(changeable.argument_or(value), f"{code.co_name}'s {name}", found, seen, 0)
    return [place for place in found if place.write is not changeable.never or _may_be_reached(place.name, named)]


def in_modules(
    code: CodeType, names: dict[str, Any], held: list[tuple[str, Any]], foreign: bool = False
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The module's own names (``names``) and those of other modules that a function names or holds, by themselves or in
    another one, each with what the function names in it. ``foreign``: also those that belong to no operator."""
    known = {name: names[name] for name in _globals_in(code) if name in names}
    yield names, known
    seen: set[int] = set()
    left = deque((*known.values(), *(value for _, value in held), *map(sys.modules.get, _imported_by(code))))
    while left:
        value = left.popleft()
        if is_a(value, ModuleType) and id(vars(value)) not in seen and (foreign or not is_foreign(value.__name__)):
            there = vars(value)
            seen.add(id(there))
            known = {name: there[name] for name in code.co_names if name in there}
            yield there, known
            left.extend(known.values())


def _may_be_reached(name: str, named: set[str]) -> bool:
    """Whether functions that ran name the attribute that this place is, or lies in; which numbers the objects that a
    class makes is not moved on by these."""
    attribute = _ATTRIBUTE.search(name)
    return attribute is None or not named or attribute[1] in named


@lru_cache(4096)
def _names_in(code: CodeType, *operations: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.argval for one in dis.get_instructions(code) if one.opname in operations))


def _globals_in(code: CodeType) -> tuple[str, ...]:
    """Those of its names that are no attributes."""
    return _names_in(code, "LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "STORE_NAME")


def _imported_by(code: CodeType) -> tuple[str, ...]:
    """Modules, by their whole names, that it imports each time."""
    return _names_in(code, "IMPORT_NAME")


def stored_by(code: CodeType) -> tuple[str, ...]:
    """The names of globals and attributes that it sets."""
    return _names_in(code, "STORE_GLOBAL", "STORE_ATTR", "STORE_NAME")


def _names(known: dict[str, Any], names: dict[str, Any], found: list[Changeable], seen: _Seen) -> None:
    """Those of ``names`` that a function names."""
    rebound = [name for name, value in known.items() if is_a(value, REBOUND)]
    if rebound:
        found.append(changeable.variables(f"{names.get('__name__')}.{rebound[0]}", lambda: names, rebound))
    for name in known:
        _visit(partial(names.get, name), f"{names.get('__name__')}.{name}", found, seen, 0)


def _cells(code: CodeType) -> list[Changeable]:
    """The variables of functions around it that it sets (``nonlocal``)."""
    names = _set_outside(code)
    if not names:
        return []
    cells: dict[int, Changeable] = {}
    for function in gc.get_referrers(code):
        if isinstance(function, FunctionType) and function.__code__ is code:
            for place, (name, cell) in enumerate(zip(code.co_freevars, function.__closure__ or (), strict=True)):
                if name in names:
                    cells[id(cell)] = changeable.cell(name, weakref.ref(function), place)
    return list(cells.values())


def _set_outside(code: CodeType) -> set[str]:
    if not code.co_freevars:
        return set()
    names = {one.argval for one in dis.get_instructions(code) if one.opname in ("STORE_DEREF", "DELETE_DEREF")}
    inside = [one for one in code.co_consts if isinstance(one, CodeType)]
    return names.union(*map(_set_outside, inside)) & {*code.co_freevars}


def _visit(get: Callable[[], Any], name: str, found: list[Changeable], seen: _Seen, depth: int) -> None:
    value = get()
    kind = type(value)
    if is_a(value, PLAIN_KINDS) or id(value) in seen or depth > _DEPTH:
        return
    if is_a(value, type):
        _class(value, found, seen, depth)
        return
    if is_a(value, torch.nn.Module):  # none of the operator's own
        if str(kind.__module__).startswith(tuple(FOREIGN)):
            return
        several = list(islice(value.modules(), _FEW + 1))
        for one in several if len(several) <= _FEW else [value]:
            _attributes(weakref.ref(one), name, found, seen, depth)
            _class(type(one), found, seen, depth)
        return
    if is_a(value, torch.Tensor):
        if _may_change(value, seen, depth):
            seen.add(id(value))
            found.append(changeable.tensor(name, get))
    elif (own := _own_state(value)) is not None:
        seen.add(id(value))
        found.append(changeable.place(name, get, *own))
    elif kind.__module__ in ("builtins", "itertools") and is_a(value, Iterator):
        seen.add(id(value))
        found.append(Changeable(name, lambda: None, changeable.never, is_))
    elif kind is FunctionType:
        if vars(value) and not is_foreign(value.__module__):
            _attributes(get, name, found, seen, depth)
    elif kind in _CONTAINERS or (is_a(value, (dict, list, set, deque)) and not is_foreign(kind.__module__)):
        if kind not in _CONTAINERS:
            _attributes(get, name, found, seen, depth)
            _class(kind, found, seen, depth)
        seen.add(id(value))
        found.append(changeable.container(name, get))
        items = changeable.content_of(value)  # whatever a subclass makes of its methods
        if len(items) <= _MANY:
            for key, item in items.items() if isinstance(items, dict) else enumerate(items):
                inner = changeable.reference(item) if is_a(value, set) else partial(changeable.item, get, key)
                at = repr(key) if is_a(key, PLAIN_KINDS) else f"a {type(key).__name__}"  # never a tensor's values
                _visit(inner, f"{name}[{at}]", found, seen, depth + 1)
    elif is_a(value, tuple):
        for index in range(tuple.__len__(value)):
            _visit(partial(changeable.item, get, index), f"{name}[{index}]", found, seen, depth + 1)
    elif kind in OBJECTS:
        _attributes(get, name, found, seen, depth)
    elif not is_foreign(kind.__module__) and not hasattr(kind, "set_states"):  # Megatron's random states: see rng.py
        _slots(get, name, found, seen, depth)
        _attributes(get, name, found, seen, depth)
        _class(kind, found, seen, depth)


def _own_state(value: Any) -> tuple[Callable, Callable, Callable] | None:
    """How what an object holds that is no attribute, item or tensor is read, written back and compared; None: it holds
    nothing of the kind, or too much."""
    kind = type(value)
    if is_a(value, torch.Generator):
        return kind.get_state, kind.set_state, torch.equal
    if is_a(value, random.Random):
        return kind.getstate, kind.setstate, changeable.equal
    if kind in _BYTES and len(value) <= AT_ONCE:
        return lambda it: it[:], lambda it, earlier: it.__setitem__(slice(None), earlier), changeable.equal
    if str(kind.__module__).startswith("numpy.random"):
        if hasattr(value, "set_state"):
            return lambda it: it.get_state(), lambda it, earlier: it.set_state(earlier), changeable.equal
        if hasattr(value, "bit_generator"):
            return lambda it: it.bit_generator.state, _set_bits, changeable.equal
    if (kind.__module__, kind.__name__) == ("numpy", "ndarray"):
        if value.nbytes <= AT_ONCE and not value.dtype.hasobject:
            return kind.copy, lambda array, earlier: array.__setitem__(..., earlier), changeable.equal
    return None


def _may_change(tensor: torch.Tensor, seen: _Seen, depth: int) -> bool:
    """Whether it is memory of its own that can be put back, and may be written to in a run."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    if tensor.is_quantized:  # there is no way to compare bits
        return False
    if tensor.is_inference() or tensor.is_meta or (tensor.requires_grad and not tensor.is_leaf):
        return False
    if not tensor._version and (depth > _SHALLOW or tensor.numel() > seen.room or tensor.requires_grad):
        return False  # nobody has written to it but past its version (``tensor.data``)
    storage = tensor.untyped_storage()
    if not storage.nbytes() or marks.is_managed(storage):
        return False
    if not tensor._version:
        seen.room -= tensor.numel()
    return True


def _class(kind: type, found: list[Changeable], seen: _Seen, depth: int) -> None:
    """What a class, and those that it derives from, count and collect in themselves."""
    for one in kind.__mro__:
        if id(one) in seen or is_foreign(one.__module__) or is_a(one, EnumMeta):
            continue
        seen.add(id(one))
        name, get = one.__qualname__, weakref.ref(one)
        known = {key: value for key, value in vars(one).items() if not key.startswith("__")}
        rebound = [key for key, value in known.items() if is_a(value, REBOUND)]
        if rebound:
            found.append(changeable.class_attributes(name, get, rebound))
        for key in known:
            if not is_a(known[key], (*PLAIN_KINDS, MemberDescriptorType)):
                _visit(partial(changeable.class_item, get, key), f"{name}.{key}", found, seen, depth + 1)


def _attributes(get: Callable[[], Any], name: str, found: list[Changeable], seen: _Seen, depth: int) -> None:
    owner, attributes = get(), partial(_vars, get)
    if id(owner) in seen or not (known := attributes()):
        return
    seen.add(id(owner))
    found.append(changeable.container(name, attributes))
    for key in list(known):
        if not is_a(owner, torch.nn.Module) or key not in _OF_A_MODULE:
            inner = partial(changeable.item, attributes, key)
            _visit(inner, name if key == "_buffers" else f"{name}.{key}", found, seen, depth + 1)


def _slots(get: Callable[[], Any], name: str, found: list[Changeable], seen: _Seen, depth: int) -> None:
    """What an object keeps without a dictionary."""
    members = slots_of(type(get()))
    if not members or id(get()) in seen:
        return
    found.append(changeable.slots(name, get, members))
    for member in members:
        inner = partial(changeable.of_slot, get, member)
        if inner() is not ABSENT:
            _visit(inner, f"{name}.{member.__name__}", found, seen, depth + 1)


def slots_of(kind: type) -> list[MemberDescriptorType]:
    kinds = [one for one in kind.__mro__ if not is_foreign(one.__module__)]
    return [one for kind in kinds for one in vars(kind).values() if is_a(one, MemberDescriptorType)]


def _vars(get: Callable[[], Any]) -> dict[str, Any] | None:
    return attributes_of(get())


def is_foreign(name: Any) -> bool:
    """Whether a module of this name belongs to no operator."""
    name = str(name or "builtins")  # of a class it may be a property of its objects
    return name.partition(".")[0] in _FOREIGN or name.startswith(tuple(FOREIGN))


def _set_bits(generator: Any, earlier: Any) -> None:
    generator.bit_generator.state = earlier
