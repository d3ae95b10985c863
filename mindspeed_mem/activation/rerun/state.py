"""What an operator changes besides its result: found after its first run, and put back whenever it runs again.

Its modules' attributes and buffers, generators, and what the Python functions that ran name and take: globals,
closures, arguments, and whatever these contain, a few levels deep, with what classes have besides methods. Tensors deep
in there count if anybody has written to them in place since they were made.
"""

from __future__ import annotations

import array
import contextlib
import dis
import gc
import pickle
import random
import re
import sys
import threading
import weakref
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import EnumMeta
from functools import lru_cache, partial
from itertools import islice, zip_longest
from operator import is_
from types import CellType, CodeType, FrameType, FunctionType, MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from mindspeed_mem.activation.rerun import rng
from mindspeed_mem.activation.rerun.arguments import attributes_of
from mindspeed_mem.activation.rerun.bits import AT_ONCE, same_bits
from mindspeed_mem.activation.rerun.settings import ABSENT, OF_ANY_MODULE, PLAIN
from mindspeed_mem.activation.storage import marks

_DEPTH, _MANY = 3, 256  # how deep in containers and objects; larger containers are taken as they are
_ATTRIBUTE = re.compile(r"\.(\w+)(?:\[[^\]]*\])*$")
_FOREIGN = {"torch", "torch_npu", "numpy", "mindspeed_mem", *sys.stdlib_module_names}
FOREIGN: list[str] = []
"""Beginnings of the names of more modules whose functions and objects belong to no operator."""
_OF_A_MODULE = OF_ANY_MODULE - {"training", "_buffers"}
_CONTAINERS = {dict, list, set, deque, Counter, OrderedDict, defaultdict}
_OBJECTS = {SimpleNamespace, Namespace, threading.local}
_BYTES = {bytearray, array.array}
_PLAIN = tuple(PLAIN)
_BASES: tuple[Any, ...] = (OrderedDict, dict, set, deque, list)
_REBOUND = (*_PLAIN, torch.Tensor, tuple, frozenset)
"""What changes by another being put in its place."""
_NOT_LOOKED_INTO = (*_PLAIN, type, torch.autograd.function.FunctionCtx)
_NO_ARGUMENTS = (*_NOT_LOOKED_INTO, torch.Tensor, tuple, Iterator)
_SHALLOW, _FEW = 2, 64  # how deep in modules tensors count whoever has written to them; modules of others


_given: list[dict[Any, Any]] = []
"""What operators were given of which places are looked at, by position or name; innermost last."""


class Changeable(NamedTuple):
    """Something that may change: how to read it, to write it, and to say whether two readings are the same.

    What lies in others is looked up in them each time: a program may put a new list, tensor or number there.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    same: Callable[[Any, Any], bool]


class _Content(NamedTuple):
    """A tensor's, and its version: whoever has saved the tensor asks whether that is still the same."""

    bits: torch.Tensor
    version: int
    as_it_is: Any  # sets the version to that


class _Seen(set[int]):
    """What has been looked at, by identity."""

    room = AT_ONCE
    """Elements of tensors that may still be looked at although nobody is known to have written to them."""


class Called:
    """Notes which Python functions run while it is entered; not under a profiler, which it would replace."""

    def __init__(self) -> None:
        self._foreign: dict[int, tuple[bool, CodeType]] = {}  # by identity: codes of two files may be equal
        self.found: dict[tuple[int, ...], tuple[CodeType, dict[str, Any], list[Any]]] = {}
        """Code, globals, and what its closure held and its arguments were."""

    def __enter__(self) -> Called:
        self._mine = sys.getprofile() is None
        if self._mine:
            sys.setprofile(self._note)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if self._mine:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        known = self._foreign.get(id(code))
        if known is None:
            known = self._foreign[id(code)] = _foreign(frame.f_globals.get("__name__")), code
        if not known[0]:
            there = frame.f_locals
            held = [there[name] for name in code.co_freevars if name in there]
            held = [value for value in held if not issubclass(type(value), _NOT_LOOKED_INTO)]
            taken = [
                there[name] for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if name in there
            ]
            held += [value for value in taken if not issubclass(type(value), _NO_ARGUMENTS)]
            key = id(code), *map(id, held)
            self.found[key] = code, frame.f_globals, held


def beside_torch() -> list[Changeable]:
    """What else numbers are drawn from: Python's generator and, if that is there, numpy's."""
    if (numpy := sys.modules.get("numpy")) is None:
        return [_PYTHON]
    return [_PYTHON, Changeable("numpy's random", numpy.random.get_state, numpy.random.set_state, _equal)]


@contextlib.contextmanager
def given(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Inside, what lies in an operator's arguments is looked up in these: each run may be given other objects."""
    _given.append({**dict(enumerate(args)), **kwargs})
    try:
        yield
    finally:
        _given.pop()


def places_of(modules: Iterable[torch.nn.Module], state: Any, called: Called) -> tuple[list[Changeable], str]:
    """What may change when these modules run: theirs, what ``state`` has, and what the functions name that ran. And why
    that cannot be put back; empty if it can."""
    try:
        found = _places_of(modules, state, called)
    except Exception as error:  # of an object that nobody can look at; other ranks must not wait for this one
        return [], f"what it may change cannot be looked at ({type(error).__name__}: {error})"
    names = dict.fromkeys(place.name for place in found if place.write is _never)
    return found, f"it may go on with an iterator ({', '.join(names)}), which each run moves on" if names else ""


def _places_of(modules: Iterable[torch.nn.Module], state: Any, called: Called) -> list[Changeable]:
    found = beside_torch()
    seen = _Seen()
    for root in modules:
        for path, module in root.named_modules():
            _attributes(weakref.ref(module), path or type(root).__name__, found, seen, 0)
            _class(type(module), found, seen, 0)
    if state is not None:
        _visit(_reference(state), type(state).__name__, found, seen, 0)
    codes: set[int] = set()
    named: set[str] = set()
    for code, names, held in called.found.values():
        if id(code) not in codes:
            codes.add(id(code))
            named.update(code.co_names, [one for one in code.co_consts if type(one) is str])
            known = {name: names[name] for name in _globals_in(code) if name in names}
            _names(known, names, found, seen)
            for value in (*known.values(), *held):
                if _is_a(value, ModuleType) and not _foreign(value.__name__):
                    there = vars(value)
                    _names({name: there[name] for name in code.co_names if name in there}, there, found, seen)
            found += _cells(code)
        for value in held:
            _visit(_argument_or(value), f"what {code.co_name} works on", found, seen, 0)
    return [place for place in found if place.write is not _never or _may_be_reached(place.name, named)]


def _may_be_reached(name: str, named: set[str]) -> bool:
    """Whether functions that ran name the attribute that this place is, or lies in; which numbers the objects that a
    class makes is not moved on by these."""
    attribute = _ATTRIBUTE.search(name)
    return attribute is None or not named or attribute[1] in named


@lru_cache(4096)
def _globals_in(code: CodeType) -> tuple[str, ...]:
    """Those of its names that are no attributes."""
    wanted = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "STORE_NAME")
    return tuple(dict.fromkeys(one.argval for one in dis.get_instructions(code) if one.opname in wanted))


def _names(known: dict[str, Any], names: dict[str, Any], found: list[Changeable], seen: _Seen) -> None:
    """Those of ``names`` that a function names."""
    rebound = [name for name, value in known.items() if _is_a(value, _REBOUND)]
    if rebound:
        found.append(_globals(names, rebound))
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
                    cells[id(cell)] = _cell(weakref.ref(function), place, name)
    return list(cells.values())


def _set_outside(code: CodeType) -> set[str]:
    if not code.co_freevars:
        return set()
    names = {one.argval for one in dis.get_instructions(code) if one.opname in ("STORE_DEREF", "DELETE_DEREF")}
    inside = [one for one in code.co_consts if isinstance(one, CodeType)]
    return names.union(*map(_set_outside, inside)) & {*code.co_freevars}


def _cell(function: Callable[[], Any], place: int, name: str) -> Changeable:
    def cell() -> CellType | None:
        return None if (one := function()) is None else one.__closure__[place]

    def read() -> Any:
        try:
            return ABSENT if (one := cell()) is None else one.cell_contents
        except ValueError:  # it is empty
            return ABSENT

    def write(earlier: Any) -> None:
        if (one := cell()) is not None and earlier is not ABSENT:
            one.cell_contents = earlier

    return Changeable(name, read, write, _is)


@contextlib.contextmanager
def put_back(places: Sequence[Changeable], changed: dict[Changeable, bool] | None = None) -> Iterator[None]:
    """Afterwards these are as before. ``changed`` gets those that were not, and whether that is more than other
    objects of the same value."""
    before = [place.read() for place in places]
    try:
        yield
    finally:
        for place, earlier in zip(places, before, strict=True):
            if not place.same(now := place.read(), earlier):
                place.write(earlier)
                if changed is not None:
                    changed[place] = _differs(now, earlier)


def _differs(now: Any, earlier: Any) -> bool:
    if isinstance(now, _Content) and isinstance(earlier, _Content):
        return not same_bits(now.bits, earlier.bits)
    if type(now) is not type(earlier) or not isinstance(now, (dict, list)):
        return True
    if len(now) != len(earlier) or (isinstance(now, dict) and [*now] != [*earlier]):
        return True
    pairs = [(now[key], earlier[key]) for key in now] if isinstance(now, dict) else zip(now, earlier, strict=True)
    return any(_means_another(one, other) for one, other in pairs if not _is(one, other))


def _means_another(now: Any, earlier: Any) -> bool:
    """Whether what has come in the place of another is another value; of objects nobody knows."""
    if type(now) is not type(earlier):
        return _is_a(now, _PLAIN) and _is_a(earlier, _REBOUND)
    if _is_a(earlier, torch.Tensor):
        return not same_bits(now, earlier)
    if _is_a(earlier, tuple):
        pairs = list(zip_longest(tuple.__iter__(now), tuple.__iter__(earlier)))
        return any(_means_another(one, other) for one, other in pairs if not _is(one, other))
    return _is_a(earlier, frozenset) and now != earlier or _is_a(earlier, _PLAIN)


def _visit(get: Callable[[], Any], name: str, found: list[Changeable], seen: _Seen, depth: int) -> None:
    value = get()
    kind = type(value)
    if _is_a(value, _PLAIN) or id(value) in seen or depth > _DEPTH:
        return
    if _is_a(value, type):
        _class(value, found, seen, depth)
        return
    if _is_a(value, torch.nn.Module):  # none of the operator's own
        if str(kind.__module__).startswith(tuple(FOREIGN)):
            return
        several = list(islice(value.modules(), _FEW + 1))
        for one in several if len(several) <= _FEW else [value]:
            _attributes(weakref.ref(one), name, found, seen, depth)
            _class(type(one), found, seen, depth)
        return
    if _is_a(value, torch.Tensor):
        if _may_change(value, seen, depth):
            seen.add(id(value))
            found.append(_place(name, get, _content, _copy, _same_content))
    elif _is_a(value, torch.Generator):
        seen.add(id(value))
        found.append(_place(name, get, kind.get_state, kind.set_state, torch.equal))
    elif _is_a(value, random.Random):
        seen.add(id(value))
        found.append(_place(name, get, kind.getstate, kind.setstate, _equal))
    elif kind.__module__ in ("builtins", "itertools") and _is_a(value, Iterator):
        seen.add(id(value))
        found.append(Changeable(name, lambda: None, _never, is_))
    elif kind in _BYTES and len(value) <= AT_ONCE:
        seen.add(id(value))
        found.append(
            _place(name, get, lambda it: it[:], lambda it, earlier: it.__setitem__(slice(None), earlier), _equal)
        )
    elif kind is FunctionType:
        if vars(value) and not _foreign(value.__module__):
            _attributes(get, name, found, seen, depth)
    elif str(kind.__module__).startswith("numpy.random") and hasattr(value, "set_state"):
        seen.add(id(value))
        found.append(_place(name, get, lambda it: it.get_state(), lambda it, earlier: it.set_state(earlier), _equal))
    elif str(kind.__module__).startswith("numpy.random") and hasattr(value, "bit_generator"):
        seen.add(id(value))
        found.append(_place(name, get, lambda it: it.bit_generator.state, _set_bits, _equal))
    elif (
        (kind.__module__, kind.__name__) == ("numpy", "ndarray")
        and value.nbytes <= AT_ONCE
        and not value.dtype.hasobject
    ):
        seen.add(id(value))
        found.append(_place(name, get, kind.copy, lambda array, earlier: array.__setitem__(..., earlier), _equal))
    elif kind in _CONTAINERS or (_is_a(value, (dict, list, set, deque)) and not _foreign(kind.__module__)):
        if kind not in _CONTAINERS:
            _attributes(get, name, found, seen, depth)
            _class(kind, found, seen, depth)
        seen.add(id(value))
        found.append(_container(get, name))
        items = _content_of(value)  # whatever a subclass makes of its methods
        if len(items) <= _MANY:
            for key, item in items.items() if isinstance(items, dict) else enumerate(items):
                inner = _reference(item) if _is_a(value, set) else partial(_item, get, key)
                at = repr(key) if _is_a(key, _PLAIN) else f"a {type(key).__name__}"  # never a tensor's values
                _visit(inner, f"{name}[{at}]", found, seen, depth + 1)
    elif _is_a(value, tuple):
        for index in range(tuple.__len__(value)):
            _visit(partial(_item, get, index), f"{name}[{index}]", found, seen, depth + 1)
    elif kind in _OBJECTS:
        _attributes(get, name, found, seen, depth)
    elif not _foreign(kind.__module__) and not hasattr(kind, "set_states"):  # Megatron's random states: see rng.py
        _slots(get, name, found, seen, depth)
        _attributes(get, name, found, seen, depth)
        _class(kind, found, seen, depth)


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
        if id(one) in seen or _foreign(one.__module__) or _is_a(one, EnumMeta):
            continue
        seen.add(id(one))
        name, get = one.__qualname__, weakref.ref(one)
        known = {key: value for key, value in vars(one).items() if not key.startswith("__")}
        rebound = [key for key, value in known.items() if _is_a(value, _REBOUND)]
        if rebound:
            found.append(_of_class(get, name, rebound))
        for key in known:
            if not _is_a(known[key], (*_PLAIN, MemberDescriptorType)):
                _visit(partial(_class_item, get, key), f"{name}.{key}", found, seen, depth + 1)


def _attributes(get: Callable[[], Any], name: str, found: list[Changeable], seen: _Seen, depth: int) -> None:
    owner, attributes = get(), partial(_vars, get)
    if id(owner) in seen or not (known := attributes()):
        return
    seen.add(id(owner))
    found.append(_container(attributes, name))
    for key in list(known):
        if not _is_a(owner, torch.nn.Module) or key not in _OF_A_MODULE:
            inner = partial(_item, attributes, key)
            _visit(inner, name if key == "_buffers" else f"{name}.{key}", found, seen, depth + 1)


def _slots(get: Callable[[], Any], name: str, found: list[Changeable], seen: _Seen, depth: int) -> None:
    """What an object keeps without a dictionary."""
    kinds = [one for one in type(get()).__mro__ if not _foreign(one.__module__)]
    members = [one for kind in kinds for one in vars(kind).values() if _is_a(one, MemberDescriptorType)]
    if not members or id(get()) in seen:
        return

    def write(value: Any, earlier: list[Any]) -> None:
        for member, then in zip(members, earlier, strict=True):
            if then is not ABSENT:
                member.__set__(value, then)
            elif _member(member, value) is not ABSENT:
                member.__delete__(value)

    def read(value: Any) -> list[Any]:
        return [_member(one, value) for one in members]

    found.append(_place(name, get, read, write, lambda now, earlier: all(map(_is, now, earlier))))
    for member in members:
        inner = partial(_of_slot, get, member)
        if inner() is not ABSENT:
            _visit(inner, f"{name}.{member.__name__}", found, seen, depth + 1)


def _of_slot(get: Callable[[], Any], member: Any) -> Any:
    return None if (one := get()) is None else _member(member, one)


def _member(member: Any, value: Any) -> Any:
    try:
        return member.__get__(value)
    except AttributeError:
        return ABSENT


def _reference(value: Any) -> Callable[[], Any]:
    """Weakly where that can be: what is known of an operator must not keep the model alive."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _argument_or(value: Any) -> Callable[[], Any]:
    """As `_reference`, but of each run its own where this is one of the operator's arguments."""
    at = next((key for key, one in _given[-1].items() if one is value), None) if _given else None
    return _reference(value) if at is None else lambda: _given[-1].get(at) if _given else None


def _item(get: Callable[[], Any], key: Any) -> Any:
    value = get()
    base: Any = next((base for base in (*_BASES, tuple) if _is_a(value, base)), None)
    try:
        return base.get(value, key) if _is_a(value, dict) else base.__getitem__(value, key)
    except (AttributeError, LookupError, TypeError):  # it is no longer there
        return None


def _class_item(get: Callable[[], Any], key: str, otherwise: Any = None) -> Any:
    return otherwise if (one := get()) is None else vars(one).get(key, otherwise)


def _vars(get: Callable[[], Any]) -> dict[str, Any] | None:
    return attributes_of(get())


def _place(name: str, get: Callable[[], Any], read: Callable, write: Callable, same: Callable) -> Changeable:
    """What ``get()`` returns, as long as it is of the same type: what only one run had made is not missed."""
    kind = type(get())

    def now() -> Any:
        value = get()
        return read(value) if type(value) is kind else None

    def put(earlier: Any) -> None:
        value = get()
        if type(value) is kind and earlier is not None:
            write(value, earlier)

    return Changeable(name, now, put, lambda one, other: one is None or other is None or same(one, other))


def _container(get: Callable[[], Any], name: str) -> Changeable:
    kind = next(kind for kind in (dict, set, list) if kind is list or _is_a(get(), kind))
    base: Any = next(base for base in _BASES if _is_a(get(), base))

    def write(value: Any, earlier: Any) -> None:
        base.clear(value)  # whatever a subclass makes of it
        (base.extend if kind is list else base.update)(value, earlier)

    def same(now: Any, earlier: Any) -> bool:
        if kind is set:
            return now == earlier
        if len(now) != len(earlier):
            return False
        if all(map(is_, now, earlier)) and (kind is list or all(map(is_, now.values(), earlier.values()))):
            return True  # mostly, and much faster
        if not all(map(_is, now, earlier)):  # of a dict its order, too: what was used last may be the last
            return False
        return kind is list or all(map(_is, now.values(), earlier.values()))

    return _place(name, get, _content_of, write, same)


def _content_of(value: Any) -> dict | set | list:
    """A copy of a container, past what a subclass makes of its methods."""
    base: Any = next(base for base in _BASES if _is_a(value, base))
    if base is set:
        return set().union(value)
    return dict(base.items(value)) if _is_a(value, dict) else list(base.__iter__(value))


def _globals(names: dict[str, Any], keys: list[str]) -> Changeable:
    def write(earlier: dict) -> None:
        for key, value in earlier.items():
            if value is ABSENT:
                names.pop(key, None)
            else:
                names[key] = value

    def read() -> dict:
        return {key: names.get(key, ABSENT) for key in keys}

    return Changeable(f"{names.get('__name__')}.{keys[0]}", read, write, _same_values)


def _of_class(get: Callable[[], Any], name: str, keys: list[str]) -> Changeable:
    def write(earlier: dict) -> None:
        for key, value in earlier.items():
            now = _class_item(get, key, ABSENT)
            if value is ABSENT and now is not ABSENT:
                _past_metaclass("__delattr__", get(), key)
            elif not _is(now, value) and (one := get()) is not None:
                _past_metaclass("__setattr__", one, key, value)

    return Changeable(name, lambda: {key: _class_item(get, key, ABSENT) for key in keys}, write, _same_values)


def _same_values(now: dict, earlier: dict) -> bool:
    return all(_is(now[key], value) for key, value in earlier.items())


def _past_metaclass(method: str, *args: Any) -> None:
    """What a metaclass refuses to be set, or counts, is none of it here."""
    try:
        getattr(type, method)(*args)
    except TypeError:  # of a metaclass that is written in C
        getattr(type(args[0]), method)(*args)


def _content(tensor: torch.Tensor) -> _Content:
    return _Content(tensor.detach().clone(), tensor._version, torch.autograd._unsafe_preserve_version_counter(tensor))


def _same_content(one: _Content, other: _Content) -> bool:
    return one.version == other.version and same_bits(one.bits, other.bits)


def _copy(tensor: torch.Tensor, earlier: _Content) -> None:
    if tensor.shape == earlier.bits.shape:
        with torch.no_grad():
            tensor.copy_(earlier.bits)
        earlier.as_it_is.__exit__()


def _set_bits(generator: Any, earlier: Any) -> None:
    generator.bit_generator.state = earlier


def _foreign(name: Any) -> bool:
    name = str(name or "builtins")  # of a class it may be a property of its objects
    return name.partition(".")[0] in _FOREIGN or name.startswith(tuple(FOREIGN))


def _is(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and _is_a(one, _PLAIN) and one == other)


def _is_a(value: Any, kinds: Any) -> bool:
    """By its type alone: an object may call itself of another class (a proxy), and raise when it is asked."""
    return issubclass(type(value), kinds)


def _equal(one: Any, other: Any) -> bool:
    return pickle.dumps(one) == pickle.dumps(other)


def _never(earlier: Any) -> None:
    """Nobody can put it back."""


GENERATORS = Changeable("torch's random", lambda: rng.capture(), lambda states: rng.restore(states), rng.same)
"""For an operator that draws from states that it puts back: not among what `places_of` finds."""
_PYTHON = Changeable("Python's random", random.getstate, random.setstate, _equal)
