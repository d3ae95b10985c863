"""``python -m mindspeed_mem layout``: how to split a model over devices, each split with its best memory plan."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_mem import output, requirements
from mindspeed_mem.adaptive.layout import accounting
from mindspeed_mem.adaptive.layout.cluster import LATENCY, Cluster
from mindspeed_mem.adaptive.layout.enumeration import NAMES, Layout, Model, layouts
from mindspeed_mem.adaptive.layout.measured import Measured, OtherModelError
from mindspeed_mem.adaptive.layout.search import ALLOWED, CHUNKS, RECOMPUTE, LayoutSearch, Outcome, Planned
from mindspeed_mem.adaptive.problem import from_shape, profile_file
from mindspeed_mem.adaptive.problem.definition import GIB, SCHEDULES
from mindspeed_mem.adaptive.problem.profile_file import Profile, ProfileError
from mindspeed_mem.adaptive.run import worth
from mindspeed_mem.adaptive.search.plan_table import aligned, gib
from mindspeed_mem.command_line import check_apart, check_file, digits, flag, instead_of, number, quoted, whole
from mindspeed_mem.tools import layout_flags, plan_options

DESCRIPTION = """Finds how a model is best split over a number of devices, with the memory plan of each split: tensor
(with sequence), context, expert and pipeline parallelism, virtual stages, micro-batches, the distributed optimizer,
chunks and where they rest. Nothing is run; neither Megatron nor a device is needed:

    python -m mindspeed_mem layout --model llama3-70b --seq-length 8192 --global-batch-size 128 \\
        --devices 64 --device-name h100 --output run.sh

Options of the model have Megatron's names and defaults; those of its layout (--tensor-model-parallel-size, ...) are
found, or fixed by --fix tp=4,pp=8. The exit status is 1 if nothing fits.
"""
TABLE = "--device-table"
SPEEDS = plan_options.SPEEDS | {
    "inter_node_gbps": (20.0, "GB/s to other nodes, for each device"),
}
_NO_CHUNKS = ("fp8_param_gather", "use_precision_aware_optimizer")
"""Options of Megatron beside which chunks are refused."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    model = command.add_argument_group(
        "the model (Megatron's options, defaults in parentheses; those of its layout are searched)"
    )
    machine = command.add_argument_group("the devices")
    machine.add_argument("--devices", dest="device_count", metavar="N", help="number of devices")
    machine.add_argument("--devices-per-node", metavar="N", help="devices in each node (8)")
    plan_options.add_arguments(model, machine, TABLE, SPEEDS)
    plan_options.add_limits(machine, " (default with --trace: the limit the profile was made under)")
    machine.add_argument(
        "--latency-us",
        metavar="X",
        help=f"latency of each message between devices, in microseconds ({1e6 * LATENCY:g})",
    )
    search = command.add_argument_group("the search")
    what = f"sizes to keep fixed, such as tp=4,pp=8; known are {', '.join(NAMES)}"
    search.add_argument("--fix", metavar="SIZES", default="", help=what)
    what = f"orders of passes that pipelines may have ({','.join(SCHEDULES)}; of TransformerEngine's layers: 1f1b)"
    search.add_argument("--pipeline-schedules", metavar="LIST", help=what)
    what = f"what a plan may do ({','.join(ALLOWED)}); none: keep everything"
    search.add_argument("--allow", metavar="WHAT", default=",".join(ALLOWED), help=what)
    search.add_argument("--top", metavar="N", default="10", help="layouts to show (10)")
    what = "stop looking at further layouts after this time (300), and say what may have been missed"
    search.add_argument("--seconds", metavar="N", default="300", help=what)
    files = command.add_argument_group("files")
    what = "a profile of this model, measured under any layout: seconds and bytes of all others are scaled from it"
    files.add_argument("--trace", dest="profile", metavar="FILE", help=what)
    files.add_argument("--output", metavar="FILE", help="write a script that trains with the best layout")
    what = "write its memory plan: a YAML file for --memory-config (beside --output: the same name with .yaml)"
    files.add_argument("--memory-output", metavar="FILE", help=what)


def main(given: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    wrong: list[str] = []
    request = _read(given, wrong)
    if wrong or request is None:
        print("mindspeed_mem layout:", *(f"  {reason}" for reason in wrong), sep="\n", file=sys.stderr)
        return 2
    model, cluster = request.model, request.cluster
    for line in _head(request):
        print(line)
    refused: Counter[str] = Counter()
    every = list(layouts(model, cluster, request.fixed, CHUNKS in request.allowed, refused, request.schedules))
    estimate = from_shape.problem if request.measured is None else request.measured.problem
    search = LayoutSearch(
        model, cluster, allowed=request.allowed, reserve_bytes=request.reserve_bytes, estimate=estimate
    )
    outcome = search.run(every, seconds=request.seconds, enough=request.top)
    for line in _counted(every, refused, outcome):
        print(line)
    if not outcome.planned:
        print("mindspeed_mem layout:", *_shortage(request, search, outcome, every), sep="\n  ", file=sys.stderr)
        return 1
    for line in (*_table(request, search, outcome), *_said(request, outcome), *worth.lines(outcome.planned[0].found)):
        print(line)
    _write(given, request, outcome.planned[0])
    return 0


# ---- what is shown


def _head(request: Request) -> list[str]:
    model, cluster = request.model, request.cluster
    machine = cluster.machine
    nodes = -(-cluster.devices // cluster.per_node)
    text = (
        f"{model.shape.num_layers} layers, {model.batch} sequences of {model.shape.seq_length} tokens a step, on "
        f"{cluster.devices} device{'s' * (cluster.devices > 1)} of {gib(machine.memory_bytes)} GiB"
        + (f" in {nodes} nodes" if nodes > 1 else "")
    )
    speeds = (
        f"Seconds are estimates: {machine.tflops:g} TFLOP/s, {machine.memory_gbps:g} GB/s device memory, "
        f"{machine.tensor_gbps:g} GB/s within a node, {cluster.inter_node_gbps:g} to others, {machine.link_gbps:g} to "
        "the host."
    )
    if request.measured is None:
        return [*request.assumed, text, speeds]
    return [*request.assumed, text, f"{speeds} Layers are scaled from the profile.", *request.measured.said()]


def _counted(every: Sequence[Layout], refused: Counter[str], outcome: Outcome) -> list[str]:
    """How many layouts there are, and why not more."""
    lines = ["", f"{len(every)} layout{'s' * (len(every) != 1)} that Megatron accepts"]
    if refused:
        lines.append("refused:")
        lines += [f"  {count} {reason}" for reason, count in refused.most_common()]
    if outcome.refused:
        lines.append(f"of these {sum(outcome.refused.values())} were found not to fit:")
        lines += [f"  {count} {reason}" for reason, count in outcome.refused.most_common()]
    return lines


def _table(request: Request, search: LayoutSearch, outcome: Outcome) -> list[str]:
    """The best layouts, and where their time goes."""
    model, cluster = request.model, request.cluster
    tokens, flops = model.batch * model.shape.seq_length, accounting.model_flops(model)
    head = ("layout", "step s", "tokens/s/device", "TFLOP/s", "peak GiB", "keep %", "swap %", "recompute %")
    rows: list[tuple[str, ...]] = [head]
    times: list[tuple[str, ...]] = [("seconds in", *accounting.Seconds._fields)]
    for place, one in enumerate(outcome.planned[: request.top], 1):
        simulated, shares = one.found.simulated, accounting.shares(one)
        each = tokens / one.seconds / cluster.devices
        rows.append(
            (
                f"{place} {words(one.layout, cluster.devices)}",
                f"{one.seconds:.4g}",
                f"{each:.0f}",
                f"{flops / one.seconds / cluster.devices / 1e12:.0f}",
                gib(max(simulated.peaks)),
                *(f"{100 * share:.0f}" for share in shares),
            )
        )
        spent = accounting.seconds(one, search)
        times.append((str(place), *(f"{value:.3g}" if value > 5e-4 else "0" for value in spent)))
    return ["", *aligned(rows), "", *aligned(times)]


def _said(request: Request, outcome: Outcome) -> list[str]:
    """How sure it is, and how to train."""
    model, cluster = request.model, request.cluster
    best = outcome.planned[0]
    planned = f"{len(outcome.planned)} of them fully planned"
    looked = f"{outcome.bounded} were given a lower bound, {outcome.refined} a closer one"
    if outcome.left >= best.seconds:
        text = f"no other layout is faster, by these figures: {looked}, {planned}"
    else:
        text = (
            f"--seconds {request.seconds:g} were over: {looked}, {planned}; one of the others may take "
            f"{outcome.left:.4g} s, {100 * outcome.gap:.1f} % less"
        )
    options = layout_flags.of_layout(best.layout, model, cluster.devices)
    plan = _plan_file(request, best)
    options += ["--memory-config", plan] if plan is not None else []
    start = f"torchrun --nproc-per-node {min(cluster.devices, cluster.per_node)} "
    if cluster.devices > cluster.per_node:
        start += f"--nnodes {-(-cluster.devices // cluster.per_node)} ... "
    start += "-m mindspeed_mem run pretrain_gpt.py" if layout_flags.needs_us(best.layout, plan) else "pretrain_gpt.py"
    return ["", text, "", f"{start} {shlex.join([*request.words, *options])}"]


def words(layout: Layout, devices: int) -> str:
    """A layout in the words of --fix, its schedule, and what it does with states."""
    sizes = {name: getattr(layout, field_name) for name, field_name in NAMES.items() if field_name != "data"}
    sizes["dp"] = layout.data(devices)
    usual = {"mbs": 0, "zero": 0, "first": 0, "last": 0}
    shown = [f"{name}={size}" for name, size in sizes.items() if size > usual.get(name, 1)]
    if layout.schedule != "1f1b":
        shown.append(layout.schedule)
    if layout.on_device < 1:
        shown.append(f"({layout_flags.placement(layout)})")
    return ",".join(shown).replace(",(", " (")


def _shortage(request: Request, search: LayoutSearch, outcome: Outcome, every: Sequence[Layout]) -> list[str]:
    """What would fit, and what to change."""
    if not every:
        return ["no layout: see what is refused, and --fix"]
    if outcome.left < math.inf:
        return [f"--seconds {request.seconds:g} were over before any layout was planned"]
    least, error = search.least(every, outcome)
    split = least.split(search.model, search.cluster.devices)
    lines = [f"no layout fits; {words(least, search.cluster.devices)} needs least:"]
    lines += [line.strip() for line in error.text(split.distributed_optimizer).splitlines()]
    kept = search.cluster.machine.memory_bytes - search.problem(least).device_limit
    return [
        *lines,
        f"a reserve of {gib(kept)} GiB is kept besides (--reserve-gib); or more devices, fewer sizes in --fix",
    ]


# ---- what is written


def _plan_file(request: Request, best: Planned) -> str | None:
    """The name of the file of its plan; None where everything is kept."""
    shares = accounting.shares(best)
    return request.plan_file if shares.swap or shares.recompute else None


def _write(given: argparse.Namespace, request: Request, best: Planned) -> None:
    model, cluster = request.model, request.cluster
    plan = _plan_file(request, best)
    peak = gib(max(best.found.simulated.peaks))
    name = words(best.layout, cluster.devices)
    remark = f"mindspeed_mem layout: {name}, {best.seconds:.4g} s a step, {peak} GiB at most, from estimates"
    if plan is not None and (given.output or given.memory_output):
        from mindspeed_mem.adaptive.search.plan_file import as_yaml, memory_config  # only this needs PyYAML

        config = memory_config(best.found.problem, best.found.plan)
        output.write(plan, as_yaml(config, [remark, *_head(request)]))
        print(f"written to {plan}: the plan of this layout")
    elif plan is not None:
        print(f"{plan} is not written yet: --memory-output {plan} does that, or --output run.sh for a script with it")
    elif plan is None and given.memory_output:
        print(f"everything is kept: nothing was written to {given.memory_output}, and --memory-config is not needed")
    if given.output:
        options = layout_flags.of_layout(best.layout, model, cluster.devices)
        options += ["--memory-config", plan] if plan is not None else []
        text = layout_flags.script(
            request.words,
            options,
            devices=cluster.devices,
            per_node=cluster.per_node,
            ours=layout_flags.needs_us(best.layout, plan),
            remarks=[remark, *_head(request), "Arguments are passed on: data, tokenizer, learning rate, iterations."],
        )
        output.write(given.output, text)
        if os.path.isfile(given.output):
            os.chmod(given.output, os.stat(given.output).st_mode | 0o111)
        print(f"written to {given.output}: run it on each node, where pretrain_gpt.py is")


# ---- what the options say


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for."""

    model: Model
    cluster: Cluster
    words: list[str]
    """The model in Megatron's options."""
    fixed: dict[str, int]
    allowed: tuple[str, ...]
    schedules: tuple[str, ...]
    reserve_bytes: int | None
    top: int
    seconds: float
    plan_file: str
    measured: Measured | None
    """What a profile has of it."""
    assumed: list[str]
    """What was assumed of the device, and left out of what was asked for."""


def _read(given: argparse.Namespace, wrong: list[str]) -> Request | None:
    """The request; None, and reasons in `wrong`, where it cannot be done."""
    searched = [name for name in layout_flags.SEARCHED if getattr(given, name) not in (None, False)]
    wrong += [f"{flag(name)} is searched; --fix takes {', '.join(NAMES)}" for name in searched]
    count = whole("--devices", given.device_count, wrong)
    if given.device_count is None:
        wrong.append("--devices: missing; say how many there are")
    per_node = whole("--devices-per-node", given.devices_per_node, wrong) or 8
    if count is not None and count > per_node and count % per_node:
        wrong.append(f"--devices {count} is no multiple of --devices-per-node {per_node}")
    profile = _profile(given, wrong)
    assumed = plan_options.by_name(given, wrong, TABLE, SPEEDS, alone=count == 1)
    for name in layout_flags.SEARCHED:  # of a command line's layout nothing is taken
        setattr(given, name, False if name in plan_options.SWITCHES else None)
    given.micro_batch_size = "1"
    given.transformer_impl = given.transformer_impl or "transformer_engine"
    limits = plan_options.limits(given, wrong)
    described = plan_options.described(given, limits.device, limits.host, wrong)
    default = SPEEDS["inter_node_gbps"][0]
    inter = number("--inter-node-gbps", given.inter_node_gbps, wrong) or default
    latency = number("--latency-us", given.latency_us, wrong, least=0)
    fixed, allowed = _fixed(given.fix, wrong), _allowed(given.allow, wrong)
    top, seconds = whole("--top", given.top, wrong) or 10, number("--seconds", given.seconds, wrong) or 300.0
    plan_file = _files(given, wrong)
    schedules = _schedules(given, wrong)
    wrong += [reason for reason in [requirements.without_solver()] if reason is not None]
    if wrong or described is None or count is None:
        return None
    vocab_size = int(given.vocab_size or 50257)
    model = Model(
        shape=described.shape, split=described.split, batch=int(given.global_batch_size), vocab_size=vocab_size
    )
    cluster = Cluster(
        machine=described.machine,
        devices=count,
        per_node=min(per_node, count),
        inter_node_gbps=inter,
        latency_seconds=LATENCY if latency is None else latency / 1e6,
    )
    bars, measured = _barred(given, model), None
    if profile is not None:
        try:
            measured = Measured(profile, model, cluster)
        except OtherModelError as error:
            wrong += [f"--trace {given.profile}: {reason}" for reason in error.problems]
            return None
    return Request(
        model=model,
        cluster=cluster,
        words=layout_flags.of_model(given, model),
        fixed=fixed,
        allowed=tuple(one for one in allowed if one not in bars),
        schedules=schedules,
        reserve_bytes=limits.reserve,
        top=top,
        seconds=seconds,
        plan_file=plan_file,
        measured=measured,
        assumed=[*filter(None, [assumed]), *(text for name, text in bars.items() if name in allowed)],
    )


def _profile(given: argparse.Namespace, wrong: list[str]) -> Profile | None:
    """The profile, with what it says of the device filled in."""
    if given.profile is None:
        return None
    instead_of("--trace", given, ("link_gbps",), wrong)
    try:
        profile = profile_file.read(given.profile)
    except ProfileError as error:
        wrong += [f"--trace {given.profile}: {reason}" for reason in error.problems]
        return None
    given.link_gbps = str(profile.problem.link.out)
    if given.device_memory_gib is None and given.device_name is None:
        given.device_memory_gib = str(profile.problem.device_limit / GIB)
        given.reserve_gib = given.reserve_gib or "0"  # that limit is what a plan may take
    return profile


def _barred(given: argparse.Namespace, model: Model) -> dict[str, str]:
    """What of `ALLOWED` the model's options bar, and what to say about it."""
    found = {}
    without = [flag(name) for name in _NO_CHUNKS if getattr(given, name)]
    if without:
        found[CHUNKS] = f"Without chunk ZeRO: it is refused beside {', '.join(without)}."
    if model.shape.fp8:
        found[RECOMPUTE] = "Without recompute: it is refused beside --fp8-format."
    return found


def _schedules(given: argparse.Namespace, wrong: list[str]) -> tuple[str, ...]:
    """The orders of passes that are tried; without a word all that the model's layers have."""
    bars = {}
    if given.transformer_impl == "transformer_engine":
        why = "what TransformerEngine's layers hold for it is not counted: --transformer-impl local"
        bars = {"zb": why, "v": why}
    if given.mtp_num_layers is not None:
        bars.setdefault("v", "it is refused beside --mtp-num-layers")
    if given.pipeline_schedules is None:
        return tuple(name for name in SCHEDULES if name not in bars)
    asked = given.pipeline_schedules.split(",")
    for name in asked:
        if name not in SCHEDULES:
            wrong.append(f"--pipeline-schedules takes {', '.join(SCHEDULES)}, with commas between, not {name!r}")
        elif name in bars:
            wrong.append(f"--pipeline-schedules {name}: {bars[name]}")
    return tuple(asked)


def _fixed(text: str, wrong: list[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in filter(None, text.split(",")):
        name, _, value = entry.partition("=")
        size, least = digits(value), 0 if name == "zero" else 1
        if name not in NAMES or size is None or size < least or (name == "zero" and size > 3):
            wrong.append(f"--fix takes sizes such as tp=4, of {', '.join(NAMES)} (zero: 0 to 3), not {quoted(entry)}")
        elif NAMES[name] in found:
            wrong.append(f"--fix says {name} twice, {found[NAMES[name]]} and {size}: give one")
        else:
            found[NAMES[name]] = size
    return found


def _allowed(text: str, wrong: list[str]) -> tuple[str, ...]:
    asked = [] if text == "none" else text.split(",")
    unknown = [one for one in asked if one not in ALLOWED]
    if unknown:
        wrong.append(f"--allow takes {', '.join(ALLOWED)}, or none, not {', '.join(map(repr, unknown))}")
    return tuple(one for one in ALLOWED if one in asked)


def _files(given: argparse.Namespace, wrong: list[str]) -> str:
    """The name of the plan's file."""
    check_file("--output", given.output, wrong)
    check_file("--memory-output", given.memory_output, wrong)
    without_yaml = requirements.absent("PyYAML")
    if without_yaml is not None and (given.output is not None or given.memory_output is not None):
        wrong.append(f"--output and --memory-output: {without_yaml}")
    inputs = {"--trace": given.profile, **plan_options.inputs(given, TABLE)}
    if given.memory_output is not None or given.output is None:
        check_apart({"--output": given.output, "--memory-output": given.memory_output}, inputs, wrong)
        return given.memory_output or "plan.yaml"
    target = Path(given.output)
    if not target.name:  # a folder, which has been said
        return "plan.yaml"
    beside = target.with_suffix(".plan.yaml" if target.suffix == ".yaml" else ".yaml")
    check_apart({"--output": given.output, f"the plan beside --output ({beside})": str(beside)}, inputs, wrong)
    return str(beside)
