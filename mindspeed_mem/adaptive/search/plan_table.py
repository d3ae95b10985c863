"""What the planner found, as text: the policies beside each other, the stages, and the plan as a grid: a row for each
operator group, a column for each layer, a letter for what is done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mindspeed_mem.adaptive.problem.definition import GIB, Problem
from mindspeed_mem.adaptive.problem.profile_file import Profile
from mindspeed_mem.adaptive.search.decisions import Plan, host_bytes, under
from mindspeed_mem.adaptive.search.milp import NODES
from mindspeed_mem.adaptive.search.search import Found
from mindspeed_mem.adaptive.search.simulation import Simulated, simulate
from mindspeed_mem.reserve import Reserve

_ESTIMATED = (
    "Seconds, and so the choice of the best plan, are estimates from FLOPs and bytes moved: {tflops:g} TFLOP/s, "
    "{memory_gbps:g} GB/s device memory, {link_gbps:g} GB/s to the host, {tensor_gbps:g} GB/s between tensor-parallel "
    "ranks.",
    "Bytes of activations are counted for Megatron's and TransformerEngine's layers (in fp8 they are assumed). Static "
    "memory and temporaries are estimates.",
    "The host is assumed to keep up with the device: the host time that swap and recompute take is not counted.",
)

LEGEND = "K keep, S swap, R recompute, - given from outside, . no such group"
_ABSENT = "."
_SLOWER, _COSTS = 0.7, 0.05
"""What a plan is tried with besides: the link's speed, as a share of what was said, and the share of copies' time that
computation takes longer."""


def gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f}"


def subject(profile: Profile, reserve: Reserve | None = None) -> str:
    """What was planned for."""
    problem = profile.problem
    stages, line = len(problem.stages), problem.pipeline
    words = [f"{problem.num_layers} layers", f"{stages} pipeline stage{'s' * (stages > 1)}"]
    if problem.virtual_stages > 1:
        words.append(f"{problem.virtual_stages} virtual stages")
    words.append(f"{line.micro_batches} micro-batch{'es' * (line.micro_batches > 1)}")
    limits = f"limit {gib(problem.device_limit)} GiB"
    if reserve is not None and reserve.bytes:
        limits += f" ({gib(problem.device_limit + reserve.bytes)} less a reserve of {gib(reserve.bytes)})"
    limits += f", host {gib(problem.host_limit)} GiB" if problem.host_limit is not None else ""
    return f"{', '.join(words)}; {limits} on each rank"


def head(profile: Profile, reserve: Reserve | None = None) -> list[str]:
    """What was assumed, what was planned for, and how far the figures can be trusted."""
    first, problem = subject(profile, reserve), profile.problem
    if profile.origin == "estimated":
        assumed = [str(profile.machine["assumed"])] if "assumed" in profile.machine else []
        return [*assumed, first, *(text.format(**profile.machine) for text in _ESTIMATED)]
    facts = ", ".join(f"{name} {value}" for name, value in profile.machine.items())
    blocking = ["Computation stands still while anything is copied to or from the host."] * problem.link.blocking
    return [
        first,
        f"Times, bytes and link speeds were measured ({facts or 'machine unknown'}); the plan is a prediction.",
        *blocking,
        *engine_time(problem),
    ]


def engine_time(problem: Problem) -> list[str]:
    """What is counted of the engine's own time."""
    moved, rerun = 1e6 * problem.host.moved_seconds, 1e6 * problem.host.rerun_seconds
    if not (moved or rerun):
        return []
    return [
        f"The engine's own time is counted: {moved:.0f} us for each tensor that is swapped, {rerun:.0f} us for each "
        "operator that runs again, as fast as this host was when it was profiled."
    ]


def lines(
    profile: Profile, reserve: Reserve | None, kept: Simulated, full: Simulated, found: Found | None, width: int
) -> list[str]:
    """The whole text."""
    problem = profile.problem
    rows = [("policy", "step s", "throughput", "peak GiB", "fits")]
    policies = [("keep all", kept), ("Megatron's full recompute", full)]
    if found is not None:
        policies += [*found.rivals.items(), ("this plan", found.simulated)]
        policies += [(f"this plan, {name}", one) for name, one in otherwise(found)]
    for name, one in policies:
        fits = "yes" if max(one.peaks) <= problem.device_limit else "no"
        gain = f"{100 * (full.seconds / one.seconds - 1):+.1f} %"
        rows.append((name, f"{one.seconds:.4g}", gain, gib(max(one.peaks)), fits))
    text = [
        *head(profile, reserve),
        *_kept_back(reserve),
        "",
        *aligned(rows),
        "(throughput is relative to full recompute; all figures are predictions)",
    ]
    if found is None:
        return text
    return [
        *text,
        "",
        *aligned(_stages(problem, kept, full, found)),
        "",
        *grid(problem, found.plan, width),
        *_remarks(problem, reserve, found),
    ]


def otherwise(found: Found) -> Iterator[tuple[str, Simulated]]:
    """What a plan that swaps is worth on a machine that copies worse than was thought."""
    problem, link = found.problem, found.problem.link
    moving = under(problem, found.plan)
    if not any(host_bytes(moving, number, stage) for number, stage in enumerate(found.plan.stages)):
        return
    yield f"link at {100 * _SLOWER:.0f} %", simulate(replace(problem, link=link.scaled(_SLOWER)), found.plan)
    if not link.blocking:  # then all of each copy is computation's time anyway
        costly = replace(link, slows=link.slows + _COSTS)
        yield f"copies cost {100 * _COSTS:.0f} %", simulate(replace(problem, link=costly), found.plan)


def _stages(problem: Problem, kept: Simulated, full: Simulated, found: Found) -> list[tuple[str, ...]]:
    virtual = problem.virtual_stages > 1
    each = ("of each part",) * virtual  # the most of each: several combinations may be the largest together
    waits = ("wait for W",) * problem.pipeline.apart  # passes between backward and gradients of weights
    figures = ("static", "keep all", "full", "this plan", "on host", "waits s", "prefetch")
    rows: list[tuple[str, ...]] = [("stage", "in flight", *each, *waits, *figures)]
    moving = under(problem, found.plan)
    for number, (stage, plan) in enumerate(zip(problem.stages, found.plan.stages, strict=True)):
        held = problem.in_flight[number]
        rows.append(
            (
                str(number),
                str(max(map(sum, held))),
                *("+".join(str(max(of_part)) for of_part in zip(*held, strict=True)) for _ in each),
                *(str(max(sum(waiting) for _, waiting in problem.held[number])) for _ in waits),
                gib(stage.static_bytes),
                gib(kept.peaks[number]),
                gib(full.peaks[number]),
                gib(found.simulated.peaks[number]),
                gib(host_bytes(moving, number, plan)),
                f"{found.simulated.stalls[number]:.3g}",
                str(plan.distance),
            )
        )
    return rows


def _kept_back(reserve: Reserve | None) -> list[str]:
    """What the reserve is for."""
    if reserve is None or not reserve.bytes - reserve.asked:
        return []
    parts = ("contexts", "communicators", "fragmentation")
    each = ", ".join(f"{name} {gib(getattr(reserve, name))}" for name in parts)
    return [f"The reserve covers what is not counted: {each} GiB (--reserve-gib sets another, 0 for none)."]


def _remarks(problem: Problem, reserve: Reserve | None, found: Found) -> list[str]:
    left = problem.device_limit - max(found.simulated.peaks)
    beside = " beside the reserve" if reserve is not None and reserve.bytes else ""
    text = ["solved by HiGHS; sizes in GiB"]
    if found.gap:
        text[0] += f"; a solve ended at {NODES} nodes, {100 * found.gap:.2g} % from the best there may be"
    text.append(f"at its fullest, the plan leaves {gib(left)} GiB{beside}")
    text += [
        f"faster than this plan is {name} (--recompute-granularity full --recompute-method block)"
        for name, one in found.rivals.items()
        if one.seconds < found.simulated.seconds
    ]
    if found.plan.inputs_move:
        text.append("what recomputed operators start from leaves the device, too (swap_recompute_inputs)")
    if found.plan.idle_prefetch:
        text.append("copies back also start where a pass has ended (idle_prefetch)")
    if found.plan.output_gradients:
        text.append(
            "output gradients leave the device until gradients of weights are computed (output_gradients); less waits "
            "with a lower --max-inflight-microbatches, or with 1f1b"
        )
    return text


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns of equal width; the first to the left, numbers to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    numbers = "".join(f"  {{:>{width}}}" for width in widths[1:])
    return [(f"{{:<{widths[0]}}}" + numbers).format(*row) for row in rows]


def grid(problem: Problem, plan: Plan, width: int = 100) -> list[str]:
    """The lines of the picture. A bar stands between pipeline stages (or their parts); what is wider than `width`
    continues below."""
    columns: list[tuple[int, dict[str, str], bool]] = []
    groups: dict[str, None] = {}
    parts = sorted(
        (part.first_layer, part.layers, letters)
        for stage, of_stage in zip(problem.stages, plan.stages, strict=True)
        for part, letters in zip(stage.parts, of_stage.parts, strict=True)
    )
    for first, names, letters in parts:
        for place, (name, text) in enumerate(zip(names, letters, strict=True)):
            row = {group.name: letter for group, letter in zip(problem.class_of[name].groups, text, strict=True)}
            groups |= dict.fromkeys(row)
            columns.append((first + place, row, place == 0 and first > 0))
    head = max(len(name) for name in ("layer", *groups)) + 1
    lines = []
    for bank in _banks(columns, max(10, width - head)):
        digits = len(str(bank[-1][0]))
        for digit in range(digits):
            numbers = (("|" if bar else "") + str(layer).rjust(digits)[digit] for layer, _, bar in bank)
            lines.append(("layer" if digit == 0 else "").ljust(head) + "".join(numbers))
        for name in groups:
            cells = (("|" if bar else "") + row.get(name, _ABSENT) for _, row, bar in bank)
            lines.append(name.ljust(head) + "".join(cells))
        lines.append("")
    return [*lines, LEGEND]


def _banks(columns: list, width: int) -> list[list]:
    banks: list[list] = [[]]
    used = 0
    for column in columns:
        size = 2 if column[2] else 1
        if banks[-1] and used + size > width:
            banks.append([])
            used = 0
        banks[-1].append(column)
        used += size
    return banks
