"""What an operator changes besides its result: found after its first run, and put back whenever it runs again.

Its modules' attributes and buffers, generators, and what the Python functions that ran name: globals, closures, and
whatever these contain, a few levels deep. Tensors count if anybody has written to them in place since they were made.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

_DEPTH, _MANY = 3, 256  # how deep in containers and objects; larger containers are taken as they are
_FOREIGN = {"torch", "torch_npu", "numpy", "mindspeed_mem", *sys.stdlib_module_names}
_OF_A_MODULE = set(vars(torch.nn.Module())) - {"training", "_buffers"}
_CONTAINERS = {dict, list, set, deque, Counter, OrderedDict, defaultdict}
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Place(NamedTuple):
    """Something that may change: how to read it, to write it, and to say whether two readings are the same."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    same: Callable[[Any, Any], bool]


class Called:
    """Notes which Python functions run while it is entered; not under a profiler, which it would replace."""

    def __init__(self) -> None:
        self._codes: dict[int, CodeType] = {}
        self.found: list[tuple[CodeType, dict[str, Any], list[Any]]] = []
        """Code, globals, and what its closure held."""

    def __enter__(self) -> Called:
        self._mine = sys.getprofile() is None
        if self._mine:
            sys.setprofile(self._note)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if self._mine:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or id(code) in self._codes:
            return
        self._codes[id(code)] = code
        if not _foreign(frame.f_globals.get("__name__")):
            there = frame.f_locals if code.co_freevars else {}
            self.found.append((code, frame.f_globals, [there[name] for name in code.co_freevars if name in there]))


def places_of(modules: Iterable[torch.nn.Module], state: Any, called: Called) -> list[Place]:
    """What may change when these modules run: theirs, what ``state`` has, and what the functions name that ran."""
    found: list[Place] = [_PYTHON, *_numpy()]
    seen: set[int] = set()
    for root in modules:
        for path, module in root.named_modules():
            _attributes(module, path or type(root).__name__, found, seen, 0)
    if state is not None:
        _visit(state, type(state).__name__, found, seen, 0)
    for code, names, closure in called.found:
        known = {name: names[name] for name in code.co_names if name in names}
        plain = [name for name, value in known.items() if isinstance(value, _PLAIN)]
        if plain:
            found.append(_globals(names, plain))
        for name, value in known.items():
            _visit(value, f"{names.get('__name__')}.{name}", found, seen, 0)
        for value in closure:
            _visit(value, f"what {code.co_name} closes over", found, seen, 0)
    return found


@contextlib.contextmanager
def put_back(places: Sequence[Place], changed: dict[Place, bool] | None = None) -> Iterator[None]:
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
    if type(now) is not type(earlier) or not isinstance(now, (dict, list)):
        return True
    if len(now) != len(earlier) or (isinstance(now, dict) and now.keys() != earlier.keys()):
        return True
    pairs = [(now[key], earlier[key]) for key in now] if isinstance(now, dict) else zip(now, earlier, strict=True)
    return any(
        not same_bits(one, other) if isinstance(other, torch.Tensor) else isinstance(other, _PLAIN)
        for one, other in pairs
        if not _is(one, other) and (type(one) is type(other) or isinstance(one, _PLAIN))
    )


def _visit(value: Any, name: str, found: list[Place], seen: set[int], depth: int) -> None:
    kind = type(value)
    if isinstance(value, (*_PLAIN, torch.nn.Module, type)) or id(value) in seen or depth > _DEPTH:
        return
    if isinstance(value, torch.Tensor):
        plain = kind is torch.Tensor and value.layout is torch.strided and not value.requires_grad
        if plain and value._version and not hasattr(value.untyped_storage(), "_mem_managed"):
            seen.add(id(value))
            found.append(_tensor(value, name))
    elif isinstance(value, torch.Generator):
        seen.add(id(value))
        found.append(Place(name, value.get_state, value.set_state, torch.equal))
    elif isinstance(value, random.Random):
        seen.add(id(value))
        found.append(Place(name, value.getstate, value.setstate, _equal))
    elif kind.__module__.startswith("numpy.random") and hasattr(value, "bit_generator"):
        seen.add(id(value))
        found.append(_bits(value.bit_generator, name))
    elif kind in _CONTAINERS:
        seen.add(id(value))
        found.append(_container(value, name))
        if len(value) <= _MANY:
            for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
                _visit(item, f"{name}[{key!r}]", found, seen, depth + 1)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            _visit(item, f"{name}[{index}]", found, seen, depth + 1)
    elif isinstance(getattr(value, "__dict__", None), dict) and not _foreign(kind.__module__):
        if not hasattr(value, "set_states"):  # Megatron's tracker of random states: see rng.py
            _attributes(value, name, found, seen, depth)


def _attributes(owner: Any, name: str, found: list[Place], seen: set[int], depth: int) -> None:
    if id(owner) in seen:
        return
    seen.add(id(owner))
    attributes = vars(owner)
    found.append(_container(attributes, name))
    for key, value in list(attributes.items()):
        if not isinstance(owner, torch.nn.Module) or key not in _OF_A_MODULE:
            _visit(value, name if key == "_buffers" else f"{name}.{key}", found, seen, depth + 1)


def _container(value: Any, name: str) -> Place:
    def write(earlier: Any) -> None:
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(earlier)

    def same(now: Any, earlier: Any) -> bool:
        if isinstance(value, set):
            return now == earlier
        if len(now) != len(earlier):
            return False
        if isinstance(value, dict):
            return all(key in now and _is(now[key], item) for key, item in earlier.items())
        return all(map(_is, now, earlier))

    kind = dict if isinstance(value, dict) else set if isinstance(value, set) else list
    return Place(name, lambda: kind(value), write, same)


def _globals(names: dict[str, Any], keys: list[str]) -> Place:
    def same(now: dict, earlier: dict) -> bool:
        return all(_is(now[key], earlier[key]) for key in keys)

    return Place(
        f"{names.get('__name__')}.{keys[0]}", lambda: {key: names.get(key) for key in keys}, names.update, same
    )


def _tensor(value: torch.Tensor, name: str) -> Place:
    """Weakly: one that only this run had written to is gone by the next, and not missed."""
    ref = weakref.ref(value)

    def read() -> torch.Tensor | None:
        tensor = ref()
        return None if tensor is None else tensor.detach().clone()

    def write(earlier: torch.Tensor | None) -> None:
        tensor = ref()
        if tensor is not None and earlier is not None:
            with torch.no_grad():
                tensor.copy_(earlier)

    def same(now: torch.Tensor | None, earlier: torch.Tensor | None) -> bool:
        return now is None or earlier is None or same_bits(now, earlier)

    return Place(name, read, write, same)


def _bits(generator: Any, name: str) -> Place:
    return Place(name, lambda: generator.state, lambda earlier: setattr(generator, "state", earlier), _equal)


def _numpy() -> list[Place]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return []
    return [Place("numpy's random", numpy.random.get_state, numpy.random.set_state, _equal)]


def _foreign(name: str | None) -> bool:
    return (name or "builtins").partition(".")[0] in _FOREIGN


def _is(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and one == other)


def _equal(one: Any, other: Any) -> bool:
    return pickle.dumps(one) == pickle.dumps(other)


_PYTHON = Place("Python's random", random.getstate, random.setstate, _equal)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE = 1 << 22  # elements: comparing takes memory, too


def nearly_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they differ by no more than sums do whose order is left to chance."""
    if one.shape != other.shape or one.dtype != other.dtype or not one.is_floating_point():
        return same_bits(one, other)
    if one.numel() > _AT_ONCE:
        return all(nearly_same(*parts) for parts in _halves(one, other))
    if same_bits(one, other) or not one.numel():
        return True
    least = 64 * torch.finfo(one.dtype).eps
    one, other = one.detach().float(), other.detach().float()
    return bool((one - other).abs().max() <= least * one.abs().max())


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one layout hold the same, not-a-numbers included; takes little memory besides."""
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    if one.numel() > _AT_ONCE:
        return all(same_bits(*parts) for parts in _halves(one, other))
    kind = _INTEGERS[one.element_size()]
    return torch.equal(one.detach().view(kind), other.detach().view(kind))


def _halves(one: torch.Tensor, other: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    dim = max(range(one.dim()), key=one.size)
    half = one.size(dim) // 2
    parts = (0, half), (half, one.size(dim) - half)
    return [(one.narrow(dim, *part), other.narrow(dim, *part)) for part in parts]
