"""The rows of the table of features, and how the values of our flags are read.

A value may come from a command line, from its parser, or from a program; reading what was read changes nothing.
"""

from __future__ import annotations

import math
import os
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_mem.plan.layers import spelled_out


@dataclass(frozen=True, kw_only=True)
class Option:
    """A condition on somebody else's option; without a value: that it is set to anything but off."""

    flag: str
    origin: str
    """Whose it is: ``megatron-core`` (a field of TransformerConfig, flag or not), ``megatron-lm`` or ``mindspeed``."""
    value: str | None = None
    """Holds only for this value."""
    off: str | None = None
    """This value, too, means off."""
    field: str | None = None
    """Its name in a namespace, where that is not made from the flag."""
    unless: Callable[[Any], bool] | None = None
    """Does not hold for arguments of which this is true."""
    asks: tuple[str, ...] = ()
    """Somebody else's flags that `unless` looks at."""
    why: str

    @property
    def dest(self) -> str:
        return self.field or dest_of(self.flag)

    def holds(self, args: Any) -> bool:
        """Whether `args`, a namespace or a TransformerConfig, meet the condition."""
        actual = getattr(args, self.dest, None)
        if self.unless is not None and self.unless(args):
            return False
        if self.value is not None:
            return self.value in map(str, actual if isinstance(actual, list | tuple) else [actual])
        return bool(actual) and str(actual) not in ("False", "0", self.off)

    def __str__(self) -> str:
        return self.flag if self.value is None else f"{self.flag} {self.value}"


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One flag and all that hangs on it."""

    flag: str
    help: str
    read: Callable[[Any], Any] = str
    """Turns what was given into the setting; raises ValueError saying what is allowed. `bool` makes it a switch."""
    metavar: str | None = None
    many: bool = False
    """Takes one value or more, and may be given again."""
    choices: tuple[str, ...] | None = None
    default: Any = None
    """The value that means off."""
    patches: tuple[str, ...] = ()
    """Modules of mindspeed_mem.patches, as shell patterns."""
    needs: tuple[Option, ...] = ()
    """Each must hold where the arguments know the option."""
    needs_features: tuple[str, ...] = ()
    """It limits or changes one of these features, so that one must be on."""
    bars: tuple[Option, ...] = ()
    """None may hold."""
    recompute_bars: tuple[Option, ...] = ()
    """Nor any of these where it turns out to recompute."""
    section: str | None = None
    """The key of `recompute_config` for which it stands."""
    same_plan: str = ""
    """Why --adaptive-memory-optimization finds the same plan whatever it says; empty: a plan is kept with its value,
    and used again for that only."""

    @property
    def dest(self) -> str:
        return dest_of(self.flag)

    def add_to(self, group: Any) -> None:
        if self.read is bool:
            group.add_argument(self.flag, action="store_true", help=self.help)
        else:
            kwargs = {"metavar": self.metavar} if self.choices is None else {"choices": self.choices}
            if self.many:
                kwargs |= {"nargs": "+", "action": "extend"}
            elif self.read is not str and self.choices is None:
                kwargs |= {"type": self._parse}
            group.add_argument(self.flag, default=self.default, help=self.help, **kwargs)

    def _parse(self, text: str) -> Any:
        try:
            value = self.read(text)
        except ValueError as error:
            raise ArgumentTypeError(f"got {text!r}; allowed: {error}") from error
        # Trainers put their arguments into checkpoints, which are read back without types that are not torch's.
        return value if isinstance(value, (bool, int, float, str, list, tuple)) else text


def dest_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def gib(value: Any) -> float:
    """Gibibytes: a finite number above 0."""
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
    found: dict[Any, Any] = {}
    for item in items:
        pattern, equals, layers = item.rpartition("=")
        new = layer_list(layers) if equals else True
        pattern = pattern if equals else item
        old = found.get(pattern, ())
        found[pattern] = True if new is True or old is True else (*old, *new)
    return found
