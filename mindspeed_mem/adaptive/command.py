"""``python -m mindspeed_mem plan``: what fits, the best plan, and what it is predicted to take."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys

from mindspeed_mem import output
from mindspeed_mem.adaptive import command_options
from mindspeed_mem.adaptive.problem import from_shape, profile_file
from mindspeed_mem.adaptive.problem.definition import Problem
from mindspeed_mem.adaptive.problem.shape import Split
from mindspeed_mem.adaptive.search import plan_picture, plan_table
from mindspeed_mem.adaptive.search.baselines import full_recompute, keep_all
from mindspeed_mem.adaptive.search.infeasible import InfeasibleError
from mindspeed_mem.adaptive.search.search import Found, Search
from mindspeed_mem.reserve import Reserve, of_device

DESCRIPTION = """Finds which layers and operators should keep, swap or recompute their activations, from a model's shape
or from a profile, and predicts step time and memory. Nothing is run; neither Megatron nor a device is needed:

    python -m mindspeed_mem plan --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 \\
        --micro-batch-size 1 --global-batch-size 16 --device-memory-gib 80 --link-gbps 50

Options of the model have Megatron's names and defaults, dropout of 0.1 included; figures are for bf16. The exit status
is 1 if nothing fits.
"""
_WIDTH = 100  # where there is no terminal

add_arguments = command_options.add_arguments


def main(given: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    request = command_options.read(given)
    profile = None
    if given.trace is not None:
        try:
            profile = profile_file.read(given.trace)
        except profile_file.ProfileError as error:
            request.wrong += [f"--trace {line.strip()}" for line in str(error).splitlines()]
    if request.wrong:
        print("mindspeed_mem plan:", *(f"  {reason}" for reason in request.wrong), sep="\n", file=sys.stderr)
        return 2
    if profile is None:
        problem = from_shape.problem(request.shape, request.split, request.machine)
        profile = profile_file.Profile(
            problem=problem,
            origin="estimated",
            machine=dataclasses.asdict(request.machine) | ({"assumed": request.assumed} if request.assumed else {}),
            model=dataclasses.asdict(request.shape),
            shapes=dataclasses.asdict(request.split),
        )
    limits, kept = {}, None
    if request.device_bytes is not None:
        kept = _reserve(request, profile)
        limits["device_limit"] = request.device_bytes - kept.bytes
    if request.host_bytes is not None:
        limits["host_limit"] = request.host_bytes
    profile = dataclasses.replace(profile, problem=dataclasses.replace(profile.problem, **limits))
    if given.write_trace:
        profile_file.write(profile, given.write_trace)
    return _plan(given, profile, kept)


def _reserve(request: command_options.Request, profile: profile_file.Profile) -> Reserve:
    """What of the device is not planned with."""
    if request.reserve_bytes is not None:
        return Reserve(asked=request.reserve_bytes)
    sizes = {"pipeline": len(profile.problem.stages)} | {
        name: profile.shapes.get(name) for name in ("tensor", "data", "context")
    }
    split = Split(**{name: size if isinstance(size, int) else 1 for name, size in sizes.items()})
    return of_device(request.device_bytes, split.groups)


def _plan(given: argparse.Namespace, profile: profile_file.Profile, reserve: Reserve | None) -> int:
    problem = profile.problem
    search = Search(problem)
    kept, full = keep_all(problem), full_recompute(problem)
    status, found, error = 0, None, None
    try:
        if given.picture:
            floor = search.floor()
            asked = plan_picture.limits(floor, max(kept.peaks), problem.device_limit)
            curve = list(zip(asked, search.curve(asked), strict=True))
            title = " ".join(plan_table.head(profile, reserve)[:1])
            plan_picture.draw(curve, kept, full, problem.device_limit, given.picture, title)
        found = search.best()
    except InfeasibleError as shortage:
        status, error = 1, shortage
    width = shutil.get_terminal_size((_WIDTH, 24)).columns
    print("\n".join(plan_table.lines(profile, reserve, kept, full, found, width)))
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
