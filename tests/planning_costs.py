"""What a stage's counts cost, in closed form: by these the tests judge what the integer program finds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mindspeed_mem.adaptive.problem.definition import GB, Block, Problem
from mindspeed_mem.adaptive.search.decisions import Count, Counts, key
from mindspeed_mem.adaptive.search.milp import Rules, most_swapped


def is_allowed(problem: Problem, counts: Counts, stage: int, rules: Rules) -> bool:
    """Whether a stage's counts keep the rules, whatever they cost."""
    return all(
        0 <= value <= most
        for block in problem.blocks
        if block.stage == stage
        for value, most in _bounds(problem, block, counts[key(block)], rules)
    )


def _bounds(problem: Problem, block: Block, counts: Sequence[Count], rules: Rules) -> Iterator[tuple[int, int]]:
    kind = block.kind
    for group, count in zip(kind.groups, counts, strict=True):
        layers = len(block.movable(group))
        yield count.swap, most_swapped(problem, block, group.name, rules)
        yield count.recompute, layers if group.recompute_seconds is not None and rules.recompute else 0
        yield count.swap + count.recompute, layers
        for name in group.needs if count.recompute else ():
            other = counts[kind.group_index[name]]
            movable = len(block.movable(kind.groups[kind.group_index[name]]))
            if rules.inputs_move:  # kept here no longer than there
                yield movable - other.swap - other.recompute, layers - count.swap - count.recompute
            else:
                yield count.recompute + other.swap + bool(other.swap and movable < layers), layers


def stage_gb(problem: Problem, counts: Counts, stage: int, rules: Rules) -> float:
    """The most that a stage holds."""
    of_stage = problem.stages[stage]
    parts = [one.before.bytes + one.after.bytes for one in of_stage.parts]
    transient = 0.0
    for block in problem.blocks:
        if block.stage == stage:
            rows = list(zip(block.kind.groups, counts[key(block)], strict=True))
            parts[block.part] += sum(g.bytes * (len(block.movable(g)) - c.swap - c.recompute) for g, c in rows)
            parts[block.part] += sum(g.recompute_keeps * c.recompute for g, c in rows)
            shares = [(g.bytes / max(1, len(block.movable(g))), c) for g, c in rows]
            transient = max(transient, sum(a * ((1 + rules.ahead) * c.swap + c.recompute) for a, c in shares))
    held = max(sum(n * size for n, size in zip(held, parts, strict=True)) for held in problem.in_flight[stage])
    return (of_stage.static_bytes + of_stage.temporary_bytes + held + transient) / GB


def host_gb(problem: Problem, counts: Counts, stage: int) -> float:
    """The most that a stage has on the host."""
    parts = [0] * problem.virtual_stages
    for block in problem.blocks:
        if block.stage == stage:
            rows = zip(block.kind.groups, counts[key(block)], strict=True)
            parts[block.part] += sum(group.bytes * count.swap for group, count in rows)
    return max(sum(n * size for n, size in zip(held, parts, strict=True)) for held in problem.in_flight[stage]) / GB


def cycle_seconds(problem: Problem, counts: Counts, stage: int) -> float:
    """Forward and backward of one micro-batch through all parts of a stage, waits included."""
    total = 0.0
    for number, part in enumerate(problem.stages[stage].parts):
        forward = part.before.forward_seconds + part.after.forward_seconds
        backward = part.before.backward_seconds + part.after.backward_seconds
        moved = 0.0
        for block in problem.blocks:
            if (block.stage, block.part) != (stage, number):
                continue
            forward += block.kind.forward_seconds * len(block.layers)
            backward += block.kind.backward_seconds * len(block.layers)
            for group, count in zip(block.kind.groups, counts[key(block)], strict=True):
                reruns = len(group.recompute_operators or group.operators)
                backward += count.recompute * (group.recompute_seconds or 0.0)
                backward += count.recompute * reruns * problem.host.rerun_seconds
                moved += count.swap * group.bytes / GB
                forward += count.swap * group.tensors * problem.host.moved_seconds / 2
                backward += count.swap * group.tensors * problem.host.moved_seconds / 2
        out, back = moved / problem.link.out, moved / problem.link.back
        total += forward + out + backward + back if problem.link.blocking else max(forward, out) + max(backward, back)
    return total
