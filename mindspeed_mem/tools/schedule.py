"""``python -m mindspeed_mem schedule``: the order of passes, what it holds and how long it idles."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from typing import NamedTuple

from mindspeed_mem.command_line import AsGiven, as_given, check_picture, number, whole
from mindspeed_mem.schedule import picture
from mindspeed_mem.schedule.chart import chart
from mindspeed_mem.schedule.checks import Limits, problems, too_many
from mindspeed_mem.schedule.order import found_by_simulation, group_under, order, without_virtual_stages
from mindspeed_mem.schedule.peak import peak
from mindspeed_mem.schedule.simulation import Timeline, names, simulate

DESCRIPTION = """Prints the order in which each pipeline stage runs its passes (F3 is the forward of micro-batch 3, B3.1
its backward on model chunk 1, W3 its gradients of weights where they are passes of their own), how many are in flight
at most, how long the stage idles, and a chart over time where the terminal has room. Nothing is run, and Megatron is
not needed:

    python -m mindspeed_mem schedule --pp 4 --microbatches 8 --max-inflight 3
    python -m mindspeed_mem schedule --pp 4 --microbatches 8 --max-inflight 3 --pipeline-schedule all

The second compares all schedules that hold no more, in a table.
Long names are Megatron's, and this package's own in training.
"""
_WIDTH = 80  # where there is no terminal
_STAGES = ("--pp", "--pipeline-model-parallel-size")
_VIRTUAL = ("--vpp", "--virtual-pipeline-model-parallel-size", "--num-virtual-stages-per-pipeline-rank")
_GROUP = ("--group-size", "--microbatch-group-size-per-virtual-pipeline-stage")
_CAP = ("--max-inflight", "--max-inflight-microbatches")
_SCHEDULE, _ALL = "--pipeline-schedule", "all"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of the command. Numbers stay text here, so that all that is wrong is said at once."""
    command.add_argument(*_STAGES, default="1", metavar="N", action=AsGiven, help="pipeline stages (1)")
    what = "micro-batches of a step: global batch / micro-batch / data-parallel ranks"
    command.add_argument("--microbatches", required=True, metavar="N", help=what)
    what = "virtual stages (model chunks) of each stage (1)"
    command.add_argument(*_VIRTUAL, default="1", metavar="N", action=AsGiven, help=what)
    what = "micro-batches that run on a chunk in a row (the stages)"
    command.add_argument(*_GROUP, metavar="N", action=AsGiven, help=what)
    what = "the most micro-batches that a stage holds (with virtual stages: passes of a chunk, except for all)"
    command.add_argument(*_CAP, metavar="N", action=AsGiven, help=what)
    what = "1f1b (default); zb: gradients of weights fill idle time; v: with 2 virtual stages in a V; all: a table"
    command.add_argument(_SCHEDULE, choices=("1f1b", "zb", "v", _ALL), default="1f1b", help=what)
    command.add_argument(
        "--megatron-loop", action="store_true", help="with a cap: the order that Megatron's own loop can run"
    )
    command.add_argument("--forward-only", action="store_true", help="the passes of an evaluation")
    command.add_argument("--backward-ratio", default="2", metavar="X", help="time of a backward, in forwards (2)")
    what = "with zb and v: how much of that is gradients of weights (half)"
    command.add_argument("--weight-ratio", metavar="X", help=what)
    command.add_argument("--send-ratio", default="0", metavar="X", help="time of a send, in forwards (0)")
    command.add_argument("--mib", metavar="X", help="MiB that a pass in flight keeps for backward")
    command.add_argument("--picture", metavar="FILE", help="draw stages and memory over time: .svg, .png or .pdf")


def main(given: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    wrong: list[str] = []
    sizes = [
        whole(as_given(given, *_STAGES), given.pp, wrong) or 1,
        whole(as_given(given, *_VIRTUAL), given.vpp, wrong) or 1,
        whole("--microbatches", given.microbatches, wrong) or 1,
    ]
    limits: Limits = {
        "group_size": whole(as_given(given, *_GROUP), given.group_size, wrong),
        "cap": whole(as_given(given, *_CAP), given.max_inflight, wrong),
        "megatron_loop": given.megatron_loop,
        "split": given.pipeline_schedule in ("zb", "v"),
        "v": given.pipeline_schedule == "v",
    }
    together = given.pipeline_schedule == _ALL
    if limits["v"] and given.vpp == "1":
        sizes[1] = 2  # as a V has
    numbers_wrong = bool(wrong)
    times = _read_times(given, limits["split"] or together, wrong)
    mib = number("--mib", given.mib, wrong, 0.0)
    if given.megatron_loop and given.max_inflight is None:
        wrong.append("--megatron-loop chooses among orders with a cap; give one with --max-inflight")
    check_picture("--picture", given.picture, wrong)
    alone = {"--picture": given.picture, "--forward-only": given.forward_only, "--megatron-loop": given.megatron_loop}
    alone[as_given(given, *_GROUP)] = given.group_size
    for what in (what for what, value in alone.items() if value):
        if together:
            wrong.append(f"{what} is for one schedule, not for {_SCHEDULE} {_ALL}")
        elif limits["v"] and what == as_given(given, *_GROUP):
            wrong.append(f"{what} has no effect with {_SCHEDULE} v: chunks take turns as its simulation says")
    largest = [sizes[0], max(2, sizes[1]), sizes[2]] if together else sizes  # of what is compared
    if numbers_wrong:
        pass
    elif many := too_many(*largest):
        wrong.append(many)
    elif not together:
        wrong += problems(*sizes, **limits)
    if wrong:
        print("mindspeed_mem schedule:", *(f"  {reason}" for reason in wrong), sep="\n", file=sys.stderr)
        return 2
    only = bool(given.forward_only)
    if together:
        print("\n".join(_table(sizes, limits["cap"], times, mib)))
        return 0
    timeline = times.of(sizes, limits, only)
    width = shutil.get_terminal_size((_WIDTH, 24)).columns
    print("\n".join(_text(sizes, limits, only, timeline, mib, width)))
    for line in [] if only else _beside(sizes, limits, timeline, times):
        print(line)
    if given.picture:
        picture.draw(timeline, sizes[1], given.picture, _title(sizes, limits, only), mib)
        print(f"drawn to {given.picture}")
    return 0


def _read_times(given: argparse.Namespace, splits: bool, wrong: list[str]) -> _Times:
    """The times of passes that the options say. `splits`: some schedule has passes of weight gradients of their own."""
    backward = number("--backward-ratio", given.backward_ratio, wrong, 0.01) or 1.0
    weight = backward / 2
    if given.weight_ratio is not None:
        weight = number("--weight-ratio", given.weight_ratio, wrong, 0.0) or 0.0
        if not splits:
            wrong.append(
                f"--weight-ratio is for {_SCHEDULE} zb, v and all: otherwise gradients of weights are in the backward"
            )
        elif not wrong and weight >= backward:
            wrong.append(f"--weight-ratio {weight:g} is part of --backward-ratio {backward:g}, and has to be less")
    return _Times(backward, weight, number("--send-ratio", given.send_ratio, wrong, 0.0) or 0.0)


class _Times(NamedTuple):
    """In forwards."""

    backward: float
    weight: float
    """Its gradients of weights, where it is split."""
    send: float
    forward: float = 1.0

    def over(self, parts: float) -> _Times:
        """Those of the passes of one part, if these are those of so many together."""
        return _Times(self.backward / parts, self.weight / parts, self.send, self.forward / parts)

    def of(self, sizes: list[int], limits: Limits, forward_only: bool = False) -> Timeline:
        """How this schedule runs."""
        passes = order(*sizes, **limits, forward_only=forward_only)
        backward = self.backward - self.weight if limits["split"] else self.backward
        return simulate(
            passes,
            sizes[1],
            v=limits["v"],
            forward=self.forward,
            backward=backward,
            weight=self.weight,
            send=self.send,
        )


def _text(
    sizes: list[int], limits: Limits, forward_only: bool, timeline: Timeline, mib: float | None, width: int
) -> list[str]:
    stages, virtual_stages, _ = sizes
    lines = [_title(sizes, limits, forward_only)]
    for stage, most in enumerate(peak(*sizes, **limits, forward_only=forward_only)):
        held = f", {most * mib:g} MiB" if mib is not None else ""
        lines.append(f"stage {stage}: at most {most} in flight{held}; idle {timeline.idle_share(stage):.1%}")
        of_stage = names((span.work for span in timeline.stages[stage]), virtual_stages)
        lines += textwrap.wrap(of_stage, width, initial_indent="  ", subsequent_indent="  ")
    drawn = chart(timeline, virtual_stages, width)
    if drawn is None:
        drawn = [f"(The chart over time does not fit {width} columns; --picture FILE draws it.)"]
    idle = f"all stages idle {timeline.idle_share():.1%} of {timeline.makespan:g} forwards' time"
    return [*lines, "", *drawn, "", idle]


def _beside(sizes: list[int], limits: Limits, timeline: Timeline, times: _Times) -> list[str]:
    """What the same takes without the cap, in Megatron's own loop, without virtual stages and with a whole backward."""
    others: dict[str, Limits] = {}
    if limits["cap"] is not None:
        others["without the cap"] = {**limits, "cap": None, "megatron_loop": False}
    if limits["split"] and not limits["v"]:
        others[f"with the backward whole ({_SCHEDULE} 1f1b)"] = {**limits, "split": False}
    elif limits["cap"] is not None and not (limits["megatron_loop"] or limits["v"]):
        others["in Megatron's own loop (--megatron-loop)"] = {**limits, "megatron_loop": True}
    lines = []
    for what, changed in others.items():
        if problems(*sizes, **changed):
            lines.append(f"{what}: not possible: {'; '.join(problems(*sizes, **changed))}")
            continue
        other = times.of(sizes, changed)
        most = max(peak(*sizes, **changed))
        ratio = other.makespan / timeline.makespan - 1
        lines.append(f"{what}: at most {most} in flight, idle {other.idle_share():.1%}, time {ratio:+.1%}")
    stages, virtual_stages, micro_batches = sizes
    if virtual_stages > 1 and limits["cap"] is not None and not (limits["megatron_loop"] or limits["split"]):
        plain = without_virtual_stages(
            stages, virtual_stages, micro_batches, limits["cap"], backward=times.backward, send=times.send
        )
        ratio = plain.makespan / timeline.makespan - 1
        what = "without virtual stages, holding no more"
        lines.append(f"{what}: idle {plain.idle_share():.1%}, time {ratio:+.1%}{', faster' * (ratio < 0)}")
    if limits["v"]:
        straight: Limits = {**limits, "cap": (limits["cap"] or 2 * stages) // 2, "v": False}
        plain = times.over(1 / 2).of([stages, 1, micro_batches], straight)
        ratio = plain.makespan / timeline.makespan - 1
        what = f"without virtual stages ({_SCHEDULE} zb), holding no more"
        lines.append(f"{what}: idle {plain.idle_share():.1%}, time {ratio:+.1%}")
    return lines


def _table(sizes: list[int], cap: int | None, times: _Times, mib: float | None) -> list[str]:
    """All schedules that hold no more micro-batches than the cap, or than 1F1B's first stage."""
    stages, virtual_stages, micro_batches = sizes
    cap, several = cap or min(stages, micro_batches), max(2, virtual_stages)
    rows = []
    for name, parts, split, v in (
        ("1f1b", 1, False, False),
        (f"interleaved, {several} virtual stages", several, False, False),
        ("zb", 1, True, False),
        (f"zb, {several} virtual stages", several, True, False),
        ("v, 2 virtual stages", 2, True, True),
    ):
        limits: Limits = {"group_size": None, "cap": cap * parts, "megatron_loop": False, "split": split, "v": v}
        rows.append((name, [stages, parts, micro_batches], limits))
    run = {}
    for name, of_row, limits in rows:
        if not problems(*of_row, **limits):
            run[name] = times.over(of_row[1]).of(of_row, limits), max(peak(*of_row, **limits)) / of_row[1]
    best = min(run.values(), key=lambda one: (round(one[0].makespan, 9), one[1]))
    wide = max(len(name) for name, *_ in rows)
    lines = [
        f"{_counted(stages, 'stage')}, {_counted(micro_batches, 'micro-batch')}, at most {cap} in flight on a stage"
    ]
    lines.append(f"{'':{wide}}  in flight{'      MiB' * (mib is not None)}    idle     time")
    for name, of_row, limits in rows:
        if name not in run:
            lines.append(f"{name:{wide}}  not possible: {'; '.join(problems(*of_row, **limits))}")
            continue
        timeline, held = run[name]
        size = f"{held * mib:9.4g}" if mib is not None else ""
        ratio = "best" if run[name] is best else f"{timeline.makespan / best[0].makespan - 1:+.1%}"
        lines.append(f"{name:{wide}}  {held:9.3g}{size}  {timeline.idle_share():6.1%}  {ratio:>7}")
    return lines


def _title(sizes: list[int], limits: Limits, forward_only: bool) -> str:
    stages, virtual_stages, micro_batches = sizes
    words = [_counted(stages, "stage"), _counted(micro_batches, "micro-batch")]
    if virtual_stages > 1:
        words.insert(1, f"{virtual_stages} virtual stages")
        found = not forward_only and (limits["split"] or found_by_simulation(*sizes, **limits))
        words.append("in an order found by simulation" if found else f"in groups of {group_under(*sizes, **limits)}")
    if limits["v"]:
        words.append("in a V")
    if limits["split"] and not forward_only:
        words.append("the backward split")
    if forward_only:
        words.append("forward only")
    elif limits["cap"] is not None:
        what = "chunk passes" if virtual_stages > 1 else "micro-batches"
        words.append(f"capped to {limits['cap']} {what} in flight" + " in Megatron's loop" * limits["megatron_loop"])
    return ", ".join(words)


def _counted(number: int, what: str) -> str:
    plural = "es" if what.endswith("ch") else "s"
    return f"{number} {what}{plural * (number > 1)}"
