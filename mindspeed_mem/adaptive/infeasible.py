"""What to say where no plan fits: how much is needed, who holds it, what would help."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_mem.adaptive.layout import KEEP, RECOMPUTE, Plan
from mindspeed_mem.adaptive.problem import GIB, Problem


class InfeasibleError(ValueError):
    """No plan fits the limits; `needed_bytes` would do on stage `stage`, as far as could be found."""

    def __init__(self, message: str, needed_bytes: int, stage: int):
        super().__init__(message)
        self.needed_bytes, self.stage = needed_bytes, stage


def shortage(problem: Problem, least: Plan, peaks: Sequence[int]) -> InfeasibleError:
    """The error for a problem whose plan of the lowest peaks, `least`, still does not fit."""
    stage = max(range(len(peaks)), key=lambda number: peaks[number])
    needed = peaks[stage]
    largest = sorted(holders(problem, least, stage, needed).items(), key=lambda one: -one[1])[:4]
    lines = [
        f"no plan fits: pipeline stage {stage} needs {_gib(needed)} GiB even with everything swapped or recomputed "
        f"that can be, but the limit is {_gib(problem.device_limit)} GiB",
        "held there, the largest first: " + ", ".join(f"{name} {_gib(size)} GiB" for name, size in largest),
        "three things to try: " + "; ".join(_advice(problem, largest[0][0])),
    ]
    return InfeasibleError("\n  ".join(lines), needed, stage)


def holders(problem: Problem, plan: Plan, number: int, peak: int) -> dict[str, int]:
    """Who holds how many of the bytes of a stage's peak."""
    stage = problem.stages[number]
    held = {
        "parameters, gradients and optimizer states": stage.static_bytes,
        "temporaries": stage.temporary_bytes,
        "layer inputs, head and loss": 0,
    }
    flights = problem.in_flight[number]
    counts = max(flights, key=sum)
    for letters, chunk, count in zip(plan.stages[number].chunks, stage.chunks, counts, strict=True):
        held["layer inputs, head and loss"] += count * (chunk.before.bytes + chunk.after.bytes)
        for text, name in zip(letters, chunk.layers, strict=True):
            for group, letter in zip(problem.class_of[name].groups, text, strict=True):
                size = {KEEP: group.bytes, RECOMPUTE: group.recompute_keeps}.get(letter, 0)
                if size:
                    held[f"kept {group.name}"] = held.get(f"kept {group.name}", 0) + count * size
    held["the layers at work and copies under way"] = max(0, peak - sum(held.values()))
    return {name: size for name, size in held.items() if size}


def _advice(problem: Problem, largest: str) -> list[str]:
    split = "split the model further (--tensor-model-parallel-size, --pipeline-model-parallel-size)"
    states = "split the optimizer's states over data-parallel ranks (--use-distributed-optimizer)"
    smaller = "a smaller --micro-batch-size, or --context-parallel-size for long sequences"
    sequence = "--sequence-parallel, which splits what stands between the blocks"
    host = "more host memory for swap (--swap-host-memory-gib)"
    found = [states, split, smaller] if largest.startswith("parameters") else [smaller, sequence, split]
    return [host, *found][:3] if problem.host_limit is not None and not largest.startswith("parameters") else found


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f}"
