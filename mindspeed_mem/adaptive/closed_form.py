"""What counts cost, in closed form: what the program minimises, and what a greedy search and the tests go by.

For a stage p with w micro-batches in flight, groups i of a bytes each, n layers of which s swap and r recompute:

    memory   static + temporary + w (outside + sum a (n - s - r) + keeps r) + sum a (s + r) / n + ahead sum a s / n
    forward  F + wait,  wait >= sum a s / out - F      (a forward ends when its copies out have)
    backward B + sum r again + wait,  wait >= sum a s / back - B - sum r again
             (over a link that blocks both waits are all of the copies, without - F or - B - sum r again)
    step     (M - 1/V) max C + sum C / V,  C = forward + backward      (1F1B; V virtual stages)

The last terms of memory stand for the layer at work and the copies under way. Simulation is the judge: these figures
leave out when in a pass the link is busy, and what is under way when the most is held. GB and seconds throughout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mindspeed_mem.adaptive.layout import Count, Counts, key
from mindspeed_mem.adaptive.problem import GB, Block, Problem, blocks


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a plan may look like, beyond the limits."""

    inputs_move: bool = False
    """See `Plan.inputs_move`."""
    guard: int = 1
    """Layers at the end of a chunk that swap nothing where each backward follows its forward at once."""
    ahead: float = 2.0
    """What a swapped group holds besides, in layers: on the way out and back."""
    swap: bool = True
    recompute: bool = True


def is_allowed(problem: Problem, counts: Counts, stage: int, rules: Rules) -> bool:
    """Whether a stage's counts keep the rules, whatever they cost."""
    return all(
        0 <= value <= most
        for block in blocks(problem)
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


def most_swapped(problem: Problem, block: Block, name: str, rules: Rules) -> int:
    """In how many layers of the block this group may be swapped at most."""
    group = block.kind.groups[block.kind.group_index[name]]
    if not (rules.swap and group.swappable):
        return 0
    movable = block.movable(group)
    chunk = problem.stages[block.stage].chunks[block.chunk]
    end = len(chunk.layers) - (rules.guard if at_once(problem, block.stage, block.chunk) else 0)
    return sum(layer < end for layer in movable)


def at_once(problem: Problem, stage: int, chunk: int) -> bool:
    """Whether a backward of this chunk follows its forward with nothing in between."""
    passes = problem.passes[stage]
    return any(a[1:] == b[1:] and a[2] == chunk for a, b in zip(passes, passes[1:], strict=False))


def stage_gb(problem: Problem, counts: Counts, stage: int, rules: Rules) -> float:
    """The most that a stage holds."""
    of_stage = problem.stages[stage]
    chunks = [one.before.bytes + one.after.bytes for one in of_stage.chunks]
    transient = 0.0
    for block in blocks(problem):
        if block.stage == stage:
            rows = list(zip(block.kind.groups, counts[key(block)], strict=True))
            chunks[block.chunk] += sum(g.bytes * (len(block.movable(g)) - c.swap - c.recompute) for g, c in rows)
            chunks[block.chunk] += sum(g.recompute_keeps * c.recompute for g, c in rows)
            shares = [(g.bytes / max(1, len(block.movable(g))), c) for g, c in rows]
            transient = max(transient, sum(a * ((1 + rules.ahead) * c.swap + c.recompute) for a, c in shares))
    held = max(sum(n * size for n, size in zip(held, chunks, strict=True)) for held in problem.in_flight[stage])
    return (of_stage.static_bytes + of_stage.temporary_bytes + held + transient) / GB


def host_gb(problem: Problem, counts: Counts, stage: int) -> float:
    """The most that a stage has on the host."""
    chunks = [0] * problem.virtual_stages
    for block in blocks(problem):
        if block.stage == stage:
            rows = zip(block.kind.groups, counts[key(block)], strict=True)
            chunks[block.chunk] += sum(group.bytes * count.swap for group, count in rows)
    return max(sum(n * size for n, size in zip(held, chunks, strict=True)) for held in problem.in_flight[stage]) / GB


def cycle_seconds(problem: Problem, counts: Counts, stage: int) -> float:
    """Forward and backward of one micro-batch through all chunks of a stage, waits included."""
    total = 0.0
    for number, chunk in enumerate(problem.stages[stage].chunks):
        forward = chunk.before.forward_seconds + chunk.after.forward_seconds
        backward = chunk.before.backward_seconds + chunk.after.backward_seconds
        moved = 0.0
        for block in blocks(problem):
            if (block.stage, block.chunk) != (stage, number):
                continue
            forward += block.kind.forward_seconds * len(block.layers)
            backward += block.kind.backward_seconds * len(block.layers)
            for group, count in zip(block.kind.groups, counts[key(block)], strict=True):
                backward += count.recompute * (group.recompute_seconds or 0.0)
                moved += count.swap * group.bytes / GB
        out, back = moved / problem.link.out, moved / problem.link.back
        total += forward + out + backward + back if problem.link.blocking else max(forward, out) + max(backward, back)
    return total


def step_seconds(problem: Problem, cycles: Sequence[float]) -> float:
    """A whole step, from the cycle of each stage."""
    virtual = problem.virtual_stages
    passes = (problem.pipeline.micro_batches - 1 / virtual) * max(cycles) + sum(cycles) / virtual
    return passes + max(stage.step_seconds for stage in problem.stages)


def all_kept(problem: Problem) -> dict:
    """The counts of a plan that changes nothing."""
    return {key(block): (Count(),) * len(block.kind.groups) for block in blocks(problem)}
