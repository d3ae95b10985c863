"""A clock of executed instructions: valgrind's callgrind, which counts the same on a busy machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

PROGRAMS = ("valgrind", "callgrind_control")


def missing() -> list[str]:
    """Programs that are needed and not there."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


def run_counted(script: str, arguments: Sequence[str]) -> int:
    """Run a script under valgrind, with ``--counts FOLDER`` for its `Instructions`; returns its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        counting = ["--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/counts", "-q"]
        command = ["valgrind", *counting, sys.executable, script, *arguments, "--counts", folder]
        return subprocess.run(command, check=False).returncode


class Instructions:
    """Call it like a clock. Only what runs from the first call of a pair to the second is counted."""

    def __init__(self, folder: Path):
        self._folder, self._total, self._on = folder, 0, False

    def __call__(self) -> int:
        """Those of all pairs so far."""
        self._on = not self._on
        if self._on:
            self._control("--instr=on")
        else:
            self._control("--instr=off")
            self._control("--dump")
            for file in self._folder.glob("counts.*"):
                lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
                self._total += sum(int(line.split()[1]) for line in lines if line.startswith("totals:"))
                file.unlink()
        return self._total

    @staticmethod
    def _control(what: str) -> None:
        subprocess.run(["callgrind_control", what, str(os.getpid())], check=True, capture_output=True)
