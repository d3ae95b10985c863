"""The command line: ``python -m mindspeed_mem run | ops | plan | schedule | chunks | doctor | build-allocator``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
from collections.abc import Iterator
from typing import TextIO

from mindspeed_mem import __version__, interruption, requirements

_RUN = """Imports mindspeed_mem.megatron_adaptor, which reads our flags among the script's arguments, and runs the
script as python would. An unmodified pretrain_gpt.py of Megatron-LM needs nothing else:

    torchrun --nproc-per-node 2 -m mindspeed_mem run pretrain_gpt.py --memory-config swap.yaml ...
"""
_OPS = """Runs a training script for one step, watches what every operator keeps for backward, prints a table of the
operators (with Megatron's and MindFormers' names, either of which a memory configuration may use) and ends:

    python -m mindspeed_mem ops pretrain_gpt.py --num-layers 2 ...
"""
_BUILD = """Builds the allocator that stands in front of torch's own and, where device memory runs out, has activations
moved to the host and tries again, inside any operator; --survive-oom and --adaptive-memory-optimization use it where it
is there. It is built for the torch that is installed, takes seconds, and needs a C++ compiler and the headers of CUDA
(nvcc is not needed). With --output, set MINDSPEED_MEM_ALLOCATOR to that folder where you train. It has not been run on
a GPU or NPU yet.

    python -m mindspeed_mem build-allocator
"""
_DOCTOR = """Prints the versions of what matters, the devices present, and for each patch whether it can be applied to
what is installed. The exit status is 1 if something is wrong."""


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    from mindspeed_mem.adaptive import command as plan
    from mindspeed_mem.chunk import command as chunks
    from mindspeed_mem.schedule import command as schedule

    raw = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    top = argparse.ArgumentParser(prog="mindspeed_mem", description=__doc__.partition(":")[0] + " of mindspeed_mem.")
    top.add_argument("--version", action="version", version=f"mindspeed_mem {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    for name, brief, text in (
        ("run", "run a training script with this package switched on by its flags", _RUN),
        ("ops", "print the operators of the model that a training script trains", _OPS),
    ):
        command = commands.add_parser(name, help=brief, description=text, **raw)
        command.add_argument("script", help="the Python file of the script")
        what = "the script's own arguments, ours among them"
        command.add_argument("arguments", nargs=argparse.REMAINDER, help=what).required = False
        command.set_defaults(main=_script)
    for name, brief, room in (
        ("plan", "find a memory plan", plan),
        ("schedule", "show a pipeline schedule", schedule),
        ("chunks", "find a size of chunks", chunks),
    ):
        command = commands.add_parser(name, help=brief, description=room.DESCRIPTION, **raw)
        room.add_arguments(command)
        command.set_defaults(main=room.main)
    doctor = commands.add_parser("doctor", help="check versions, devices and patches", description=_DOCTOR, **raw)
    doctor.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    doctor.set_defaults(main=_doctor)
    build = commands.add_parser("build-allocator", help="build the delegating allocator", description=_BUILD, **raw)
    what = "npu if torch_npu is installed, else cuda; cpu is for tests"
    build.add_argument("--device", choices=("cuda", "npu", "cpu"), help=what)
    build.add_argument("--output", metavar="FOLDER", help="where to put it (default: the user's cache folder)")
    build.set_defaults(main=_build_allocator)
    for command in commands.choices.values():
        command.set_defaults(refuse=command.error)
    return top


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


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    reason = requirements.old_python()  # first: what is imported below would not even be parsed
    if reason is not None:
        print(f"mindspeed_mem: {reason}", file=sys.stderr)
        return 1
    given, unknown = parser().parse_known_args(arguments)
    if unknown and "script" in given:
        given.refuse(f"the script comes first, then its arguments and ours; before any script stands {unknown[0]}")
    if unknown:  # said with the usage of the command that does not know them
        given.refuse(f"unrecognized arguments: {' '.join(unknown)}")
    with interruption.in_one_line(f"mindspeed_mem {given.command}"):
        try:
            status = given.main(given)
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


def _doctor(given: argparse.Namespace) -> int:
    problem = requirements.absent()
    if problem is None:
        try:
            with _stdout_of_our_own() as out:
                from mindspeed_mem import doctor  # may import MindSpeed

                return doctor.main(as_json=given.json, out=out)
        except (ImportError, OSError) as error:  # torch was built for a library that is not there, for instance
            problem = f"what is installed cannot be imported: {type(error).__name__}: {error}"
    versions = {"python": platform.python_version(), "mindspeed_mem": __version__}
    found = {"versions": versions, "untested": [], "devices": [], "optional": [], "patches": [], "problems": [problem]}
    print(json.dumps(found, indent=2) if given.json else f"mindspeed_mem doctor: {problem}")
    return 1


def _build_allocator(given: argparse.Namespace) -> int:
    reason = requirements.absent("torch")
    if reason is not None:
        print(f"mindspeed_mem build-allocator: {reason}", file=sys.stderr)
        return 1
    from mindspeed_mem.device import allocator_build

    return allocator_build.main(given)


def _script(given: argparse.Namespace) -> int:
    """`run` and `ops`."""
    from mindspeed_mem import launch

    try:
        adaptor = launch.prepare(given.script, given.arguments)
    except launch.LaunchError as error:
        print(f"mindspeed_mem {given.command}: {error}", file=sys.stderr)
        return 2
    if given.command == "run":
        launch.run(given.script)
        return 0
    from mindspeed_mem import observation

    observation.start(adaptor)
    with contextlib.suppress(observation.Finished):  # torch's @record swallows it on its way here
        launch.run(given.script)
    if observation.printed:
        adaptor.leave()
        return 0
    print(f"mindspeed_mem ops: {observation.NO_STEP}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
