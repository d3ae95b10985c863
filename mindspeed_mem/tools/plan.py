"""``python -m mindspeed_mem plan``: what fits, the best plan, and what it is predicted to take."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed_mem import output, requirements
from mindspeed_mem.adaptive.problem import devices, from_shape, profile_file
from mindspeed_mem.adaptive.problem.definition import GIB, Problem
from mindspeed_mem.adaptive.problem.shape import Degrees, Machine, Shape
from mindspeed_mem.adaptive.search import plan_picture, plan_table
from mindspeed_mem.adaptive.search.baselines import full_recompute, keep_all
from mindspeed_mem.adaptive.search.infeasible import InfeasibleError
from mindspeed_mem.adaptive.search.search import Found, Search
from mindspeed_mem.command_line import check_file, check_picture, flag, instead_of, number
from mindspeed_mem.model_sizes import (
    MODEL_CHOICES,
    MODEL_NUMBERS,
    MODEL_SWITCHES,
    PUBLISHED,
    add_options,
    model_sizes,
    read_options,
)
from mindspeed_mem.reserve import Reserve, of_device
from mindspeed_mem.schedule import problems as schedule_problems
from mindspeed_mem.tools import from_megatron

DESCRIPTION = """Finds which layers and operators should keep, swap or recompute their activations, from a model's shape
or from a profile, and predicts step time and memory. Nothing is run; neither Megatron nor a device is needed:

    python -m mindspeed_mem plan --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 \\
        --micro-batch-size 1 --global-batch-size 128 --data-parallel-size 8 --use-distributed-optimizer \\
        --device-memory-gib 80 --link-gbps 50

Options of the model have Megatron's names and defaults, dropout of 0.1 included; figures are for bf16. The exit status
is 1 if nothing fits.
"""
_WIDTH = 100  # where there is no terminal

_NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "global_batch_size")
_NUMBERS = MODEL_NUMBERS | {
    "seq_length": None,
    "micro_batch_size": None,
    "global_batch_size": None,
    "tensor_model_parallel_size": "1",
    "context_parallel_size": "ranks that split each sequence (1)",
    "pipeline_model_parallel_size": "1",
    "num_layers_per_virtual_pipeline_stage": "no virtual stages",
    "data_parallel_size": "ranks that share the global batch (1); not an option of Megatron, which divides its ranks",
}
_SWITCHES = MODEL_SWITCHES | {
    "sequence_parallel": "split what stands between the blocks over tensor-parallel ranks",
    "use_distributed_optimizer": "split optimizer states over data-parallel ranks",
    "no_bias_gelu_fusion": "bias and GELU apart",
    "no_bias_swiglu_fusion": "bias and SwiGLU apart",
}
_CHOICES = MODEL_CHOICES | {
    "attention_backend": ("flash", "unfused"),
}
_DROPOUTS = {
    "attention_dropout": "share of the attention's scores; only an unfused attention keeps masks (0.1)",
    "hidden_dropout": "share of what is added to the residual stream, and of embeddings (0.1)",
}
_DROPOUT = 0.1  # Megatron's default of both
_SPEEDS = {
    "link_gbps": (Machine.link_gbps, "host copies, GB/s each way while computing"),
    "tflops": (Machine.tflops, "TFLOP/s that matrix products reach"),
    "memory_gbps": (Machine.memory_gbps, "GB/s that device memory reaches"),
    "tensor_gbps": (Machine.tensor_gbps, "GB/s of collectives between tensor-parallel ranks"),
}
_RANKS = (
    *("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size", "data_parallel_size"),
)
"""With any of these above 1, other devices of the node copy as well."""
_OF_A_SHAPE = ("model", "device_name", "devices", *_NUMBERS, *_SWITCHES, *_CHOICES, *_DROPOUTS, *_SPEEDS)


def add_arguments(command: argparse.ArgumentParser) -> None:
    model = command.add_argument_group("the model and its layout (Megatron's options)")
    what = f"a published model, whatever other options say instead: {', '.join(PUBLISHED)}"
    model.add_argument("--model", metavar="NAME", help=what)
    add_options(model, _NUMBERS, _SWITCHES, _CHOICES)
    for name, text in _DROPOUTS.items():
        model.add_argument(flag(name), metavar="X", help=text)
    machine = command.add_argument_group("the machine")
    what = f"memory and speeds, whatever other options say instead: {', '.join(devices.table())}"
    machine.add_argument("--device-name", metavar="NAME", help=what)
    what = "more devices: JSON or YAML as --measure prints it and docs/planner.md describes it"
    machine.add_argument("--devices", metavar="FILE", help=what)
    what = (
        "no plan: measure the device at hand, for --devices; under torchrun copies to the host are by all at once, too"
    )
    machine.add_argument("--measure", action="store_true", help=what)
    what = "device memory of a rank (default with --trace: the limit the profile was made under, without a reserve)"
    machine.add_argument("--device-memory-gib", metavar="GIB", help=what)
    what = (
        "of it, what is not planned with: for contexts (1, at most a 16th of the device), communicators (0.67 for each "
        "of tensor, pipeline, data and context parallel groups, at most a 64th) and fragmentation (2 %%)"
    )
    machine.add_argument("--reserve-gib", metavar="GIB", help=what)
    machine.add_argument("--swap-host-memory-gib", metavar="GIB", help="host memory that a rank may fill (no limit)")
    for name, (default, text) in _SPEEDS.items():
        machine.add_argument(flag(name), metavar="X", help=f"{text} ({default:g})")
    files = command.add_argument_group("files")
    files.add_argument("--trace", metavar="FILE", help="plan from this profile instead of from a shape")
    what = "no search: the plan that does what these flags of Megatron do, all in one argument; printed, or --output"
    files.add_argument("--from-megatron", metavar="FLAGS", help=what)
    files.add_argument("--output", metavar="FILE", help="write the plan: a YAML file for --memory-config")
    files.add_argument("--write-trace", metavar="FILE", help="write what was planned from as a profile")
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
    instead_of("--measure", given, (*_OF_A_SHAPE, "trace", "from_megatron"), wrong)
    check_file("--output", given.output, wrong)
    if wrong:
        print("mindspeed_mem plan --measure:", *(f"  {reason}" for reason in wrong), sep="\n", file=sys.stderr)
        return 2
    from mindspeed_mem.device import get_backend, speeds  # torch: only this needs it

    backend = get_backend()
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
    instead_of("--from-megatron", given, (*_OF_A_SHAPE, "trace"), wrong)
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
        name: profile.shapes.get(name) for name in ("tensor", "data", "context")
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
            curve = list(zip(asked, search.curve(asked), strict=True))
            title = plan_table.subject(profile, reserve)
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
        instead_of("--trace", given, _OF_A_SHAPE, wrong)
    assumed = _by_name(given, wrong)
    device = number("--device-memory-gib", given.device_memory_gib, wrong)
    request.device_bytes = None if device is None else round(device * GIB)
    kept = number("--reserve-gib", given.reserve_gib, wrong, least=0)
    request.reserve_bytes = None if kept is None else round(kept * GIB)
    if kept is not None and given.device_memory_gib is None:
        wrong.append("--reserve-gib is taken from --device-memory-gib, which is not given")
    elif kept is not None and device is not None and kept >= device:
        wrong.append(f"--reserve-gib {kept:g} leaves nothing of --device-memory-gib {device:g}")
    host = number("--swap-host-memory-gib", given.swap_host_memory_gib, wrong, least=0)
    request.host_bytes = None if host is None else round(host * GIB)
    described = None
    if given.trace is None:
        described = _described(given, request)
    _files(given, wrong)
    wrong += [reason for reason in [requirements.without_solver()] if reason is not None]
    if given.trace is not None:
        try:
            request.profile = profile_file.read(given.trace)
        except profile_file.ProfileError as error:
            wrong += [f"--trace {line.strip()}" for line in str(error).splitlines()]
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


def _by_name(given: argparse.Namespace, wrong: list[str]) -> str | None:
    """Fill in what names of a model and of a device stand for, where nothing else is said; says what of the device, and
    what is assumed of it."""
    values: dict[str, object] = {}
    assumed = []
    try:
        known = devices.table(given.devices)
    except devices.DeviceFileError as error:
        wrong += [f"--devices {line}" for line in error.problems]
        known = devices.table()
    for option, name, names in (("--model", given.model, PUBLISHED), ("--device-name", given.device_name, known)):
        if name is not None and name not in names:
            wrong.append(f"{option} takes {', '.join(names)}, not {name!r}")
    if given.model in PUBLISHED:
        values |= PUBLISHED[given.model].options()
    alone = all(getattr(given, name) in (None, "1") for name in _RANKS)
    if given.device_name in known:
        device = devices.device(given.device_name, known[given.device_name], alone, vars(given))
        assumed += [device.said] if device.said else []
        values |= {"device_memory_gib": device.memory_gib, **device.speeds}
    relevant = [name for name in _SPEEDS if name != "tensor_gbps" or not alone]
    silent = [name for name in relevant if getattr(given, name) is None and name not in values]
    if silent and given.trace is None:
        taken = ", ".join(f"{flag(name)} {_SPEEDS[name][0]:g}" for name in silent)
        assumed.append(f"Nothing says what the device is: assumed {taken} (--device-name knows some, --measure yours).")
    for name, value in values.items():
        if getattr(given, name) in (None, False) and value is not None:
            setattr(given, name, value if isinstance(value, bool) else str(value))
    return " ".join(assumed) or None


def _described(given: argparse.Namespace, request: Request) -> tuple[Shape, Degrees, Machine] | None:
    """Model, split and machine that the options describe; None where too much is missing or wrong."""
    wrong = request.wrong
    needed = (*_NEEDED, "device_memory_gib")
    missing = [flag(name) for name in needed if getattr(given, name) is None]
    if missing:
        wrong.append(
            f"{', '.join(missing)}: missing; without --trace the model's shape and the device's memory are needed"
        )
    unknown = "plan does not know what it keeps: plan --trace takes a profile of such a model"
    read = read_options(given, _NUMBERS, _CHOICES, unknown, wrong)
    numbers = {name: size for name, size in read.items() if size is not None}
    speeds = {
        name: default if getattr(given, name) is None else number(flag(name), getattr(given, name), wrong)
        for name, (default, _) in _SPEEDS.items()
    }
    dropouts = {
        name: _DROPOUT if getattr(given, name) is None else number(flag(name), getattr(given, name), wrong, least=0)
        for name in _DROPOUTS
    }
    wrong += [
        f"{flag(name)} is a share below 1, not {share:g}" for name, share in dropouts.items() if (share or 0) >= 1
    ]
    if wrong or request.device_bytes is None:
        return None
    sizes = model_sizes(given, read, wrong)
    shape = Shape(
        **sizes._asdict(),
        seq_length=numbers["seq_length"],
        micro_batch_size=numbers["micro_batch_size"],
        normalization=given.normalization or "LayerNorm",
        rope=given.position_embedding_type == "rope",
        flash=given.attention_backend != "unfused",
        **{name: bool(share) for name, share in dropouts.items()},
        context=numbers.get("context_parallel_size", 1),
        fused=not (given.no_bias_swiglu_fusion if given.swiglu else given.no_bias_gelu_fusion),
    )
    split = _split(given, shape, numbers, wrong)
    if not shape.flash and shape.num_query_groups < shape.num_attention_heads:
        wrong.append("--attention-backend unfused copies keys and values for each head; --num-query-groups needs flash")
    if shape.context > 1 and not shape.flash:
        wrong.append("--attention-backend unfused is not split over --context-parallel-size ranks: that needs flash")
    if shape.seq_length % (2 * shape.context) and shape.context > 1:
        twice = f"twice --context-parallel-size {shape.context}"
        wrong.append(f"--seq-length {shape.seq_length} is no multiple of {twice}: each rank takes two pieces")
    wrong += sizes.indivisible(split.tensor, {"--seq-length": shape.seq_length} if given.sequence_parallel else {})
    reached_speeds = {name: speed for name, speed in speeds.items() if speed is not None}
    machine = Machine(memory_bytes=request.device_bytes, host_bytes=request.host_bytes, **reached_speeds)
    return shape, split, machine


def _split(given: argparse.Namespace, shape: Shape, numbers: Mapping[str, int], wrong: list[str]) -> Degrees:
    tensor, pipeline = numbers.get("tensor_model_parallel_size", 1), numbers.get("pipeline_model_parallel_size", 1)
    data, per_part = numbers.get("data_parallel_size", 1), numbers.get("num_layers_per_virtual_pipeline_stage")
    virtual, micro_batches = 1, 1
    if per_part is not None and (shape.num_layers % (pipeline * per_part) or pipeline == 1):
        wrong.append(
            f"--num-layers-per-virtual-pipeline-stage {per_part} needs --pipeline-model-parallel-size above 1 and "
            f"layers that are a multiple of both: {shape.num_layers} layers, {pipeline} stages"
        )
    elif per_part is not None:
        virtual = shape.num_layers // pipeline // per_part
    elif shape.num_layers % pipeline:
        wrong.append(f"--num-layers {shape.num_layers} is no multiple of --pipeline-model-parallel-size {pipeline}")
    batch, each = numbers["global_batch_size"], shape.micro_batch_size * data
    if batch % each:
        wrong.append(
            f"--global-batch-size {batch} is no multiple of --micro-batch-size times data-parallel ranks, {each}"
        )
    else:
        micro_batches = batch // each
        wrong += schedule_problems(pipeline, virtual, micro_batches)
    return Degrees(
        tensor=tensor,
        pipeline=pipeline,
        virtual=virtual,
        data=data,
        context=shape.context,
        micro_batches=micro_batches,
        sequence_parallel=given.sequence_parallel and tensor > 1,
        distributed_optimizer=given.use_distributed_optimizer,
    )


def _files(given: argparse.Namespace, wrong: list[str]) -> None:
    check_file("--output", given.output, wrong)
    without_yaml = requirements.absent("PyYAML")
    if given.output is not None and without_yaml is not None:
        wrong.append(f"--output: {without_yaml}")
    check_file("--write-trace", given.write_trace, wrong)
    check_picture("--picture", given.picture, wrong)
