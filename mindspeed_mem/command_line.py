"""Reads the options of our sub-commands from text; what is wrong is collected in a list, and said at once."""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mindspeed_mem import output

PICTURES = (".svg", ".png", ".pdf")
_NAMED = "named "
NO_MATPLOTLIB = "matplotlib, which draws it, is not installed: pip install matplotlib, or 'mindspeed-mem[picture]'"


def whole(option: str, text: str | None, wrong: list[str]) -> int | None:
    """The whole number of at least 1 that `text` is; otherwise None, and if there is a text, the reason in `wrong`."""
    if text is None:
        return None
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    wrong.append(f"{option} takes a whole number of at least 1, not {text!r}")
    return None


def number(option: str, text: str | None, wrong: list[str], least: float | None = None) -> float | None:
    """The number above 0, or of at least `least`, that `text` is, as `whole` does."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isfinite(value) and (value > 0 if least is None else value >= least):
        return value
    wrong.append(f"{option} takes a number {'above 0' if least is None else f'of at least {least:g}'}, not {text!r}")
    return None


def check_file(option: str, target: str | None, wrong: list[str]) -> None:
    """Note in `wrong` why nothing can be written to `target`."""
    reason = None if target is None else output.why_not(target)
    if reason is not None:
        wrong.append(f"{option}: {reason}")


def check_picture(option: str, target: str | None, wrong: list[str]) -> None:
    """Note in `wrong` why no picture can be drawn to `target`."""
    if target is None:
        return
    if Path(target).suffix.lower() not in PICTURES:
        wrong.append(f"{option} takes a file that ends in {', '.join(PICTURES)}, not {target!r}")
    check_file(option, target, wrong)
    if importlib.util.find_spec("matplotlib") is None:
        wrong.append(f"{option}: {NO_MATPLOTLIB}")


class AsGiven(argparse.Action):
    """Stores the text, and by which of the option's names it was given (`as_given`)."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values)
        setattr(namespace, _NAMED + self.option_strings[0], option)


def as_given(given: argparse.Namespace, *names: str) -> str:
    """The one of an option's names that the user wrote; the first if none."""
    return getattr(given, _NAMED + names[0], None) or names[0]


def flag(name: str) -> str:
    """``num_layers`` as users write it."""
    return "--" + name.replace("_", "-")


def instead_of(option: str, given: argparse.Namespace, names: Iterable[str], wrong: list[str]) -> None:
    """Note in `wrong` which of the options `names` are given beside `option`, which says the same."""
    others = [flag(name) for name in names if getattr(given, name) not in (None, False)]
    if others:
        wrong.append(f"{option} says what {', '.join(others)} would; give either")
