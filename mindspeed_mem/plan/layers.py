"""Lists of layers: numbers over the whole model, or a stack's name with numbers in it, such as ``encoder:0``.

A stack is called what its module is called below the model: T5's ``encoder`` and ``decoder``, a vision model's
``vision_model.decoder``. Where it begins is known when the model is there.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Set
from typing import Any, Literal, Protocol, TypeVar

Layers = Literal[True] | tuple[int | str, ...]
"""True for all; numbers; ``encoder:0`` or ``encoder:all``. `numbered` leaves numbers only."""
Stages = Literal[True] | tuple[int, ...]
"""True for all pipeline stages, or their numbers."""

_SPAN = range(100_000)
_DIGITS = 9
"""Of the longest number that is one of a layer."""


class OfLayers(Protocol):
    """A rule that is about some layers."""

    @property
    def layers(self) -> Any: ...


Rule = TypeVar("Rule", bound=OfLayers)


def spelled_out(text: str) -> tuple[int | str, ...] | None:
    """``0,3-5`` or ``encoder:0,2,decoder:all`` with an item for each layer; None if it is no such list.

    A name holds up to the next one.
    """
    found: list[int | str] = []
    stack = ""
    for part in text.split(","):
        name, colon, numbers = (piece.strip() for piece in part.rpartition(":"))
        stack = name if colon else stack
        low, dash, high = numbers.partition("-")
        if colon and name and numbers == "all":
            found.append(f"{name}:all")
        elif (colon and not name) or not (low.isdecimal() and (high.isdecimal() if dash else True)):
            return None
        elif max(len(low), len(high)) > _DIGITS:
            return None
        elif int(high or low) - int(low) not in _SPAN:
            return None
        else:
            span = range(int(low), int(high or low) + 1)
            found += [f"{stack}:{number}" for number in span] if stack else span
    return tuple(found)


def numbered(layers: Layers, stacks: Mapping[str, range | None]) -> tuple[Layers, list[str]]:
    """The same layers by number, and what is wrong with those that have a name.

    ``stacks``: the numbers of each stack's layers; None where models that are there together disagree.
    """
    if layers is True:
        return True, []
    found: list[int] = []
    unknown: dict[str, None] = {}
    outside: dict[tuple[str, int], set[int]] = {}  # by stack and how many layers it has
    for layer in layers:
        if isinstance(layer, int):
            found.append(layer)
            continue
        stack, _, number = layer.rpartition(":")
        numbers = stacks.get(stack)
        if numbers is None:
            unknown[stack] = None
        elif number == "all":
            found += numbers
        elif int(number) < len(numbers):
            found.append(numbers[int(number)])
        else:
            outside.setdefault((stack, len(numbers)), set()).add(int(number))
    problems = [f"got the stack {stack!r}; {_allowed(stack, stacks)}" for stack in unknown]
    problems += [out_of_range(those, count, stack) for (stack, count), those in outside.items()]
    return tuple(dict.fromkeys(found)), problems


def numbers_in(layers: Layers | Iterable[int | str]) -> set[int]:
    """Those that are numbers: all of a list, once stacks' names are replaced."""
    return set() if layers is True else {layer for layer in layers if isinstance(layer, int)}


def by_layer(rules: Iterable[Rule], layers: Iterable[int]) -> dict[int, list[Rule]]:
    """For each of these layers the rules that are about it, in their order; stacks' names are replaced by then."""
    found: dict[int, list[Rule]] = {layer: [] for layer in layers}
    for rule in rules:
        for layer in among(found, rule.layers):
            found[layer].append(rule)
    return found


def among(layers: Set[int] | Mapping[int, object], chosen: Layers) -> Collection[int]:
    """Those of the first that are chosen; takes as long as the second, since there may be an entry for each layer."""
    return layers if chosen is True else {layer for layer in numbers_in(chosen) if layer in layers}


def named(layers: Collection[int], stacks: Mapping[str, range | None]) -> list[int | str]:
    """The opposite of `numbered`, short; what is in no stack stays a number."""
    found: list[int | str] = []
    rest = set(layers)
    for stack, numbers in stacks.items():
        if numbers is not None and (inside := rest.intersection(numbers)):
            found.append(f"{stack}:{as_ranges([numbers.index(layer) for layer in inside]).replace(' ', '')}")
            rest -= inside
    return [*found, *sorted(rest)]


def called(layer: int, stacks: Mapping[str, range | None]) -> str:
    """``layer 3``; where a model has several stacks, as plans call it: ``mtp:0``."""
    found = named([layer], stacks)[0] if len(stacks) > 1 else layer
    return f"layer {layer}" if found == layer else str(found)


def _allowed(stack: str, stacks: Mapping[str, range | None]) -> str:
    if stack in stacks:
        return "which begins at different numbers in models that are there together; allowed: layer numbers"
    named = {name: f"{name} (layers {as_ranges(range(len(r)))})" for name, r in stacks.items() if r is not None}
    if not named:
        return "no stack of this model has a name; allowed: layer numbers"
    near = difflib.get_close_matches(stack, named, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}allowed: {', '.join(named.values())}"


def as_ranges(numbers: Collection[int]) -> str:
    """``{0, 1, 2, 5}`` as ``0-2, 5``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def in_words(numbers: Collection[int]) -> str:
    """``layer 3``, or ``layers 0-2, 5``."""
    return f"layer{'s' * (len(numbers) > 1)} {as_ranges(numbers)}"


def out_of_range(outside: Collection[int], num_layers: int, stack: str = "") -> str:
    """``stack``: they were counted in this one."""
    of = f" of {stack}" if stack else ""
    whose = stack or "the model"
    allowed = {0: f"none, since {whose} has no layers", 1: f"0, since {whose} has one layer"}.get(
        num_layers, f"0 to {num_layers - 1}, since {whose} has {num_layers} layers counted from 0"
    )
    return f"got {in_words(outside)}{of}; allowed: {allowed}"
