"""Places whose values may change when an operator runs: how each is read, put back, and compared."""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from operator import is_
from types import CellType, MemberDescriptorType
from typing import Any, NamedTuple

import torch

from mindspeed_mem.activation.rerun import rng
from mindspeed_mem.activation.rerun.arguments import attributes_of
from mindspeed_mem.activation.rerun.bits import same_bits
from mindspeed_mem.activation.rerun.settings import ABSENT, PLAIN
from mindspeed_mem.activation.storage.records import version_of

PLAIN_KINDS = tuple(PLAIN)
REBOUND = (*PLAIN_KINDS, torch.Tensor, tuple, frozenset)
"""What changes by another being put in its place."""
_BASES: tuple[Any, ...] = (OrderedDict, dict, set, deque, list)
_DEPTH, _MANY, _IN_ALL = 5, 256, 2048  # how deep in arguments, how many in each object, and in how many, is looked
_given: list[dict[Any, Any]] = []
"""What operators were given of which places are looked at, by position or name; innermost last."""


class Looked(set[int]):
    """What one look at several places has been through, by identity, and found to hold nothing that was computed."""

    room = 4096
    """How many objects are still looked at as closely as the first ones."""


class Changeable(NamedTuple):
    """Something that may change: how to read it, to write it, and to say whether two readings are the same.

    What lies in others is looked up in them each time: a program may put a new list, tensor or number there.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    same: Callable[[Any, Any], bool]
    keep: Callable[[Any, Looked], Any] | None = None
    """What of a reading may be kept until backward; None: all of it."""


class _Content(NamedTuple):
    """A tensor's, and its version: whoever has saved the tensor asks whether that is still the same."""

    bits: torch.Tensor
    version: int
    as_it_is: Any  # sets the version to that


@contextlib.contextmanager
def given(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Inside, what lies in an operator's arguments is looked up in these: each run may be given other objects."""
    _given.append({**dict(enumerate(args)), **kwargs})
    try:
        yield
    finally:
        _given.pop()


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


def to_be_kept(places: Iterable[Changeable]) -> list[tuple[Changeable, Any]]:
    """Each with what is there, as far as that may be kept until backward."""
    looked = Looked()
    return [(one, one.read() if one.keep is None else one.keep(one.read(), looked)) for one in places]


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
        return is_a(now, PLAIN_KINDS) and is_a(earlier, REBOUND)
    if is_a(earlier, torch.Tensor):
        return not same_bits(now, earlier)
    if is_a(earlier, tuple):
        pairs = list(zip_longest(tuple.__iter__(now), tuple.__iter__(earlier)))
        return any(_means_another(one, other) for one, other in pairs if not _is(one, other))
    return is_a(earlier, frozenset) and now != earlier or is_a(earlier, PLAIN_KINDS)


def place(name: str, get: Callable[[], Any], read: Callable, write: Callable, same: Callable) -> Changeable:
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


def tensor(name: str, get: Callable[[], Any]) -> Changeable:
    """What lies in it, and its version."""
    return place(name, get, _content, _copy, _same_content)


def container(name: str, get: Callable[[], Any]) -> Changeable:
    """Which objects it has, and of a dictionary in which order."""
    kind = next(kind for kind in (dict, set, list) if kind is list or is_a(get(), kind))
    base: Any = next(base for base in _BASES if is_a(get(), base))

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

    return place(name, get, content_of, write, same)


def content_of(value: Any) -> dict | set | list:
    """A copy of a container, past what a subclass makes of its methods."""
    base: Any = next(base for base in _BASES if is_a(value, base))
    if base is set:
        return set().union(value)
    return dict(base.items(value)) if is_a(value, dict) else list(base.__iter__(value))


def cell(name: str, function: Callable[[], Any], index: int) -> Changeable:
    """A variable of functions around this one, by its place in the closure."""

    def cell() -> CellType | None:
        return None if (one := function()) is None else one.__closure__[index]

    def read() -> Any:
        try:
            return ABSENT if (one := cell()) is None else one.cell_contents
        except ValueError:  # it is empty
            return ABSENT

    def write(earlier: Any) -> None:
        if (one := cell()) is not None and earlier is not ABSENT:
            one.cell_contents = earlier

    return Changeable(name, read, write, _is)


def variables(name: str, get: Callable[[], dict[str, Any] | None], keys: list[str]) -> Changeable:
    """Those of these names in a dictionary, which may come and go."""

    def write(earlier: dict) -> None:
        if (names := get()) is None:
            return
        base: Any = OrderedDict if is_a(names, OrderedDict) else dict  # whatever a subclass makes of it
        for key, value in earlier.items():
            if value is ABSENT:
                base.pop(names, key, None)
            else:
                base.__setitem__(names, key, value)

    def read() -> dict:
        names = {} if (found := get()) is None else found
        return {key: dict.get(names, key, ABSENT) for key in keys}

    return Changeable(name, read, write, _same_values)


def class_attributes(name: str, get: Callable[[], Any], keys: list[str]) -> Changeable:
    """Those of these names, which may come and go."""

    def write(earlier: dict) -> None:
        for key, value in earlier.items():
            now = class_item(get, key, ABSENT)
            if value is ABSENT and now is not ABSENT:
                _past_metaclass("__delattr__", get(), key)
            elif not _is(now, value) and (one := get()) is not None:
                _past_metaclass("__setattr__", one, key, value)

    return Changeable(name, lambda: {key: class_item(get, key, ABSENT) for key in keys}, write, _same_values)


def _same_values(now: dict, earlier: dict) -> bool:
    return all(_is(now[key], value) for key, value in earlier.items())


def _past_metaclass(method: str, *args: Any) -> None:
    """What a metaclass refuses to be set, or counts, is none of it here."""
    try:
        getattr(type, method)(*args)
    except TypeError:  # of a metaclass that is written in C
        getattr(type(args[0]), method)(*args)


def slots(name: str, get: Callable[[], Any], members: Sequence[MemberDescriptorType]) -> Changeable:
    """What an object keeps without a dictionary."""

    def write(value: Any, earlier: list[Any]) -> None:
        for member, then in zip(members, earlier, strict=True):
            if then is not ABSENT:
                member.__set__(value, then)
            elif _member(member, value) is not ABSENT:
                member.__delete__(value)

    def read(value: Any) -> list[Any]:
        return [_member(one, value) for one in members]

    return place(name, get, read, write, lambda now, earlier: all(map(_is, now, earlier)))


def _member(member: Any, value: Any) -> Any:
    try:
        return member.__get__(value)
    except AttributeError:
        return ABSENT


def of_slot(get: Callable[[], Any], member: Any) -> Any:
    return None if (one := get()) is None else _member(member, one)


def item(get: Callable[[], Any], key: Any) -> Any:
    value = get()
    base: Any = next((base for base in (*_BASES, tuple) if is_a(value, base)), None)
    try:
        return base.get(value, key) if is_a(value, dict) else base.__getitem__(value, key)
    except (AttributeError, LookupError, TypeError):  # it is no longer there
        return None


def class_item(get: Callable[[], Any], key: str, otherwise: Any = None) -> Any:
    return otherwise if (one := get()) is None else vars(one).get(key, otherwise)


def reference(value: Any) -> Callable[[], Any]:
    """Weakly where that can be: what is known of an operator must not keep the model alive."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def argument_or(value: Any) -> Callable[[], Any]:
    """As `reference`, but of each run its own where this is one of the operator's arguments."""
    at = next((key for key, one in _given[-1].items() if one is value), None) if _given else None
    return reference(value) if at is None else lambda: _given[-1].get(at) if _given else None


def tensors_given() -> dict[int, tuple[weakref.ref[torch.Tensor], int]]:
    """Those in objects among the operator's arguments, by identity, each with its version."""
    found = (one for value in _given[-1].values() for one in tensors_inside(value))
    with torch._C.DisableTorchFunctionSubclass():
        return {id(one): (weakref.ref(one), version_of(one)) for one in found}


def argument_with_graph(first: int, before: Mapping[int, tuple[weakref.ref[torch.Tensor], int]]) -> str:
    """The first of the operator's arguments that is an object with a tensor in it that has been computed since
    autograd's number ``first`` and the `tensors_given` of then; empty: there is none. Such a tensor holds the graph,
    which holds who runs the operator again, and with it the object: where no backward follows, neither would ever
    go."""

    def is_new(tensor: torch.Tensor) -> bool:
        then, version = before.get(id(tensor), (None, 0))
        if then is not None and then() is tensor and version_of(tensor) == version:
            return False  # a view of what was written to has a node of a later number
        return (node := node_of(tensor)) is not None and node._sequence_nr() >= first

    for key, value in _given[-1].items():
        with torch._C.DisableTorchFunctionSubclass():
            if not any(map(is_new, tensors_inside(value))):
                continue
        kind, hint = type(value).__name__, "which it is given; in a plain list or dict it may"
        if "Cache" in kind:
            hint = "which is for generation: train with use_cache=False"
        return f"{key if isinstance(key, str) else f'argument {key}'} (a {kind}), {hint}"
    return ""


def node_of(tensor: torch.Tensor) -> torch.autograd.graph.Node | None:
    try:
        return tensor.grad_fn
    except RuntimeError:  # of one of several views of what was written to, autograd has none
        return None


def tensors_inside(argument: Any) -> Iterator[torch.Tensor]:
    """The tensors in an argument, as far as they are looked for, the nearest first."""
    seen, left = set[int](), deque([(argument, 0)])
    while left and len(seen) < _IN_ALL:
        value, depth = left.popleft()
        if is_a(value, torch.Tensor):
            yield value
        if depth > _DEPTH or id(value) in seen or is_a(value, (torch.Tensor, type, torch.nn.Module)):
            continue
        seen.add(id(value))
        inside = list(islice((attributes_of(value) or {}).values(), _MANY))
        if is_a(value, (*_BASES, tuple)):
            items = tuple.__iter__(value) if is_a(value, tuple) else content_of(value)
            inside += islice(items.values() if isinstance(items, dict) else items, _MANY)
        left.extend((one, depth + 1) for one in inside if not is_a(one, PLAIN_KINDS))


def _content(tensor: torch.Tensor) -> _Content:
    return _Content(tensor.detach().clone(), tensor._version, torch.autograd._unsafe_preserve_version_counter(tensor))


def _same_content(one: _Content, other: _Content) -> bool:
    return one.version == other.version and same_bits(one.bits, other.bits)


def _copy(tensor: torch.Tensor, earlier: _Content) -> None:
    if tensor.shape == earlier.bits.shape:
        with torch.no_grad():
            tensor.copy_(earlier.bits)
        earlier.as_it_is.__exit__()


def _is(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and is_a(one, PLAIN_KINDS) and one == other)


def is_a(value: Any, kinds: Any) -> bool:
    """By its type alone: an object may call itself of another class (a proxy), and raise when it is asked."""
    return issubclass(type(value), kinds)


def equal(one: Any, other: Any) -> bool:
    return pickle.dumps(one) == pickle.dumps(other)


def never(earlier: Any) -> None:
    """Nobody can put it back."""


GENERATORS = Changeable("torch's random", lambda: rng.capture(), lambda states: rng.restore(states), rng.same)
"""For an operator that draws from states that it puts back."""
_PYTHON = Changeable("Python's random", random.getstate, random.setstate, equal)


def beside_torch() -> list[Changeable]:
    """What else numbers are drawn from: Python's generator and, if that is there, numpy's."""
    if (numpy := sys.modules.get("numpy")) is None:
        return [_PYTHON]
    return [_PYTHON, Changeable("numpy's random", numpy.random.get_state, numpy.random.set_state, equal)]
