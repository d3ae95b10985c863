"""The JSON file that holds a profile: what was measured, on what, and the planning problem that follows from it.

    {"format": "mindspeed_mem profile", "version": 2, "origin": "measured",
     "machine": {...}, "model": {...}, "shapes": {...}, "in_flight": [[[2]], [[1]]], "problem": {...}}

Version 1 called the parts of a stage chunks, and is read as well. `machine`, `model` and `shapes` are names with texts
or numbers, for readers and to tell whether a profile is of the same job; `problem` has the fields of `Problem` with
bytes, seconds and GB/s; `in_flight` repeats what follows from its schedule.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Union, get_args, get_origin, get_type_hints

from mindspeed_mem import __version__, output
from mindspeed_mem.adaptive.problem.checks import problems_of
from mindspeed_mem.adaptive.problem.definition import Problem

FORMAT, VERSION = "mindspeed_mem profile", 2
_EARLIER = {"chunks": "parts"}
"""Names in version 1."""
ORIGINS = ("measured", "estimated")
_ALLOWED = {float: "a number of at least 0", int: "a whole number of at least 0", str: "a text", bool: "true or false"}

Facts = Mapping[str, str | int | float | bool | None]
"""Plain values by name: what tells one job from another."""


class ProfileError(ValueError):
    """The file cannot be used; `problems` holds one line for each reason."""

    def __init__(self, source: str, problems: list[str]):
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n  ".join([f"{source}: {count}", *problems]))


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A planning problem and where it comes from."""

    problem: Problem
    origin: str = "measured"
    machine: Facts = field(default_factory=dict)
    """Such as device, number of devices, host, versions."""
    model: Facts = field(default_factory=dict)
    """Such as layers, hidden size, heads, and what else tells one model from another."""
    shapes: Facts = field(default_factory=dict)
    """Sequence length, micro-batch size, parallel sizes, type."""


def write(profile: Profile, target: str | os.PathLike[str]) -> None:
    """Write the file. What was not measured must not be in it: zeros are read as zeros."""
    problem = dataclasses.asdict(profile.problem)
    del problem["output_gradients"]  # plans say that
    content = {
        "format": FORMAT,
        "version": VERSION,
        "origin": profile.origin,
        "machine": dict(profile.machine),
        "model": dict(profile.model),
        "shapes": dict(profile.shapes),
        "in_flight": profile.problem.in_flight,
        "problem": problem,
    }
    output.write(target, json.dumps(content, indent=1) + "\n")


def read(source: str | os.PathLike[str]) -> Profile:
    """Read and check the file. Raises ProfileError with all problems."""
    name = os.fspath(source)
    try:
        with open(name, encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        raise ProfileError(name, [f"cannot be read ({error.strerror})"]) from error
    except (ValueError, RecursionError) as error:
        raise ProfileError(name, [f"is not JSON ({error})"]) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ProfileError(name, [f"is no profile: its format is not {FORMAT!r}"])
    if content.get("version") not in range(1, VERSION + 1):
        ours = f"this mindspeed_mem {__version__} reads 1 to {VERSION}; use the one that wrote it, or profile again"
        raise ProfileError(name, [f"version: got {content.get('version')!r}; {ours}"])
    wrong: list[str] = []
    known = {"format", "version", "origin", "machine", "model", "shapes", "in_flight", "problem"}
    wrong += [f"{key}: unknown; allowed: {', '.join(sorted(known))}" for key in content if key not in known]
    if content.get("origin") not in ORIGINS:
        wrong.append(f"origin: got {content.get('origin')!r}; allowed: {', '.join(ORIGINS)}")
    facts = {key: _facts(content.get(key, {}), key, wrong) for key in ("machine", "model", "shapes")}
    problem = _read(Problem, content.get("problem"), "problem", wrong)
    if problem is not None and not wrong:
        wrong += [f"problem.{text}" for text in problems_of(problem)]
    if not wrong and "in_flight" in content:
        expected = [[list(held) for held in of_stage] for of_stage in problem.in_flight]
        if content["in_flight"] != expected:
            wrong.append(f"in_flight: got {content['in_flight']}; the schedule of problem.pipeline has {expected}")
    if wrong:
        raise ProfileError(name, wrong)
    return Profile(problem=problem, origin=content["origin"], **facts)


def _facts(value: Any, path: str, wrong: list[str]) -> dict[str, Any]:
    if isinstance(value, dict) and all(isinstance(one, str | int | float | bool | None) for one in value.values()):
        return value
    wrong.append(f"{path}: allowed: names with texts or numbers")
    return {}


def _read(kind: Any, value: Any, path: str, wrong: list[str]) -> Any:
    """`value` as `kind` (a dataclass, a tuple, an optional, a plain type), or None after a problem."""
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value, path, wrong)
    if get_origin(kind) in (Union, types.UnionType):
        return None if value is None else _read(get_args(kind)[0], value, path, wrong)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            wrong.append(f"{path}: got {_short(value)}; allowed: a list")
            return None
        of_items = get_args(kind)
        if of_items[-1] is Ellipsis:
            of_items = of_items[:1] * len(value)
        elif len(value) != len(of_items):
            wrong.append(f"{path}: got {_short(value)}; allowed: a list of {len(of_items)}")
            return None
        pairs = enumerate(zip(of_items, value, strict=True))
        return tuple(_read(one, item, f"{path}[{place}]", wrong) for place, (one, item) in pairs)
    if kind is float and type(value) in (int, float) and math.isfinite(value) and value >= 0:
        return float(value)
    if (kind is int and type(value) is int and value >= 0) or (kind in (str, bool) and type(value) is kind):
        return value
    wrong.append(f"{path}: got {_short(value)}; allowed: {_ALLOWED[kind]}")
    return None


def _read_dataclass(kind: Any, value: Any, path: str, wrong: list[str]) -> Any:
    if not isinstance(value, dict):
        wrong.append(f"{path}: got {_short(value)}; allowed: an object")
        return None
    value = {_EARLIER.get(key, key): item for key, item in value.items()}
    hints, before = get_type_hints(kind), len(wrong)
    fields = {one.name: one for one in dataclasses.fields(kind)}
    wrong += [f"{path}.{key}: unknown; allowed: {', '.join(fields)}" for key in value if key not in fields]
    read = {key: _read(hints[key], value[key], f"{path}.{key}", wrong) for key in fields if key in value}
    for key, one in fields.items():
        needed = one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
        if needed and key not in value:
            wrong.append(f"{path}.{key}: missing")
    return kind(**read) if len(wrong) == before else None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
