"""How the values of our flags are read.

A value may come from a command line, from its parser, or from a program; reading what was read changes nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_mem.plan.layers import spelled_out


def above_zero(value: Any) -> float:
    """A finite number above 0, such as GiB or MiB."""
    number = None if isinstance(value, bool) else float(value)
    if number is None or not (math.isfinite(number) and number > 0):
        raise ValueError("a number above 0")
    return number


def at_least_one(value: Any) -> int:
    """A whole number of at least 1."""
    text = str(value)
    if isinstance(value, bool) or not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise ValueError("a whole number of at least 1")
    return int(text)


def zero_stage(value: Any) -> int | None:
    """A stage of ZeRO; 0, as without the flag, is off."""
    if isinstance(value, bool) or str(value) not in ("0", "1", "2", "3"):
        raise ValueError("1, 2 or 3 (0: off)")
    return int(value) or None


def whole_numbers(value: Any) -> tuple[int, ...]:
    """Whole numbers from 0: ``3,5,5,3``, a list of them, or one number."""
    items = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    texts = [str(item).strip() for item in items]
    if (
        not texts
        or any(isinstance(item, bool) for item in items)
        or not all(text.isascii() and text.isdecimal() for text in texts)
    ):
        raise ValueError("whole numbers from 0 with commas between them, such as 3,5,5,3")
    return tuple(map(int, texts))


def source(value: Any) -> Any:
    """A YAML file, or the mapping that such a file contains."""
    if not isinstance(value, str | os.PathLike | Mapping):
        raise ValueError("a file name, or a mapping with what such a file contains")
    return value


def new_file(value: Any) -> Path:
    """A file that can be written, or made in a folder that there is or can be."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ValueError("the name of a file")
    path = Path(value)
    if path.is_dir() or not path.name:
        raise ValueError("a file, which this is not: it is a folder")
    folder = next(one for one in path.absolute().parents if one.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise ValueError(f"a file that can be written; {path if path.exists() else folder} cannot")
    return path


def new_folder(value: Any) -> Path:
    """A folder that files can be written to, or that can be made."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ValueError("the name of a folder")
    path = Path(value)
    there = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"a folder that can be written to; {there} cannot")
    return path


def step_range(value: Any) -> tuple[int, int]:
    """Training steps from 1 on: ``5-7``, or one; the first and the last."""
    parts = value if isinstance(value, list | tuple) else str(value).split("-")
    try:
        first, last = at_least_one(parts[0]), at_least_one(parts[-1])
    except (ValueError, IndexError):
        first, last = 1, 0
    if first > last or len(parts) > 2:
        raise ValueError("steps counted from 1, such as 5-7, or one")
    return first, last


def layer_list(value: Any) -> Any:
    """`all`, or layers: ``0,3-5``, ``encoder:0,decoder:1-3``, a number, or what `layers` is elsewhere. None: no
    layer."""
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    if not isinstance(value, str):
        return value if value else None
    if value.strip() == "all":
        return True
    found = spelled_out(value)
    if found is None:
        raise ValueError(
            "layer indices counted from 0, such as 0,3-5, or all; in a model of several stacks also with their names, "
            "each up to the next one, such as encoder:0,2,decoder:all"
        )
    return found


def by_pattern(value: Any) -> Any:
    r"""Patterns with their layers: ``mlp=0,3`` or ``mlp``, or what the file's section accepts. None: nothing."""
    if not value or isinstance(value, bool):
        return value or None
    if isinstance(value, Mapping):
        return {pattern: False if layers is None else layer_list(layers) or False for pattern, layers in value.items()}
    items = [value] if isinstance(value, str) else value
    if not (isinstance(items, list | tuple) and all(isinstance(item, str) for item in items)):
        raise ValueError(r"patterns, each with its layers or for all of them, such as mlp=0,3 or mlp\.linear_fc1")
    found: dict[str, Any] = {}
    for item in items:
        pattern, equals, layers = item.rpartition("=")
        new: Any = layer_list(layers) if equals else True
        pattern = pattern if equals else item
        old = found.get(pattern, ())
        found[pattern] = True if new is True or old is True else (*old, *new)
    return found
