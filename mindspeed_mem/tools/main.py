"""The parser of ``python -m mindspeed_mem`` with all its commands, and what they have in common.

A command is a row here and a module with DESCRIPTION, `add_arguments` and `main`. Neither of them may import torch or
PyYAML at its top: help, and plans and schedules on paper, do without.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Iterable
from typing import NoReturn

from mindspeed_mem import __version__, interruption
from mindspeed_mem.tools import (
    build_allocator,
    build_native,
    chunks,
    demo,
    doctor,
    layout,
    ops,
    plan,
    report,
    run,
    schedule,
    trace,
)

COMMANDS = (
    ("run", "run a training script with this package switched on by its flags", run),
    ("ops", "list the operators of a training script's model, and what each keeps", ops),
    ("plan", "find a memory plan for a model, without a device", plan),
    ("layout", "find how to split a model over devices, with its memory plan", layout),
    ("schedule", "show a pipeline schedule: order, idle time, memory", schedule),
    ("chunks", "find the chunk size for chunk ZeRO, and show the chunks", chunks),
    ("trace", "merge the traces of all ranks into one file", trace),
    ("report", "make an HTML page of a run, from its traces and metrics", report),
    ("demo", "train a small GPT without and with this package", demo),
    ("doctor", "check versions, devices and patches", doctor),
    ("build-native", "build the C++ version of the hot path, which takes less host time", build_native),
    ("build-allocator", "build the allocator that makes room inside operators (experimental)", build_allocator),
)


_USAGE_LINES = 12
_RUN = "python -m "
"""In the usage, which can be copied, but not before messages."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say it, with the usage only where that is short: a long one hides it."""
        usage = self.format_usage()
        if usage.count("\n") > _USAGE_LINES:
            usage, message = "", f"{message}\n({self.prog} --help lists all options)"
        self.exit(2, f"{usage}{self.prog.removeprefix(_RUN)}: error: {message}\n")


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    what = "Plan, run and examine training in less device memory. COMMAND --help explains each command."
    top = _Parser(prog=f"{_RUN}mindspeed_mem", description=what)
    top.add_argument("--version", action="version", version=f"mindspeed_mem {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    for name, brief, module in COMMANDS:
        form = argparse.RawDescriptionHelpFormatter
        command = commands.add_parser(name, help=brief, description=module.DESCRIPTION, formatter_class=form)
        module.add_arguments(command)
        command.set_defaults(main=module.main, refuse=command.error, flags=tuple(command._option_string_actions))
    return top


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    given, unknown = parser().parse_known_args(arguments)
    if unknown and "script" in given:
        given.refuse(f"the script comes first, then its arguments and ours; before any script stands {unknown[0]}")
    if unknown:  # said with the usage of the command that does not know them
        given.refuse(f"unrecognized arguments: {' '.join(unknown)}{_meant(unknown, given.flags)}")
    with interruption.in_one_line(f"mindspeed_mem {given.command}"):
        try:
            status = given.main(given)
            if sys.stdout is not None:  # closed by whoever started this
                sys.stdout.flush()
        except OSError as error:
            if "script" in given:  # what it makes of that is its own affair
                raise
            if isinstance(error, BrokenPipeError):  # the reader has seen enough
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            else:
                what = f"{error.filename} cannot be written or read: " * bool(error.filename)
                print(f"mindspeed_mem {given.command}: {what}{error.strerror or error}", file=sys.stderr)
            return 1
        return status


def _meant(unknown: Iterable[str], flags: Iterable[str]) -> str:
    """Which flags look like those that are unknown."""
    words = [word.partition("=")[0] for word in unknown if word.startswith("--")]
    near = [match for word in words for match in difflib.get_close_matches(word, list(flags), n=1, cutoff=0.75)]
    return f"; did you mean {' and '.join(dict.fromkeys(near))}?" if near else ""
