"""``python -m mindspeed_mem doctor``: prints what the examination has found, or what it lacks to begin."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from mindspeed_mem import __version__, requirements

DESCRIPTION = """\
Prints the versions of what matters, the devices present, and for each patch whether it can be applied to
what is installed. The exit status is 1 if something is wrong."""
NEXT = (
    "next: python -m mindspeed_mem demo                      trains a small GPT without and with this package",
    "      python -m mindspeed_mem ops pretrain_gpt.py ...   what each operator of your model keeps for backward",
    "      ... -m mindspeed_mem run pretrain_gpt.py ... --adaptive-memory-optimization --adaptive-plan-file plan.yaml",
)
"""What to do where nothing is wrong."""
MEANING = {
    "absent": " (this version has no such symbol)",
    "waiting": " (their module is not installed, or not imported yet)",
}
"""Of states of patches that may look as if something were wrong."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def main(given: argparse.Namespace) -> int:
    """Run the command; returns the exit status. Applies all patches: only for a fresh process."""
    problem = requirements.absent()
    if problem is None:
        try:
            with _stdout_of_our_own() as out:
                from mindspeed_mem.tools import examination  # may import MindSpeed

                found = examination.examine()
                print(json.dumps(found, indent=2) if given.json else _text(found), file=out)
                return 1 if found["problems"] else 0
        except (ImportError, OSError) as error:  # torch was built for a library that is not there, for instance
            problem = f"what is installed cannot be imported: {type(error).__name__}: {error}"
    versions = {"python": platform.python_version(), "mindspeed_mem": __version__}
    nothing: dict[str, list[Any]] = {name: [] for name in ("untested", "devices", "optional", "patches")}
    lacking = {"versions": versions, **nothing, "features": {}, "problems": [problem]}
    print(json.dumps(lacking, indent=2) if given.json else f"mindspeed_mem doctor: {problem}")
    return 1


@contextlib.contextmanager
def _stdout_of_our_own() -> Iterator[TextIO]:
    """Standard output for us alone: what other packages print, native code included, goes to standard error."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as ours, contextlib.redirect_stdout(sys.stderr):
        os.dup2(2, 1)
        try:
            yield ours
        finally:
            ours.flush()
            os.dup2(ours.fileno(), 1)


def _text(found: dict[str, Any]) -> str:
    lines = ["  ".join(f"{name} {number or '-'}" for name, number in found["versions"].items())]
    tested = (f"{name} {', '.join(numbers)}" for name, numbers in requirements.TESTED.items() if numbers)
    lines += found["untested"] or [f"tested versions: {'; '.join(tested)}"]
    lines += [*_features(found), ""]
    for entry in found["devices"]:
        chosen = " (chosen when none is named)" if entry["chosen"] else ""
        lines.append(f"device {entry['device']}{chosen} {', '.join(entry.get('names', []))}".rstrip())
    for part in found["optional"]:
        lines.append(f"{part['name']}: {part['found'] or 'none: ' + part['without']}")
    rows = [(p["file"], p["target"], "; ".join([p["status"], *p["notes"]])) for p in found["patches"]]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
    lines += ["", "patches, with what each replaces and its state here:"]
    lines += [*(f"{file:{widths[0]}}  {target:{widths[1]}}  {status}" for file, target, status in rows), ""]
    if found["problems"]:
        lines += [f"{len(found['problems'])} wrong:", *(f"  {problem}" for problem in found["problems"])]
    else:
        counted: dict[str, int] = {}
        for patch in found["patches"]:
            word = patch["status"].partition(",")[0]
            counted[word] = counted.get(word, 0) + 1
        states = (f"{n} {word}{MEANING.get(word, '')}" for word, n in counted.items())
        lines.append(f"nothing is wrong: of {len(found['patches'])} patches {', '.join(states)}")
        lines += ["", *NEXT]
    return "\n".join(lines)


def _features(found: dict[str, Any]) -> list[str]:
    """What works on this megatron-core; in one line where all do."""
    features, on = found["features"], f"on megatron-core {found['versions']['megatron-core']}"
    if set(features.values()) == {"works"}:
        return ["", f"all features work {on}: {', '.join(features)}"]
    return ["", f"features {on}:", *(f"  {name}: {what}" for name, what in features.items())] if features else []
