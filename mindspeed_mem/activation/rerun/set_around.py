"""What the caller of an operator sets for as long as it runs, where functions that run in it look.

ms-swift's layers put another function into Megatron's module while they run, peft hooks onto the modules in its layers;
others set an attribute of a configuration that all layers share. All of it is gone when backward comes. So the names
that functions name are noted when an operator runs first: in modules, in objects, in classes and in dictionaries, with
functions, plain values, and tensors without a graph. A second run finds there what the first one found.
"""

from __future__ import annotations

import builtins
import gc
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import partial
from itertools import chain, islice, repeat
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

import torch

from mindspeed_mem.activation.rerun import changeable
from mindspeed_mem.activation.rerun.arguments import attributes_of
from mindspeed_mem.activation.rerun.changeable import PLAIN_KINDS, Changeable, Looked, is_a
from mindspeed_mem.activation.rerun.settings import ABSENT, PLAIN, UNKNOWN, is_setting
from mindspeed_mem.activation.rerun.state import OBJECTS, Called, in_modules, is_foreign, slots_of, stored_by

_Call = tuple[CodeType, dict[str, Any], list[tuple[str, Any]]]
_ALIKE = 4  # second runs that find no other values until nobody looks at them any more
_DEPTH, _MANY = 2, 4096  # how deep in objects, and at how many of them, is looked
_IN_ALL, _IN_EACH = 1024, 256  # how many of the objects that a function holds, and of those in each, are looked at
_AT_LEAST = 128  # of those that a function holds, where others before it hold many, as a whole model
_HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs")
_GROUP = getattr(torch.distributed, "ProcessGroup", Enum)  # where torch has been built with it
_NO_MEMORY = (staticmethod, classmethod, property, Enum, frozenset, range, slice, _GROUP)
_DICTIONARIES = (dict, OrderedDict, defaultdict, Counter)
_NO_OBJECTS = (
    *PLAIN_KINDS, torch.Tensor, tuple, list, set, ModuleType, FunctionType, BuiltinFunctionType, MethodType
)  # fmt: skip
_KEEP_NOTHING = (*PLAIN_KINDS, ModuleType, type, CodeType, FrameType)


class _List(NamedTuple):
    """A list of plain values: which it is, and what it has. Its owner may change either."""

    it: list
    items: list


def set_by_callers(roots: Iterable[torch.nn.Module], called: Called) -> tuple[list[Changeable], str]:
    """What the functions that ran in an operator of these modules name that others may set around it. And why that
    cannot be told; empty if it can."""
    try:
        return list(_places(list(roots), called)), ""
    except Exception as error:  # of an object that nobody can look at; other ranks must not wait for this one
        return [], f"what its caller may set cannot be looked at ({type(error).__name__}: {error})"


class Places(dict[Changeable, bool]):
    """What an operator's second runs are to find as its first ones did, see `Verdict.places`, with what its caller may
    set around it. Where second runs find the same, nobody sets it for the operator alone: it is taken out again, so
    that later runs need not look."""

    def __init__(self, changed: dict[Changeable, bool], around: Iterable[Changeable]):
        super().__init__(changed)
        itself = weakref.ref(self)  # a circle would keep what is changed until it is next looked for circles
        self.update((_until_alike(there, itself), True) for there in around)


def _until_alike(there: Changeable, known: weakref.ref[Places]) -> Changeable:
    alike = 0

    def write(earlier: dict) -> None:
        nonlocal alike
        if not there.same(there.read(), earlier):
            alike = -1  # it stays
            there.write(earlier)
        elif alike >= 0:
            alike += 1
            if alike == _ALIKE and (noted := known()) is not None:
                for one in [one for one in noted if one.write is write]:
                    del noted[one]

    return there._replace(write=write)


def _places(roots: list[torch.nn.Module], called: Called) -> Iterator[Changeable]:
    calls = list(called.found.values())
    named = _named_by({id(code): code for code, *_ in calls}.values())
    looked = Looked()
    yield from _of_modules(calls, looked)
    stored: dict[int, set[str]] = defaultdict(set)  # by whom of those that a function was given, 0: by anyone
    for code, _, held in calls:
        for value in (0, *(id(value) for _, value in held)):
            stored[value].update(stored_by(code))
    for root in roots:
        for path, module in root.named_modules():
            for one in _HOOKS if path else ():  # its own hooks run around an operator, not in it
                if (now := vars(module).get(one)) is not None and not _any_collects(now, looked):
                    hooks = partial(changeable.item, partial(_attributes_of, changeable.reference(module)), one)
                    yield _that_collect_nothing(changeable.container(f"{path}.{one}", hooks))
    modules = {id(module) for root in roots for module in root.modules()}
    yield from _of_objects(_roots_of_objects(roots, calls), modules, named, stored, looked)


def _named_by(codes: Iterable[CodeType]) -> dict[str, None]:
    """Names of attributes, and keys of dictionaries."""
    named = dict.fromkeys(("forward",))  # of modules, which their callers do not name
    for code in codes:
        named.update(dict.fromkeys((*code.co_names, *(one for one in code.co_consts if type(one) is str))))
    return named


def _of_modules(calls: list[_Call], looked: Looked) -> Iterator[Changeable]:
    """Python's modules."""
    found: dict[int, tuple[dict[str, Any], dict[str, None], set[str]]] = {}
    for code, own, held in calls:
        for names, known in in_modules(code, own, held, foreign=True):
            if not str(names.get("__name__")).startswith("mindspeed_mem"):
                _, keys, stored = found.setdefault(id(names), (names, {}, set()))
                keys.update(dict.fromkeys(known))
                stored.update(stored_by(code))
    for names, keys, stored in found.values():
        noted = _may_be_noted(names, keys, stored, looked)
        if noted:
            yield _values(f"{names.get('__name__')}", partial(_itself, names), noted)


def _roots_of_objects(roots: list[torch.nn.Module], calls: list[_Call]) -> Iterator[tuple[str, Callable[[], Any]]]:
    for root in roots:
        for path, module in root.named_modules():
            yield path or type(root).__name__, changeable.reference(module)
    for code, names, held in calls:
        for there, known in in_modules(code, names, held):
            for name in known:
                yield f"{there.get('__name__')}.{name}", partial(there.get, name)
        for name, value in held:
            if type(value).__weakrefoffset__:  # else it would be kept alive, with the tensors in it
                yield f"{code.co_name}'s {name}", changeable.argument_or(value)


def _of_objects(
    roots: Iterator[tuple[str, Callable[[], Any]]],
    modules: set[int],
    named: Mapping[str, None],
    stored: Mapping[int, set[str]],
    looked: Looked,
) -> Iterator[Changeable]:
    """What the names ``named`` are in objects, their classes, and dictionaries."""
    seen: set[int] = set()
    left = deque((name, get, 0) for name, get in roots)
    while left and len(seen) < _MANY:
        name, get, depth = left.popleft()
        value = get()
        kind = type(value)
        if is_a(value, _NO_OBJECTS) or id(value) in seen:
            continue
        if is_a(value, type):
            yield from _of_classes(value, named, stored, seen, looked)
            continue
        if not is_a(value, torch.nn.Module) and any(map(_is_ours, vars(kind).values())):
            continue  # what it is told for backward, as Megatron's replay of routers, is that method's to heed
        of_a_model = is_a(value, torch.nn.Module) or kind in OBJECTS or not is_foreign(kind.__module__)
        if not of_a_model and kind not in _DICTIONARIES:
            continue
        seen.add(id(value))
        if of_a_model:
            yield from _of_classes(kind, named, stored, seen, looked)
        for found, place, inside in _in_an_object(name, get, named, of_a_model):
            known = {key: one for key, one in found.items() if key not in stored.get(id(value), ())}
            if id(value) in modules:  # which have settings
                known = {key: one for key, one in known.items() if not is_setting(one)}
            noted = [key for key, one in known.items() if _may_be_kept(_noted(one), looked)]
            if noted:
                yield place(noted)
            if depth < _DEPTH:
                left.extend((f"{name}.{key}", partial(inside, key), depth + 1) for key in found)


def _in_an_object(
    name: str, get: Callable[[], Any], named: Iterable[str], of_a_model: bool
) -> Iterator[tuple[dict[str, Any], Callable[[list[str]], Changeable], Callable[[str], Any]]]:
    """What the names ``named`` are in an object as a dictionary, among its attributes, and in its slots; each with how
    to note some of them and how to get at one of them."""
    for way in (_if_dictionary, _attributes_of) if of_a_model else (_if_dictionary,):
        there = partial(way, get)
        if (all_of_it := there()) is not None:
            found = {key: dict.__getitem__(all_of_it, key) for key in named if dict.__contains__(all_of_it, key)}
            yield found, partial(_values, name, there), partial(changeable.item, there)
    members = {one.__name__: one for one in reversed(slots_of(type(get())))} if of_a_model else {}
    if members:
        found = {key: changeable.of_slot(get, members[key]) for key in named if key in members}
        yield found, partial(_slots, name, get, members), lambda key: changeable.of_slot(get, members[key])


def _of_classes(
    kind: type, named: Mapping[str, None], stored: Mapping[int, set[str]], seen: set[int], looked: Looked
) -> Iterator[Changeable]:
    for one in kind.__mro__:
        if id(one) in seen or one in (object, torch.nn.Module):
            continue
        seen.add(id(one))
        if is_foreign(one.__module__) and not issubclass(one, torch.nn.Module):
            continue
        found = vars(one)
        noted = _may_be_noted(found, (key for key in named if key in found), stored[0], looked)
        if noted:
            yield _filtered(changeable.class_attributes(one.__qualname__, changeable.reference(one), noted))


def _may_be_noted(there: Mapping[str, Any], keys: Iterable[str], stored: set[str], looked: Looked) -> list[str]:
    """Without tensors that the operator itself puts there, which its next run would keep."""
    noted = [key for key in keys if _may_be_kept(_noted(there[key]), looked)]
    return [key for key in noted if not (key in stored and is_a(there[key], torch.Tensor))]


def _values(name: str, get: Callable[[], dict[str, Any] | None], keys: list[str]) -> Changeable:
    there = changeable.variables(name, get, keys)
    nothing = dict.fromkeys(keys, UNKNOWN)  # of an object of one run alone
    return _filtered(there._replace(read=lambda: nothing if get() is None else there.read()))


def _slots(
    name: str, get: Callable[[], Any], members: Mapping[str, MemberDescriptorType], keys: list[str]
) -> Changeable:
    there = changeable.slots(name, get, [members[key] for key in keys])

    def read() -> dict[str, Any]:
        return dict(zip(keys, there.read() or repeat(UNKNOWN), strict=False))

    return _filtered(there._replace(read=read, write=lambda earlier: there.write([*(read() | earlier).values()])))


def _filtered(there: Changeable) -> Changeable:
    """Without what may hold memory, or is the engine's own."""

    def read() -> dict[str, Any]:
        return {key: _noted(value) for key, value in there.read().items()}

    def keep(found: dict, looked: Looked) -> dict[str, Any]:
        return {key: value if _may_be_kept(value, looked) else UNKNOWN for key, value in found.items()}

    def same(now: dict, earlier: dict) -> bool:
        return all(_are_same(now[key], value) for key, value in earlier.items())

    def write(earlier: dict) -> None:
        now = read()
        others = {key: value for key, value in earlier.items() if not _are_same(now[key], value)}
        there.write({key: _as_it_was(value) for key, value in others.items()})

    return there._replace(read=read, write=write, same=same, keep=keep)


def _that_collect_nothing(hooks: Changeable) -> Changeable:
    """Hooks that have what modules returned would be kept by it, and keep it."""

    def keep(found: Any, looked: Looked) -> Any:
        return UNKNOWN if found is not None and _any_collects(found, looked) else found

    def write(earlier: Any) -> None:
        if earlier is not UNKNOWN:
            hooks.write(earlier)

    def same(now: Any, earlier: Any) -> bool:
        return earlier is UNKNOWN or hooks.same(now, earlier) or _any_collects(now, Looked())

    return hooks._replace(write=write, same=same, keep=keep)


def _any_collects(hooks: Mapping[Any, Any], looked: Looked) -> bool:
    """Our own do not, and reach all that a feature has."""
    return any(_holds_a_graph(hook, looked) for hook in hooks.values() if not _is_ours(hook))


def _noted(value: Any) -> Any:
    if type(value) is list:
        return _List(value, list(value)) if is_setting(value) else UNKNOWN
    if is_setting(value) or value is ABSENT or is_a(value, _NO_MEMORY) or _is_plain_tuple(value):
        return value
    if is_a(value, torch.Tensor):
        return value if type(value) is torch.Tensor and not value.requires_grad else UNKNOWN
    return value if callable(value) and not _is_ours(value) else UNKNOWN


def _may_be_kept(noted: Any, looked: Looked) -> bool:
    """Until backward."""
    if noted is UNKNOWN:
        return False
    return not callable(noted) or is_a(noted, _NO_MEMORY) or not _holds_a_graph(noted, looked)


def _holds_a_graph(function: Any, looked: Looked) -> bool:
    """Whether it has collected what was computed: the graph of that would keep it, and be kept by it."""
    seen: set[int] = set()
    room = min(_IN_ALL, max(_AT_LEAST, looked.room))
    left: deque[Any] = deque(function.modules() if is_a(function, torch.nn.Module) else [function])
    while left and len(seen) < room:
        one = left.popleft()
        if id(one) in seen or id(one) in looked or is_a(one, _KEEP_NOTHING):
            continue
        seen.add(id(one))
        if is_a(one, torch.Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                if changeable.node_of(one) is not None:
                    return True
        elif is_a(one, torch.autograd.graph.Node):
            return True
        left.extend(islice(_kept_by(one), _IN_EACH))
    looked.room -= len(seen)
    if not left:  # else what lies behind these is not known
        looked |= seen
    return False


def _kept_by(one: Any) -> Iterable[Any]:
    """As the garbage collector sees it, whatever keeps it: slots, attributes, cells, items. Without a function's module
    and the modules in a module, which have their owners."""
    if type(one) is dict:  # the collector would list all of a vocabulary
        return chain(one.values(), one)
    if type(one) in (list, tuple, set):
        return one
    if is_a(one, FunctionType):
        of_its_module = {id(one.__globals__), id(vars(builtins))}
        return (found for found in gc.get_referents(one) if id(found) not in of_its_module)
    if is_a(one, torch.nn.Module):
        return (value for key, value in (attributes_of(one) or {}).items() if key != "_modules")
    return gc.get_referents(one)


def _is_ours(value: Any) -> bool:
    """A plan in force is no setting of the caller's."""
    if "_declared_by" in (attributes_of(value) or ()):
        return True
    value = value.__func__ if type(value) is MethodType else value
    return type(value) is FunctionType and str(value.__globals__.get("__name__")).startswith("mindspeed_mem")


def _are_same(now: Any, then: Any) -> bool:
    if now is then or now is UNKNOWN or then is UNKNOWN:
        return True
    if type(now) is _List and type(then) is _List:
        return now.it is then.it and _are_equal(now.items, then.items)
    if type(now) is type(then) and (is_setting(now) or _is_plain_tuple(now)):
        return _are_equal(now, then)
    return not _may_be_kept(now, Looked())  # what collects is left where it is


def _are_equal(now: Any, then: Any) -> bool:
    return now == then and repr(now) == repr(then)  # 0.0 equals -0.0, and 1 equals True


def _is_plain_tuple(value: Any) -> bool:
    """Of whatever kind: a shape, one with names."""
    return is_a(value, tuple) and PLAIN.issuperset(map(type, tuple.__iter__(value)))


def _as_it_was(value: Any) -> Any:
    if type(value) is _List:
        return value.it if _are_equal(value.it, value.items) else [*value.items]
    return value


def _attributes_of(get: Callable[[], Any]) -> dict[str, Any] | None:
    return attributes_of(get())


def _if_dictionary(get: Callable[[], Any]) -> dict[str, Any] | None:
    return value if is_a(value := get(), dict) else None


def _itself(names: dict[str, Any]) -> dict[str, Any]:
    return names
