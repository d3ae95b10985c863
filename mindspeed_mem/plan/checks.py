"""Reading untrusted values: every check records its problem and goes on, so that one run reports all of them."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from mindspeed_mem.plan.layers import Layers, Stages, numbers_in, out_of_range, spelled_out
from mindspeed_mem.plan.operators import pattern_error

ACTIVATIONS = ("produced", "saved", "both")
AUTO: Literal["Auto"] = "Auto"
Distance = int | Literal["Auto"]
"""In operators, at least 1; Auto: as far as the copies turn out to need."""

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60
_short.maxlist = _short.maxtuple = _short.maxdict = 8
_short.maxlevel = 3
_LARGEST = 2**63 - 1
"""Whole numbers: what is larger is a mistake, and Python may refuse to print it."""


class MemoryConfigError(ValueError):
    """The memory configuration cannot be used; `problems` holds one line for each reason."""

    def __init__(self, problems: Sequence[str], source: str = "memory configuration"):
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n  ".join([f"{source}: {count}", *self.problems]))


def given(value: Any) -> str:
    """A value as an error message shows it: on one line, shortened, with its type where that is in doubt."""
    try:
        text = _short.repr(value)
    except ValueError:
        return "a number with thousands of digits"
    return text if isinstance(value, bool | list | tuple | dict | None) else f"{text} ({type(value).__name__})"


def is_whole(value: Any, least: int = 0) -> bool:
    """Whether it is a whole number of at least so much."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _LARGEST


def suggestion(name: Any, known: Collection[str], cutoff: float = 0.6) -> str | None:
    """The known name that `name` was probably meant to be."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=cutoff) if isinstance(name, str) else []
    return near[0] if near else None


class Checker:
    """Collects problems; each method returns a usable value, or None after recording what was wrong."""

    def __init__(self, num_layers: int | None = None):
        self.num_layers = num_layers
        self.problems: list[str] = []

    def problem(self, path: str, text: str) -> None:
        self.problems.append(f"{path}: {text}")

    def wrong(self, path: str, value: Any, allowed: str) -> None:
        self.problem(path, f"got {given(value)}; allowed: {allowed}")

    def section(self, value: Any, path: str, known: Sequence[str], required: Sequence[str] = ()) -> dict[str, Any]:
        """A mapping with known keys only; without the keys that are wrong."""
        if not isinstance(value, Mapping):
            self.wrong(path, value, f"a mapping with the keys {', '.join(known)}")
            return {}
        meant = set()
        for key in value:
            if key not in known:
                near = suggestion(key, known)
                meant.add(near)
                hint = f"did you mean {near!r}? " if near else ""
                self.problem(f"{path}.{key}", f"unknown key; {hint}allowed: {', '.join(known)}")
        for key in required:
            if key not in value and key not in meant:  # a misspelled key is one mistake, not two
                self.problem(f"{path}.{key}", f"missing; {path} needs {', '.join(required)}")
        return {key: value[key] for key in known if key in value}

    def boolean(self, value: Any, path: str) -> bool | None:
        if isinstance(value, bool):
            return value
        self.wrong(path, value, "True or False")
        return None

    def distance(self, value: Any, path: str) -> Distance | None:
        """How many operators ahead."""
        if value == AUTO or is_whole(value, 1):
            return value
        self.wrong(path, value, f"an integer of at least 1, or {AUTO}")
        return None

    def size(self, value: Any, path: str) -> int | None:
        """Bytes; None leaves it to us."""
        if value is not None and not is_whole(value):
            self.wrong(path, value, "bytes, an integer of at least 0, or None")
            return None
        return value

    def activations(self, value: Any, path: str) -> str | None:
        if isinstance(value, str) and value in ACTIVATIONS:
            return value
        near = suggestion(value, ACTIVATIONS)
        self.wrong(path, value, ", ".join(ACTIVATIONS) + (f" (did you mean {near!r}?)" if near else ""))
        return None

    def patterns(self, value: Any, path: str) -> tuple[str, ...] | None:
        """`op_name`: one pattern, or a list or tuple of patterns."""
        if isinstance(value, str):
            named = [(path, value)]
        elif isinstance(value, list | tuple) and value:
            named = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
        else:
            self.wrong(path, value, "a string or a list of strings")
            return None
        before = len(self.problems)
        for where, pattern in named:
            if not isinstance(pattern, str):
                self.wrong(where, pattern, "a string")
            elif (error := pattern_error(pattern)) is not None:
                self.wrong(where, pattern, rf"regular expressions joined by '\.' ({error})")
        return tuple(pattern for _, pattern in named) if len(self.problems) == before else None

    def layers(self, value: Any, path: str) -> Layers | None:
        """True, or global layer indices and layers of named stacks from a list, a tuple, or a list of such lists; each
        once, in order.

        False stands for none.
        """
        allowed = (
            "True or False (all layers or none), a list of layer indices counted from 0 or of layers with their "
            "stack's name ('encoder:0'), or a list of such lists"
        )
        if isinstance(value, bool):
            return value or ()
        if not isinstance(value, list | tuple):
            self.wrong(path, value, allowed)
            return None
        before = len(self.problems)
        found: list[int | str] = []
        for index, item in enumerate(value):
            nested = isinstance(item, list | tuple)
            for inner, number in enumerate(item if nested else [item]):
                where = f"{path}[{index}][{inner}]" if nested else f"{path}[{index}]"
                with_name = spelled_out(number) if isinstance(number, str) and ":" in number.split(",")[0] else None
                if is_whole(number):
                    found.append(number)
                elif with_name is not None:
                    found += with_name
                else:
                    self.wrong(
                        where,
                        number,
                        "a layer index, an integer of at least 0, or one in a stack, such as 'encoder:0'",
                    )
        if self.num_layers is not None and (outside := {n for n in numbers_in(found) if n >= self.num_layers}):
            self.problem(path, out_of_range(outside, self.num_layers))
        return tuple(dict.fromkeys(found)) if len(self.problems) == before else None

    def stages(self, value: Any, path: str) -> Stages | None:
        """True, or pipeline stages from a list or one number; each once, in order."""
        if value is True:
            return True
        numbers = value if isinstance(value, list | tuple) else [value]
        if numbers and all(map(is_whole, numbers)):
            return tuple(dict.fromkeys(numbers))
        self.wrong(path, value, "True (all pipeline stages), or a list of stages counted from 0")
        return None
