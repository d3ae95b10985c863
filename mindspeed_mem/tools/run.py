"""``python -m mindspeed_mem run``: a user's script as ``__main__`` after the adaptor, here and in what it spawns.

Megatron's distributed checkpoints start processes by ``spawn``, and such a child imports the parent's ``__main__``
again, under the name ``__mp_main__``. Python does that by the module name in ``__main__.__spec__``; with the name of
this module there, the child comes here, imports the adaptor and then the script, as its parent did.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from mindspeed_mem import requirements

DESCRIPTION = """\
Imports mindspeed_mem.megatron_adaptor, which reads our flags among the script's arguments, and runs the
script as python would. An unmodified pretrain_gpt.py of Megatron-LM needs nothing else:

    torchrun --nproc-per-node 2 -m mindspeed_mem run pretrain_gpt.py --memory-config swap.yaml ...
"""
_SCRIPT = "MINDSPEED_MEM_SCRIPT"  # a spawned child inherits the environment, but not what argv[0] was


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("script", help="the Python file of the script")
    what = "the script's own arguments, ours among them"
    command.add_argument("arguments", nargs=argparse.REMAINDER, help=what).required = False


def main(given: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    if prepare(given) is None:
        return 2
    start(given.script)
    return 0


def prepare(given: argparse.Namespace) -> ModuleType | None:
    """Import the adaptor as the first import of the script would; returns the adaptor.

    Sets ``sys.argv`` to what Python would set for the script, and puts its folder on ``sys.path``: in front, as Python
    would, but behind everything where the folder is a Megatron-LM checkout whose megatron.core has not been compiled
    while an installed one has. None if there is no such file, or where a package that training needs is not installed,
    and that has been said.
    """
    path, reason = Path(given.script), requirements.absent()
    if reason is None and (path.is_dir() or not path.exists()):
        what = "is a folder" if path.is_dir() else "does not exist"
        reason = f"{given.script} {what}; give the Python file to run, with its arguments after it"
    if reason is not None:
        print(f"mindspeed_mem {given.command}: {reason}", file=sys.stderr)
        return None
    os.environ[_SCRIPT] = str(path.resolve())
    sys.argv = [given.script, *given.arguments]
    own = str(Path(__file__).resolve().parents[2])
    folder = str(path.resolve().parent)
    del sys.path[0]
    sys.path.insert(len(sys.path) if _borrows_core(folder) else 0, folder)
    if own not in sys.path:  # what was sys.path[0] in a bare checkout; spawned children import this package by name
        sys.path.append(own)
    return importlib.import_module("mindspeed_mem.megatron_adaptor")


def _borrows_core(folder: str) -> bool:
    """Whether `folder` has a megatron.core without its compiled helpers, which some other place on the path has."""

    def compiled(root: str) -> bool:
        return any(Path(root, "megatron", "core", "datasets").glob("helpers_cpp.*.so"))

    return Path(folder, "megatron", "core").is_dir() and not compiled(folder) and any(map(compiled, sys.path))


def start(script: str) -> None:
    """Run the prepared script as ``__main__``. What it raises, SystemExit included, is for the caller."""
    main = ModuleType("__main__")
    main.__file__ = script
    main.__spec__ = importlib.util.find_spec(__name__)
    main.__dict__["__builtins__"] = __builtins__
    keep = sys.modules["__main__"]  # its code is still running
    # The second name, which multiprocessing has set already: what a child sends back refers to classes by it.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    try:
        _execute(script, main.__dict__)
    finally:
        del keep


def _execute(script: str, namespace: dict) -> None:
    source = Path(script).read_bytes()
    exec(compile(source, script, "exec"), namespace)


def _import_again() -> None:
    """In a spawned child: what `prepare` and `start` did in its parent, but not the script's ``__main__`` part."""
    script = os.environ[_SCRIPT]
    sys.argv[0] = script
    importlib.import_module("mindspeed_mem.megatron_adaptor")
    globals()["__file__"] = script
    _execute(script, globals())


if __name__ == "__mp_main__":
    _import_again()
