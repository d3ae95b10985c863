"""What to say where no plan fits: how much is needed, who holds it, what would help."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mindspeed_mem.activation.observe.rank_profile import Outside
from mindspeed_mem.activation.wording import MEGATRON, Wording
from mindspeed_mem.adaptive.problem.definition import GIB, PlannedOperator, Problem
from mindspeed_mem.adaptive.search.decisions import KEEP, RECOMPUTE, SWAP, Plan, under

STATIC = "parameters, gradients and optimizer states"
IN_STEP = "32-bit copies of gradients in the optimizer's step"
WAITING = "what waits for gradients of weights"
LAYERS, ENDS = "the layers at work and copies under way", "embedding, head and loss at work"


class InfeasibleError(ValueError):
    """No plan fits the limits; `needed_bytes` would do on stage `stage`, as far as could be found."""

    def __init__(self, problem: Problem, least: Plan, peaks: Sequence[int]):
        """least: the plan of the lowest peaks, which are these."""
        self.needed_bytes = max(peaks)
        self.stage = peaks.index(self.needed_bytes)
        self._limit, self._host_is_limited = problem.device_limit, problem.host_limit is not None
        held = _holders(problem, least, self.stage, self.needed_bytes)
        self._held = sorted(held.items(), key=lambda one: -one[1])
        super().__init__(self.text())

    def text(self, states_are_split: bool = False, wording: Wording = MEGATRON) -> str:
        """The message; `states_are_split`: the optimizer's states are known to be split over data-parallel ranks."""
        advice = _advice(wording, self._held[0][0], states_are_split, self._host_is_limited)
        lines = [
            f"no plan fits: pipeline stage {self.stage} needs {_size(self.needed_bytes)} even with everything "
            f"swapped or recomputed that can be, but the limit is {_size(self._limit)}",
            "held there, the largest first: " + ", ".join(f"{name} {_size(size)}" for name, size in self._held[:4]),
            "three things to try: " + "; ".join(advice),
        ]
        return "\n  ".join(lines)


def _holders(problem: Problem, plan: Plan, number: int, peak: int) -> dict[str, int]:
    """Who holds how many of the bytes of a stage's peak."""
    problem = under(problem, plan)
    stage = problem.stages[number]
    if peak == stage.in_step_bytes:
        return {STATIC: stage.static_bytes, IN_STEP: stage.step_bytes}
    short = stage.fixed_bytes - stage.static_bytes  # what operators take for a short time is with those at work
    held = {STATIC: stage.static_bytes, "temporaries": short, "layer inputs, head and loss": 0}
    counts, waits = max(problem.held[number], key=lambda one: (sum(map(sum, one)), one))
    waiting = sum(n * problem.waiting(number, part) for part, n in enumerate(waits))
    for letters, part, count in zip(plan.stages[number].parts, stage.parts, waits, strict=True):
        for text, name in zip(letters, part.layers, strict=True):
            groups = zip(problem.class_of[name].groups, text, strict=True)
            waiting -= count * sum(problem.on_host(group) for group, letter in groups if letter == SWAP)
    if waiting:
        held[WAITING] = waiting
    for letters, part, count in zip(plan.stages[number].parts, stage.parts, counts, strict=True):
        held["layer inputs, head and loss"] += count * (part.before.bytes + part.after.bytes)
        for text, name in zip(letters, part.layers, strict=True):
            for group, letter in zip(problem.class_of[name].groups, text, strict=True):
                size = {KEEP: group.bytes, RECOMPUTE: group.recompute_keeps}.get(letter, 0)
                if size:
                    held[f"kept {group.name}"] = held.get(f"kept {group.name}", 0) + count * size
    held[ENDS if _at_ends(problem, number) else LAYERS] = max(0, peak - sum(held.values()))
    return {name: size for name, size in held.items() if size}


def _at_ends(problem: Problem, number: int) -> bool:
    """Whether more is held for a short time outside the layers than in any: a loss in chunks, say, of which backward
    keeps nothing."""
    parts = problem.stages[number].parts
    kinds = {name for part in parts for name in part.layers}
    inside = [one for name in kinds for one in problem.class_of[name].operators]
    return _temporary(end for part in parts for end in (part.before, part.after)) > _temporary(inside)


def _temporary(some: Iterable[PlannedOperator | Outside]) -> int:
    return max((max(one.forward_temporary_bytes, one.backward_temporary_bytes) for one in some), default=0)


def _advice(words: Wording, largest: str, states_are_split: bool, host_is_limited: bool) -> list[str]:
    """The three things that help most."""
    if largest == STATIC:
        states = [words.split_states] * (not states_are_split)
        return [*states, words.split_more, words.split_model, words.smaller_planned][:3]
    host = [f"more host memory for swap ({words.host_memory})"] * host_is_limited
    sequence = [words.split_sequence] * bool(words.split_sequence)
    return [*host, words.smaller_planned, *sequence, words.split_model][:3]


def _size(nbytes: int) -> str:
    """So fine that what is needed and a limit a little below it are not written alike."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= 10 * GIB else f"{nbytes * 1024 / GIB:.1f} MiB"
