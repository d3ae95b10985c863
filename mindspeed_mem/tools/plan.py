"""``python -m mindspeed_mem plan``: what fits, the best plan, and what it is predicted to take."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import shutil
import sys
from dataclasses import dataclass, field
from typing import Any

from mindspeed_mem import output, progress, requirements
from mindspeed_mem.adaptive.problem import from_shape, profile_file
from mindspeed_mem.adaptive.problem.definition import Problem
from mindspeed_mem.adaptive.problem.shape import Degrees, Machine, Shape
from mindspeed_mem.adaptive.run import worth
from mindspeed_mem.adaptive.search import plan_picture, plan_table
from mindspeed_mem.adaptive.search.baselines import full_recompute, keep_all
from mindspeed_mem.adaptive.search.infeasible import InfeasibleError
from mindspeed_mem.adaptive.search.search import Found, Search
from mindspeed_mem.command_line import check_apart, check_file, check_picture, instead_of
from mindspeed_mem.reserve import Reserve, of_device
from mindspeed_mem.tools import from_megatron, plan_options

DESCRIPTION = """Finds which layers and operators should keep, swap or recompute their activations, from a model's shape
or from a profile, and predicts step time and memory. Nothing is run; neither Megatron nor a device is needed:

    python -m mindspeed_mem plan --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 \\
        --micro-batch-size 1 --global-batch-size 128 --data-parallel-size 8 --use-distributed-optimizer \\
        --device-memory-gib 80 --link-gbps 50

Options of the model have Megatron's names and defaults, dropout of 0.1 included; figures are for bf16. The exit status
is 1 if nothing fits.
"""
_SEARCH = "seconds to a minute"
_WIDTH = 100  # where there is no terminal


def add_arguments(command: argparse.ArgumentParser) -> None:
    model = command.add_argument_group("the model and its layout (Megatron's options; defaults in parentheses)")
    machine = command.add_argument_group("the machine")
    plan_options.add_arguments(model, machine)
    plan_options.add_schedule(model)
    what = "no plan: measure the device at hand, for --devices; under torchrun also copies by all ranks at once"
    machine.add_argument("--measure", action="store_true", help=what)
    plan_options.add_limits(machine, " (default with --trace: the limit the profile was made under, without a reserve)")
    what = "also find the best plans with a GiB more and with one less (two more searches)"
    machine.add_argument("--next-gib", action="store_true", help=what)
    files = command.add_argument_group("files")
    files.add_argument("--trace", metavar="FILE", help="plan from this profile instead of from a shape")
    what = "no search: translate these flags of Megatron (one argument) into a plan; printed, or written to --output"
    files.add_argument("--from-megatron", metavar="FLAGS", help=what)
    files.add_argument("--output", metavar="FILE", help="write the plan: a YAML file for --memory-config")
    files.add_argument("--write-trace", metavar="FILE", help="write the problem that was planned for, as a profile")
    files.add_argument("--picture", metavar="FILE", help="draw step time over memory limits: .svg, .png or .pdf")


def main(given: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    if given.measure:
        return _measured(given)
    if given.from_megatron is not None:
        return _translated(given)
    request = _read(given)
    profile = request.profile
    if request.wrong or profile is None:
        print("mindspeed_mem plan:", *(f"  {reason}" for reason in request.wrong), sep="\n", file=sys.stderr)
        return 2
    limits: dict[str, Any] = {}
    kept = None
    if request.device_bytes is not None:
        kept = _reserve(request, profile, request.device_bytes)
        limits["device_limit"] = request.device_bytes - kept.bytes
    if request.host_bytes is not None:
        limits["host_limit"] = request.host_bytes
    profile = dataclasses.replace(profile, problem=dataclasses.replace(profile.problem, **limits))
    if given.write_trace:
        profile_file.write(profile, given.write_trace)
    return _plan(given, profile, kept)


def _measured(given: argparse.Namespace) -> int:
    """An entry for a table of devices."""
    wrong: list[str] = []
    instead_of("--measure", given, (*plan_options.OF_A_SHAPE, "trace", "from_megatron"), wrong)
    check_file("--output", given.output, wrong)
    if wrong:
        print("mindspeed_mem plan --measure:", *(f"  {reason}" for reason in wrong), sep="\n", file=sys.stderr)
        return 2
    from mindspeed_mem.device import get_backend, speeds  # torch: only this needs it

    backend = get_backend()
    with progress.shown("measuring the device", "some seconds"):
        found = {name: float(f"{value:.4g}") for name, value in speeds.measure(backend).items()}
    if "link_alone_gbps" not in found:  # not the first process of its host
        return 0
    memory = {name: found.pop(name) for name in ("memory_gib",) if name in found}
    name = str(backend.describe().get("device", backend.type))
    sources = [{"of": f"all, on {name}", "url": "plan --measure", "read": datetime.date.today().isoformat()}]
    text = json.dumps({"here": {**memory, "measured": found, "sources": sources}}, indent=1) + "\n"
    if given.output is None:
        print(text, end="")
    else:
        output.write(given.output, text)
        print(f"written to {given.output}: plan with --devices {given.output} --device-name here")
    return 0


def _translated(given: argparse.Namespace) -> int:
    """The plan that is equal to a Megatron command line."""
    wrong: list[str] = []
    found = from_megatron.read(given.from_megatron, wrong)
    instead_of("--from-megatron", given, (*plan_options.OF_A_SHAPE, "trace"), wrong)
    check_file("--output", given.output, wrong)
    wrong += [reason for reason in [requirements.absent("PyYAML")] if reason is not None]
    if wrong:
        print("mindspeed_mem plan --from-megatron:", *(f"  {reason}" for reason in wrong), sep="\n", file=sys.stderr)
        return 2
    import yaml  # only this needs it

    text = yaml.safe_dump(found, sort_keys=False, default_flow_style=None, width=_WIDTH)
    if given.output is None:
        print(text, end="")
    else:
        output.write(given.output, text)
        print(f"written to {given.output}: train with --memory-config {given.output}, and without Megatron's flags")
    return 0


def _reserve(request: Request, profile: profile_file.Profile, device_bytes: int) -> Reserve:
    """What of the device is not planned with."""
    if request.reserve_bytes is not None:
        return Reserve(asked=request.reserve_bytes)
    sizes: dict[str, Any] = {"pipeline": len(profile.problem.stages)} | {
        name: profile.shapes.get(name) for name in ("tensor", "data", "context", "expert")
    }
    sizes = {name: size if isinstance(size, int) else 1 for name, size in sizes.items()}
    return of_device(device_bytes, Degrees(**sizes).groups)


def _plan(given: argparse.Namespace, profile: profile_file.Profile, reserve: Reserve | None) -> int:
    problem = profile.problem
    search = Search(problem)
    kept, full = keep_all(problem), full_recompute(problem)
    status, found, error = 0, None, None
    try:
        if given.picture:
            floor = search.floor()
            asked = plan_picture.limits(floor, max(kept.peaks), problem.device_limit)
            with progress.shown(f"searching for the plans of {len(asked)} limits of memory", "seconds each"):
                curve = list(zip(asked, search.curve(asked), strict=True))
            title = plan_table.subject(profile, reserve)
            plan_picture.draw(curve, kept, full, problem.device_limit, given.picture, title)
        with progress.shown("searching for the best plan", _SEARCH):
            found = search.best()
    except InfeasibleError as shortage:
        status, error = 1, shortage
    width = shutil.get_terminal_size((_WIDTH, 24)).columns
    print("\n".join(plan_table.lines(profile, reserve, kept, full, found, width)))
    if found is not None:
        with progress.shown("searching for plans with other memory", _SEARCH):
            lines = [*worth.lines(found), *(worth.next_gib(search, found) if given.next_gib else ())]
        for line in lines:
            print(line)
    if error is not None:
        states_are_split = bool(profile.shapes.get("distributed_optimizer"))
        print(f"mindspeed_mem plan: {error.text(states_are_split)}", file=sys.stderr)
        if reserve is not None and reserve.bytes:
            print(
                f"  (a reserve of {plan_table.gib(reserve.bytes)} GiB is kept besides: --reserve-gib)", file=sys.stderr
            )
    if given.picture:
        print(f"drawn to {given.picture}")
    if given.output and found is not None:
        _write(given.output, problem, found, plan_table.head(profile, reserve), profile.origin)
        print(f"written to {given.output}: train with --memory-config {given.output}")
    return status


def _write(target: str, problem: Problem, found: Found, head: list[str], origin: str) -> None:
    from mindspeed_mem.adaptive.search.plan_file import as_yaml, memory_config  # only this needs PyYAML

    origin = "estimates" if origin == "estimated" else "a measured profile"
    peak = plan_table.gib(max(found.simulated.peaks))
    first = f"mindspeed_mem plan: {found.simulated.seconds:.4g} s a step, {peak} GiB at most, from {origin}"
    remarks = [first, *head]
    output.write(target, as_yaml(memory_config(problem, found.plan), remarks))


# ---- what the options say


@dataclass
class Request:
    """What was asked for; `wrong` holds every reason why it cannot be done."""

    profile: profile_file.Profile | None = None
    """What to plan from; None where something is wrong."""
    device_bytes: int | None = None
    """Of the device."""
    reserve_bytes: int | None = None
    """What is not planned with, if that was said."""
    host_bytes: int | None = None
    wrong: list[str] = field(default_factory=list)


def _read(given: argparse.Namespace) -> Request:
    """Shape, split and machine, or with a profile only the limits."""
    request = Request()
    wrong = request.wrong
    if given.trace is not None:
        instead_of("--trace", given, plan_options.OF_A_SHAPE, wrong)
    assumed = plan_options.by_name(given, wrong) if given.trace is None else None
    request.device_bytes, request.reserve_bytes, request.host_bytes = plan_options.limits(given, wrong)
    described = None
    if given.trace is None:
        described = plan_options.described(given, request.device_bytes, request.host_bytes, wrong)
    _files(given, wrong)
    wrong += [reason for reason in [requirements.without_solver()] if reason is not None]
    if given.trace is not None:
        try:
            request.profile = profile_file.read(given.trace)
        except profile_file.ProfileError as error:
            wrong += [f"--trace {given.trace}: {reason}" for reason in error.problems]
    elif described is not None and not wrong:
        request.profile = _estimated(*described, assumed)
    return request


def _estimated(shape: Shape, split: Degrees, machine: Machine, assumed: str | None) -> profile_file.Profile:
    """A profile by formula. `assumed`: what a device's name was taken for."""
    return profile_file.Profile(
        problem=from_shape.problem(shape, split, machine),
        origin="estimated",
        machine=dataclasses.asdict(machine) | ({"assumed": assumed} if assumed else {}),
        model=dataclasses.asdict(shape),
        shapes=dataclasses.asdict(split),
    )


def _files(given: argparse.Namespace, wrong: list[str]) -> None:
    check_file("--output", given.output, wrong)
    without_yaml = requirements.absent("PyYAML")
    if given.output is not None and without_yaml is not None:
        wrong.append(f"--output: {without_yaml}")
    check_file("--write-trace", given.write_trace, wrong)
    check_picture("--picture", given.picture, wrong)
    outputs = {"--output": given.output, "--write-trace": given.write_trace, "--picture": given.picture}
    check_apart(outputs, {"--trace": given.trace, **plan_options.inputs(given)}, wrong)
