"""Plans, compares each plan with what it turned out to take, and decides when to stay with one. Runs on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mindspeed_mem.activation.wording import MEGATRON, Wording
from mindspeed_mem.adaptive.problem.definition import GIB, Problem
from mindspeed_mem.adaptive.run import worth
from mindspeed_mem.adaptive.run.correction import Measured, as_planned, corrected, lacked, passes_seconds
from mindspeed_mem.adaptive.search.decisions import Plan
from mindspeed_mem.adaptive.search.infeasible import InfeasibleError
from mindspeed_mem.adaptive.search.plan_file import memory_config
from mindspeed_mem.adaptive.search.plan_table import engine_time, grid, otherwise
from mindspeed_mem.adaptive.search.search import Found, Search
from mindspeed_mem.adaptive.search.simulation import Simulated
from mindspeed_mem.plan import MemoryConfig
from mindspeed_mem.plan.layers import in_words

ROUNDS = 4
"""Plans tried before the best of them is kept."""
_WORTH = 0.01
"""A plan that is predicted to save less than this share of the step is not tried."""


class Decision(NamedTuple):
    """What all ranks do next."""

    config: MemoryConfig | None
    """The memory configuration to execute from now on; None: the one that is in force."""
    settled: bool
    lines: tuple[str, ...] = ()
    """For the log."""
    without_effect: str = ""
    """Why no plan has an effect: for the log, as a warning."""
    fits: bool = True
    """False: what is settled on evicts, and no plan is known that would not. So that is part of what was decided."""


@dataclass
class Try:
    """A plan, what was predicted of it, and what it took."""

    problem: Problem
    found: Found
    config: MemoryConfig
    measured: tuple[Measured, ...] = ()
    corrected: bool = False
    """Whether the problem had been corrected by what earlier plans took."""

    @property
    def seconds(self) -> float:
        return max(one.seconds for one in self.measured)

    @property
    def evicted(self) -> int:
        return max(one.evicted for one in self.measured)

    @property
    def retried(self) -> bool:
        return any(one.retries for one in self.measured)

    def line(self) -> str:
        """Predicted beside measured."""
        seconds, peaks = passes_seconds(self.problem, self.found.simulated), self.found.simulated.peaks
        predicted = f"{seconds:.4g} s" + " (corrected by measurement)" * self.corrected
        if not self.measured:
            return f"predicted {predicted} and {_mib(max(peaks))} MiB at most"
        stages = [max(one.peak for one in self.measured if one.stage == number) for number in range(len(peaks))]
        text = f"predicted {predicted}, measured {self.seconds:.4g} s; peak of all device memory by stage in MiB"
        text += f", predicted {' '.join(map(_mib, peaks))}, measured {' '.join(map(_mib, stages))}"
        text += f", {_mib(self.evicted)} MiB evicted beyond the plan" if self.evicted else ""
        return text + (", the allocator had to give back memory and retry" if self.retried else "")


class Planner:
    """Works on one problem, which it corrects by what is measured."""

    def __init__(self, problem: Problem, states_are_split: bool = False, wording: Wording = MEGATRON):
        """states_are_split: the optimizer's states are split over data-parallel ranks already."""
        self.problem = self._given = problem
        self._states_are_split, self._wording = states_are_split, wording
        self._least: dict[int, int] = {}  # temporaries of stages, since they had too little memory
        self._any_fits = True  # by what is known so far
        self.tries: list[Try] = []
        self.kept: Try | None = None
        """The plan that was settled on."""

    def start(self) -> Decision:
        """The first plan, or the first after the problem has changed."""
        found, why = self._searched()  # which may be interrupted
        self.tries, self.kept = [], None
        line, everywhere = self._nothing_to_plan()
        decision = self._try(found, why, "" if everywhere else line)
        return decision._replace(without_effect=line) if everywhere else decision

    def judge(self, measured: Sequence[Measured]) -> Decision:
        """The plan in force took that much: correct the problem by it, then try another plan or stay with the best."""
        now = self.tries[-1]
        now.measured = as_planned(now.problem, now.found.plan, now.found.simulated, measured)
        self.problem = self._corrected(now.problem, now.found.plan, now.found.simulated, now.measured)
        if len(self.tries) < ROUNDS:
            found, why = self._searched()
            again = Search(self.problem).simulated(now.found.plan)
            gain = 1 - found.simulated.seconds / again.seconds
            known = any(one.config == memory_config(self.problem, found.plan) for one in self.tries)
            if not known and (now.evicted or max(again.peaks) > self.problem.device_limit or gain > _WORTH):
                return self._try(found, why, now.line())
        return self._settle(now)

    def overrun(self, lacks: Sequence[tuple[int, int, int]]) -> Decision:
        """The settled plan no longer fits. ``lacks``: the stage of each rank, the bytes that had to leave on it in one
        training call, and how often its allocator had to retry in one."""
        last = self.kept or self.tries[-1]
        if last.measured:
            self.problem = self._corrected(last.problem, last.found.plan, last.found.simulated, last.measured)
        now = Search(self.problem).simulated(last.found.plan)
        seconds = passes_seconds(self.problem, now)
        seen = [Measured(stage, seconds, now.peaks[stage], now.stalls[stage], *lack) for stage, *lack in lacks]
        self.problem = self._corrected(self.problem, last.found.plan, now, seen)
        return self.start()

    def report(self, width: int = 100) -> list[str]:
        """The plan in force: its figures, the grid of its layers and, once settled, what each decision is worth."""
        if not self.tries:
            return []
        now = self.kept or self.tries[-1]
        kind = "settled" if self.kept else "not settled yet"
        of_each = [*_otherwise(now), *worth.lines(now.found)] if self.kept else []
        return [
            f"adaptive memory plan ({kind}): " + now.line(),
            *engine_time(now.problem),
            *filter(None, [self._nothing_to_plan()[0]]),
            *grid(now.problem, now.found.plan, width),
            *of_each,
        ]

    def _nothing_to_plan(self) -> tuple[str, bool]:
        """A line on layers of which backward keeps nothing that they made, if there are any; whether these are all."""
        empty = {one.name for one in self.problem.classes if all(group.from_previous for group in one.groups)}
        parts = [part for stage in self.problem.stages for part in stage.parts]
        numbered = [row for part in parts for row in enumerate(part.layers, part.first_layer)]
        layers = {layer for layer, name in numbered if name in empty}
        line = (
            f"besides what they are given there is nothing to plan in {in_words(layers)}: they keep nothing, as under "
            "checkpoints that a model has itself (Hugging Face's gradient_checkpointing), or where no gradient passes"
        )
        return line if layers else "", len(layers) == len(numbered)

    def _corrected(self, problem: Problem, plan: Plan, simulated: Simulated, measured: Sequence[Measured]) -> Problem:
        """A plan that fits after one that did not shows no more than that: the next is not to lack memory again."""
        found = corrected(problem, plan, simulated, measured, self._least)
        self._least |= {number: found.stages[number].temporary_bytes for number in lacked(measured)}
        return found

    def _searched(self) -> tuple[Found, str]:
        """The best plan; where none fits, the one that needs least, with the reason."""
        search = Search(self.problem)
        try:
            found, self._any_fits = search.best(), True
            return found, ""
        except InfeasibleError as error:
            self._any_fits = False
            said = error.text(self._states_are_split, self._wording)
            return search.least(), f"{said}\n  until then activations are evicted when memory runs out"

    def _try(self, found: Found, why: str, before: str = "") -> Decision:
        config = memory_config(self.problem, found.plan)
        self.tries.append(Try(self.problem, found, config, corrected=self.problem != self._given))
        limit = f"limit {_mib(self.problem.device_limit)} MiB"
        number = f"plan {len(self.tries)}: {self.tries[-1].line()} ({limit}, HiGHS)"
        return Decision(config, False, tuple(line for line in (before, why, number) if line))

    def _settle(self, now: Try) -> Decision:
        self.kept = min(self.tries, key=lambda one: (one.evicted, one.retried, one.seconds))
        changed = None if self.kept is now else self.kept.config
        which = f"settled on plan {self.tries.index(self.kept) + 1} of {len(self.tries)}"
        lines = (now.line(), f"{which}: {self.kept.line()}", *_otherwise(self.kept))
        return Decision(changed, True, lines, fits=self._any_fits or not self.kept.evicted)


def _otherwise(kept: Try) -> list[str]:
    """What a plan that swaps is predicted to take where copies are worse than was measured."""
    seconds = passes_seconds(kept.problem, kept.found.simulated)
    changes = [
        f"{name}: {100 * (passes_seconds(kept.problem, one) / seconds - 1):+.1f} %"
        for name, one in otherwise(kept.found)
    ]
    return [f"what a step would take then, predicted: {', '.join(changes)}"] if changes else []


def _mib(nbytes: int) -> str:
    return f"{nbytes * 1024 / GIB:.1f}"
