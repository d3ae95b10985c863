"""Reads the options of our sub-commands from text; what is wrong is collected in a list, and said at once."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mindspeed_mem import output

PICTURES = (".svg", ".png", ".pdf")
LARGEST = 2**31 - 1
"""Of whole numbers."""
LAYERS = 100_000
"""Of a model, at most."""
_LEAST, _MOST = 1e-9, 1e9
"""Of numbers: what is made of them stays finite."""
_DIGITS = 20
_SHOWN = 60
_NAMED = "named "
NO_MATPLOTLIB = "matplotlib, which draws it, is not installed: pip install matplotlib, or 'mindspeed-mem[picture]'"


def shortened(text: str) -> str:
    """It, cut where it is long."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def quoted(text: str) -> str:
    """It between quotes, cut where it is long."""
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}... ({len(text)} characters)"


def digits(text: str) -> int | None:
    """The whole number of at most `LARGEST` that is written in the digits 0 to 9; None: it is none."""
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS):
        return None
    return int(text) if int(text) <= LARGEST else None


def whole(option: str, text: str | None, wrong: list[str], most: int = LARGEST) -> int | None:
    """The whole number from 1 to `most` that `text` is; else None, and if there is a text, the reason in `wrong`."""
    if text is None:
        return None
    value = digits(text)
    if value and value <= most:
        return value
    too_large = text.isascii() and text.isdigit() and text.strip("0")
    wrong.append(
        f"{option} takes a whole number of at {f'most {most}' if too_large else 'least 1'}, not {quoted(text)}"
    )
    return None


def check_layers(option: str, layers: int | None, wrong: list[str]) -> None:
    """Note in `wrong` that a model has more layers than can be listed."""
    if layers is not None and layers > LAYERS:
        wrong.append(f"{option} takes a whole number of at most {LAYERS}, not {layers}")


def number(
    option: str, text: str | None, wrong: list[str], least: float | None = None, most: float = _MOST
) -> float | None:
    """The number above 0, or of at least `least`, and of at most `most` that `text` is, as `whole` does."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if (_LEAST if least is None else least) <= value <= most:
        return value
    if value > most:
        allowed = f"of at most {most:g}"
    elif least is None and value > 0:
        allowed = f"of at least {_LEAST:g}"
    else:
        allowed = "above 0" if least is None else f"of at least {least:g}"
    wrong.append(f"{option} takes a number {allowed}, not {quoted(text)}")
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


def check_apart(outputs: Mapping[str, str | None], inputs: Mapping[str, str | None], wrong: list[str]) -> None:
    """Note in `wrong` which files would be written over each other, or over what is read; each by its option."""
    written: dict[str, list[str]] = {}
    for option, target in outputs.items():
        if target is not None and not _takes_all(target):
            written.setdefault(os.path.realpath(target), []).append(option)
    for file, options in written.items():
        if len(options) > 1:
            wrong.append(f"{' and '.join(options)} name the same file, {file}: give each its own")
    for option, source in inputs.items():
        if source is not None and os.path.realpath(source) in written:
            others = " and ".join(written[os.path.realpath(source)])
            wrong.append(f"{others} would write over what {option} reads, {source}: name another file")


def _takes_all(target: str) -> bool:
    """Whether it is a terminal, ``/dev/null`` or the like, where nothing takes another's place."""
    return Path(target).is_relative_to("/dev") or (os.path.exists(target) and not os.path.isfile(target))


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
