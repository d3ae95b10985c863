"""What a page shows of a run, read from the files that the run has left: traces, metrics, a profile, `run.json`."""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

VERSION = 1
RUN = "run.json"
COMPUTE, OUT, IN, AGAIN = "compute", "copy out", "copy in", "recompute"
COPIES = (OUT, IN)
MIB = 1 << 20


class PageError(ValueError):
    """Files of which no page can be made; the message has all reasons."""


class Span(NamedTuple):
    """Something with a beginning and a length in ms, and what is known of it."""

    track: str
    name: str
    begin: float
    length: float
    more: dict[str, Any]

    @property
    def end(self) -> float:
        return self.begin + self.length


@dataclass
class Step:
    """The last step that a rank traced; times in ms since the first rank began it, by the ranks' clocks."""

    rank: int
    stage: int
    number: int
    began: float
    """In ms since 1970."""
    length: float
    copies_block: bool
    """Its device computes nothing while it copies."""
    spans: list[Span] = field(default_factory=list)
    counters: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """MiB over time, by "device bytes, activations" and so on."""
    gathers: list[Span] = field(default_factory=list)
    marks: list[tuple[Any, ...]] = field(default_factory=list)
    """When, what, how often."""

    def shift(self, later: float) -> None:
        """Count from another moment."""
        self.spans = [one._replace(begin=one.begin + later) for one in self.spans]
        self.gathers = [one._replace(begin=one.begin + later) for one in self.gathers]
        self.counters = {name: [(at + later, value) for at, value in of] for name, of in self.counters.items()}
        self.marks = [(at + later, *mark) for at, *mark in self.marks]

    def passes(self) -> list[Span]:
        """Forwards and backwards of micro-batches."""
        return [one for one in self.spans if "micro-batch" in one.more and "op" not in one.more]

    def operators(self) -> list[Span]:
        return [one for one in self.spans if one.track == COMPUTE and "op" in one.more]

    def copies(self) -> list[Span]:
        return [one for one in self.spans if one.track in COPIES]

    def hidden(self) -> float:
        """The ms of copies during which operators ran."""
        if self.copies_block:
            return 0.0
        busy = _union((one.begin, one.end) for one in self.operators())
        copies = _union((one.begin, one.end) for one in self.copies())
        return _length(busy) + _length(copies) - _length(_union([*busy, *copies]))

    def copying(self) -> float:
        """The ms in which something was copied."""
        return _length(_union((one.begin, one.end) for one in self.copies()))


@dataclass(frozen=True)
class Cell:
    """What becomes of an operator of a layer, in one pass of a micro-batch."""

    what: str
    """ "swap", "recompute", "swap, recompute" or "keep"."""
    moved: float
    """MiB."""
    kept: float | None
    """MiB that its backward needs, where a profile says so."""
    forward: float | None
    """ms."""


@dataclass
class Run:
    """One run, as far as its files tell."""

    name: str
    about: dict[str, Any] | None = None
    steps: list[Step] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    kept: dict[tuple[int, str], float] = field(default_factory=dict)
    """MiB that backwards keep of each operator of each layer, by a profile."""

    @property
    def ranks(self) -> list[dict[str, Any]]:
        return [] if self.about is None else self.about["ranks"]

    def stages(self) -> list[Step]:
        """A step of each stage, in their order: of its first rank that has a trace."""
        found: dict[int, Step] = {}
        for step in self.steps:
            found.setdefault(step.stage, step)
        return [found[stage] for stage in sorted(found)]

    def grid(self) -> dict[tuple[int, str], Cell]:
        """What becomes of each operator of each layer, by (layer, operator); operators in the order they run."""
        cells: dict[tuple[int, str], Cell] = {}
        for step in self.stages():
            forwards: dict[tuple[int, str], list[float]] = defaultdict(list)
            ran: dict[int, set[int]] = defaultdict(set)  # by layer: in virtual stages not in all of them
            inside = sorted((one.begin, one.end) for one in step.passes() if one.name.startswith("forward"))
            for one in step.operators():
                place = bisect.bisect_right(inside, (one.begin, math.inf)) - 1
                if place >= 0 and one.end <= inside[place][1] + 1e-6:
                    forwards[one.more["layer"], one.more["op"]].append(one.length)
                    ran[one.more["layer"]].add(place)
            moved: dict[tuple[int, str], float] = defaultdict(float)
            again: set[tuple[int, str]] = set()
            for one in step.spans:
                where = one.more.get("layer", -1), one.more.get("op", "")
                if where[0] < 0:
                    continue
                if one.track == OUT:
                    moved[where] += one.more["bytes"] / MIB
                elif one.track == AGAIN:
                    again.add(where)
            for where in dict.fromkeys([*forwards, *moved, *again]):
                what = ", ".join(["swap"] * (where in moved) + ["recompute"] * (where in again)) or "keep"
                took = mean(forwards[where]) if forwards.get(where) else None
                count = len(ran[where[0]]) or max(1, len(inside))
                cells.setdefault(where, Cell(what, moved.get(where, 0.0) / count, self.kept.get(where), took))
        return cells


def read(files: Sequence[Path], name: str | None = None) -> Run:
    """One run's files: folders of --memory-report, traces, metrics (lines of JSON), profiles. Raises PageError."""
    run, wrong = Run(name or _name(files)), []
    inside = {file: list(_inside(file)) for file in files}
    wrong += [f"{file} has none of a run's files (run.json, traces)" for file, found in inside.items() if not found]
    for file in itertools.chain.from_iterable(inside.values()):
        try:
            _take(run, file)
        except OSError as error:
            wrong.append(f"{file}: {error.strerror}")
        except (ValueError, KeyError, TypeError, AttributeError):
            wrong.append(
                f"{file} is nothing that a page shows: allowed are folders of --memory-report, traces, metrics files "
                "(one JSON object a line) and profiles of plans"
            )
    ranks = [step.rank for step in run.steps]
    wrong += [f"{run.name}: two traces of rank {one}; give the files of one run" for one in _twice(ranks)]
    if wrong:
        raise PageError("\n  ".join(wrong))
    run.steps.sort(key=lambda step: step.rank)
    if len({step.number for step in run.steps}) == 1:
        first = min(step.began for step in run.steps)
        for step in run.steps:
            step.shift(step.began - first)
    return run


def _inside(file: Path) -> Iterable[Path]:
    if not file.is_dir():
        return [file]
    return [one for one in sorted(file.iterdir()) if one.suffix in (".json", ".jsonl")]


def _name(files: Sequence[Path]) -> str:
    first = files[0].resolve()
    return first.name if first.is_dir() else first.name.partition(".")[0]


def _twice(ranks: list[int]) -> list[int]:
    return sorted({one for one in ranks if ranks.count(one) > 1})


def _take(run: Run, file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    try:
        content = json.loads(text)
    except ValueError:
        content = [json.loads(line) for line in text.splitlines() if line.strip()]
    if isinstance(content, dict) and "iteration" in content:  # one line of metrics
        content = [content]
    if isinstance(content, list):
        if not all(isinstance(row["iteration"], int) for row in content):
            raise ValueError
        run.metrics += content
    elif "traceEvents" in content:
        run.steps.append(_last_step(content))
    elif "problem" in content and "format" in content:
        run.kept |= _kept(content["problem"])
    elif content["version"] == VERSION and isinstance(content["ranks"], list):
        run.about = content
    else:
        raise ValueError


def _last_step(trace: dict[str, Any]) -> Step:
    about, events = trace["otherData"], trace["traceEvents"]
    if "rank" not in about:  # of all ranks, put together
        raise ValueError
    whole = max((one for one in events if "step" in one.get("args", {})), key=lambda one: one["args"]["step"])
    begin, end = whole["ts"], whole["ts"] + whole["dur"]
    step = Step(
        rank=about["rank"],
        stage=about["stage"],
        number=whole["args"]["step"],
        began=about["origin_ns"] / 1e6 + begin / 1e3,
        length=whole["dur"] / 1e3,
        copies_block=about.get("copies_block", False),
    )
    coming: dict[str, Any] = {}
    for one in events:
        if not begin <= one.get("ts", -1.0) <= end or one is whole:
            continue
        at = (one["ts"] - begin) / 1e3
        if one["ph"] == "X":
            step.spans.append(Span(one["cat"], one["name"], at, one["dur"] / 1e3, one["args"]))
        elif one["ph"] == "C":
            for series, value in one["args"].items():
                step.counters.setdefault(f"{one['name']}, {series}", []).append((at, value / MIB))
        elif one["ph"] == "b":
            coming[one["id"]] = at, one["args"]
        elif one["ph"] == "e":
            started, more = coming.pop(one["id"])
            step.gathers.append(Span("gather", f"chunk {more['chunk']}", started, at - started, more))
        elif one["ph"] == "i":
            step.marks.append((at, one["name"], one["args"]["times"]))
    return step


def _kept(problem: dict[str, Any]) -> dict[tuple[int, str], float]:
    """Of a profile's problem (`adaptive.problem.profile_file`, whose version 1 calls parts chunks)."""
    found: dict[tuple[int, str], float] = {}
    classes = {one["name"]: one for one in problem["classes"]}
    for part in itertools.chain.from_iterable(stage.get("parts") or stage["chunks"] for stage in problem["stages"]):
        for layer, name in enumerate(part["layers"], part["first_layer"]):
            for group in classes[name]["groups"]:
                found[layer, group["name"]] = group["bytes"] / MIB
    return found


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)
