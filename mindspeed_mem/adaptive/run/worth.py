"""What each decision of a plan is worth: the memory that it saves, the work it makes, and the time that costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mindspeed_mem.adaptive.problem.definition import GB, GIB, Group, Problem
from mindspeed_mem.adaptive.search.decisions import KEEP, RECOMPUTE, SWAP, Plan, under
from mindspeed_mem.adaptive.search.infeasible import InfeasibleError
from mindspeed_mem.adaptive.search.plan_table import aligned
from mindspeed_mem.adaptive.search.search import Found, Search
from mindspeed_mem.adaptive.search.simulation import simulate

_VERBS = {RECOMPUTE: "recompute", SWAP: "swap"}
_HEAD = ("decision", "layers", "saves MiB", "work ms", "step ms", "ms for 1 GiB")


def lines(found: Found) -> list[str]:
    """A row for each operator that is recomputed or swapped, those that save cheaply first.

    What it saves and the work (computing again, or copying out and back) are those of a step on the stage where it
    saves most. What it costs is what a step would be shorter if these were kept and memory were no matter.
    """
    problem, rows = found.problem, []
    for letter, verb in _VERBS.items():
        for name in dict.fromkeys(group.name for _, _, group, text in _each(problem, found.plan) if text == letter):
            layers, saved, work = 0, [0.0] * len(problem.stages), [0.0] * len(problem.stages)
            for stage, part, group, text in _each(problem, found.plan):
                if (group.name, text) == (name, letter):
                    layers += 1
                    held = max(combination[part] for combination in problem.in_flight[stage])
                    saved[stage] += held * (group.bytes - (group.recompute_keeps if letter == RECOMPUTE else 0))
                    work[stage] += problem.pipeline.micro_batches * _seconds(problem, group, letter)
            costs = found.simulated.seconds - simulate(problem, _kept(problem, found.plan, name, letter)).seconds
            most = max(range(len(saved)), key=saved.__getitem__)
            each = costs / max(saved[most] / GIB, 1e-9)
            rows.append((each, (f"{verb} {name}", layers, saved[most], work[most], costs, each)))
    if found.plan.output_gradients:
        rows.append(_of_gradients(found))
    shown = [
        (name, str(layers), f"{saved / 2**20:.1f}", *(f"{1e3 * one:.1f}" for one in seconds))
        for _, (name, layers, saved, *seconds) in sorted(rows, key=lambda row: row[0])
    ]
    return [
        "",
        *aligned([_HEAD, *shown]),
        "(on the stage where it saves most; step ms: what keeping it would gain)",
    ] * bool(rows)


def _of_gradients(found: Found) -> tuple[float, tuple[str, int, float, float, float, float]]:
    """The row of output gradients that wait for gradients of weights on the host."""
    problem = under(found.problem, found.plan)
    parts, rows = range(problem.virtual_stages), []
    for stage in range(len(problem.stages)):
        nbytes = [problem.gradients_on_host(stage, part) for part in parts]
        saved = max(sum(n * nbytes[part] for part, n in enumerate(waits)) for _, waits in problem.held[stage])
        rows.append((saved, problem.pipeline.micro_batches * _copied(problem, sum(nbytes))))
    saved, work = max(rows)
    kept = replace(found.plan, output_gradients=False)
    costs = found.simulated.seconds - simulate(found.problem, kept).seconds
    each = costs / max(saved / GIB, 1e-9)
    return each, (f"{_VERBS[SWAP]} output gradients", problem.num_layers, saved, work, costs, each)


def next_gib(search: Search, found: Found) -> list[str]:
    """What the best plan takes with a GiB more and with one less."""
    text = []
    for more, words in ((GIB, "with 1 GiB more"), (-GIB, "with 1 GiB less")):
        try:
            other = search.best(found.problem.device_limit + more)
        except InfeasibleError:
            text.append(f"{words} no plan fits")
            continue
        change = 1e3 * (other.simulated.seconds - found.simulated.seconds)
        text.append(f"{words} a step takes {other.simulated.seconds:.4g} s ({change:+.1f} ms)")
    return text


def _each(problem: Problem, plan: Plan) -> Iterator[tuple[int, int, Group, str]]:
    """Every decision: stage, part, group and letter."""
    for number, (stage, decided) in enumerate(zip(problem.stages, plan.stages, strict=True)):
        for place, (part, texts) in enumerate(zip(stage.parts, decided.parts, strict=True)):
            for name, text in zip(part.layers, texts, strict=True):
                for group, letter in zip(problem.class_of[name].groups, text, strict=True):
                    yield number, place, group, letter


def _seconds(problem: Problem, group: Group, letter: str) -> float:
    if letter == RECOMPUTE:
        return group.again_seconds(problem.host)
    return _copied(problem, group.bytes) + group.moved_seconds(problem.host)


def _copied(problem: Problem, nbytes: int) -> float:
    """Seconds of copies out and back."""
    return nbytes / GB * (1 / problem.link.out + 1 / problem.link.back)


def _kept(problem: Problem, plan: Plan, name: str, letter: str) -> Plan:
    """The plan where this group is kept instead."""
    stages = []
    for stage, decided in zip(problem.stages, plan.stages, strict=True):
        parts = []
        for part, texts in zip(stage.parts, decided.parts, strict=True):
            places = {kind: problem.class_of[kind].group_index.get(name) for kind in set(part.layers)}
            parts.append(
                tuple(_with(text, places[kind], letter) for kind, text in zip(part.layers, texts, strict=True))
            )
        stages.append(replace(decided, parts=tuple(parts)))
    return replace(plan, stages=tuple(stages))


def _with(text: str, place: int | None, letter: str) -> str:
    return text if place is None or text[place] != letter else text[:place] + KEEP + text[place + 1 :]
