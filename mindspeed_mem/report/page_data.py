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

from mindspeed_mem.plan.layers import as_ranges, called
from mindspeed_mem.report.trace_file import file_of_rank

VERSION = 1
RUN = "run.json"
COMPUTE, OUT, IN, AGAIN, STALL = "compute", "copy out", "copy in", "recompute", "stall"
COPIES = (OUT, IN)
WHOLE = "the whole layer"
"""The operator that a layer is which runs again as a whole."""
MIB = 1 << 20


class PageError(ValueError):
    """Files of which no page can be made; the message has all reasons."""


class _UnusableError(ValueError):
    """Why a page has nothing, or not all, of a file."""


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
    """A step that a rank traced; times in ms since the first rank began it, by the ranks' clocks."""

    rank: int
    stage: int
    stages: int | None
    """Of the pipeline; None in files of versions that did not say it."""
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
        """The ms of copies during which operators ran, and did not wait for a copy."""
        if self.copies_block:
            return 0.0
        busy = _without(
            _union((one.begin, one.end) for one in self.operators()),
            _union((one.begin, one.end) for one in self.spans if one.track == STALL),
        )
        copies = _union((one.begin, one.end) for one in self.copies())
        return _length(busy) + _length(copies) - _length(_union([*busy, *copies]))

    def stalled(self) -> float:
        """The ms in which its computing waited for copies; where these block it, all that they took."""
        if self.copies_block:
            return self.copying()
        return _length(_union((one.begin, one.end) for one in self.spans if one.track == STALL))

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
    stacks: dict[str, range | None] = field(default_factory=dict)
    """The numbers of each stack's layers, where traces tell them."""
    remarks: list[str] = field(default_factory=list)
    """What in the files could not be used, and what was made of it."""
    together: bool = True
    """All ranks show the same step, by one clock."""

    @property
    def ranks(self) -> list[dict[str, Any]]:
        return [] if self.about is None else self.about["ranks"]

    def layer(self, number: int) -> str:
        """What a layer is called."""
        return called(number, self.stacks) if number >= 0 else "outside the layers"

    @property
    def of_stages(self) -> int:
        """How many stages the pipeline has, traced or not."""
        return max((step.stages or step.stage + 1 for step in self.steps), default=1)

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
            whole = {(layer, WHOLE) for layer, op in again if not op}
            again = {where for where in again if where[1]} | whole
            for where in dict.fromkeys([*forwards, *moved, *sorted(again)]):
                runs_again = where in again or any((where[0], op) in again for op in _around(where[1]))
                what = ", ".join(["swap"] * (where in moved) + ["recompute"] * runs_again) or "keep"
                took = mean(forwards[where]) if forwards.get(where) else None
                count = len(ran[where[0]]) or max(1, len(inside))
                cells.setdefault(where, Cell(what, moved.get(where, 0.0) / count, self.kept.get(where), took))
        return cells


class _Trace(NamedTuple):
    """One rank's."""

    file: Path
    given: Path
    """The file, or the folder that it is in."""
    steps: set[int]
    last: Step
    stacks: dict[str, range | None]


def read(files: Sequence[Path], name: str | None = None) -> Run:
    """One run's files: folders of --memory-report, traces, metrics (lines of JSON), profiles.

    What a folder has besides, or has in pieces, is left out with a remark. Raises PageError: a file that was given
    cannot be used, or what was given is not of one run.
    """
    run = Run(name or _name(files))
    wrong: list[str] = []
    traces: dict[int, _Trace] = {}  # by rank
    for given in files:
        for file in _inside(given, wrong):
            try:
                _take(run, file, given, traces)
            except PageError as error:
                wrong.append(str(error))
            except (_UnusableError, OSError) as error:
                if given.is_dir():
                    run.remarks.append(f"{file.name} in {given}: {_why(error)}")
                else:
                    wrong.append(f"{file}: {_why(error)}")
    if not (wrong or traces or run.about or run.metrics or run.kept):
        wrong += run.remarks
    if wrong:
        raise PageError("\n  ".join(wrong))
    if not traces:
        _find_traces(run, traces)
    _show_steps(run, [traces[rank] for rank in sorted(traces)])
    return run


def names_apart(files: Sequence[Path], others: Sequence[Path]) -> tuple[str, str]:
    """What to call two runs: by their files, with as many folders as it takes to tell them apart."""
    names = _name(files), _name(others)
    if names[0] != names[1]:
        return names
    paths = [list(some[0].resolve().parts[1:-1]) for some in (files, others)]
    for count in range(1, max(map(len, paths)) + 1):
        longer = ["/".join([*parts[-count:], names[0]]) for parts in paths]
        if longer[0] != longer[1]:
            return longer[0], longer[1]
    return names[0], f"{names[1]} (again)"


def _inside(given: Path, wrong: list[str]) -> list[Path]:
    """The files that are meant."""
    if not given.is_dir():
        return [given]
    try:
        found = [one for one in sorted(given.iterdir()) if one.suffix in (".json", ".jsonl") and one.is_file()]
    except OSError as error:
        wrong.append(f"{given}: {error.strerror}")
        return []
    if not found:
        wrong.append(f"{given} has none of a run's files (run.json, traces)")
    return found


def _name(files: Sequence[Path]) -> str:
    first = files[0].resolve()
    return first.name if first.is_dir() else first.name.partition(".")[0]


def _take(run: Run, file: Path, given: Path, traces: dict[int, _Trace]) -> None:
    """Raises _UnusableError, OSError."""
    content = _content(file, run)
    if content is None:
        return
    if not isinstance(content, dict):
        raise _UnusableError(_NOTHING)
    if "traceEvents" in content:
        trace = _trace(content, file, given)
        before = traces.setdefault(trace.last.rank, trace)
        if before is not trace and before.given == given:
            raise _UnusableError(f"a second trace of rank {trace.last.rank}; that of {before.file.name} is shown")
        if before is not trace:
            raise PageError(f"{before.file} and {file} are two traces of rank {trace.last.rank}: {_OF_ONE}")
    elif "problem" in content and "format" in content:
        try:
            run.kept |= _kept(content["problem"])
        except (KeyError, TypeError, AttributeError) as error:
            raise _UnusableError("a profile of another version, or no whole one") from error
    elif isinstance(content.get("ranks"), list) and "version" in content:
        if content["version"] != VERSION:
            raise _UnusableError(f"of another version ({content['version']}; this one reads {VERSION})")
        if run.about is not None:
            raise PageError(f"{file} is the second of its kind: {_OF_ONE}")
        run.about = content
    else:
        raise _UnusableError(_NOTHING)


_OF_ONE = "give the files of one run, and those of another after --with"
_NOTHING = (
    "nothing that a page shows: allowed are folders of --memory-report, traces, metrics files (one JSON object a line) "
    "and profiles of plans"
)


def _why(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _content(file: Path, run: Run) -> Any:
    """What is in a file of JSON; None: metrics, which are in the run now. Raises _UnusableError, OSError."""
    content: Any = None
    try:
        text = file.read_text(encoding="utf-8")
        content = json.loads(text)
        rows = list(enumerate(content if isinstance(content, list) else [content], 1))
    except UnicodeDecodeError as error:
        raise _UnusableError("no text") from error
    except (ValueError, RecursionError) as error:
        lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        if not lines or not _is_metrics(_whole(lines[0][1])):
            begun = text.lstrip().startswith(("{", "["))
            raise _UnusableError(f"no whole JSON: {error}" if begun else _NOTHING) from error
        rows = [(number, _whole(line)) for number, line in lines]
    if not rows or not _is_metrics(rows[0][1]):
        if content is None:
            raise _UnusableError(_NOTHING)
        return content
    run.metrics += [row for _, row in rows if _is_metrics(row)]
    if cut := [number for number, row in rows if not _is_metrics(row)]:
        raise _UnusableError(f"no whole metrics in {'lines' if len(cut) > 1 else 'line'} {as_ranges(cut)}")
    return None


def _whole(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_metrics(row: Any) -> bool:
    return isinstance(row, dict) and isinstance(row.get("iteration"), int) and isinstance(row.get("rank", 0), int)


# ---- traces


def _trace(content: Any, file: Path, given: Path) -> _Trace:
    """Raises _UnusableError."""
    try:
        about = content["otherData"]
        if "rank" not in about and "ranks" in about:
            raise _UnusableError("all ranks' traces put together: give the traces that were merged into it")
        steps = _steps(content)
        if not steps:
            raise _UnusableError("a trace without a step")
        stacks: dict[str, range | None] = {name: range(*ends) for name, ends in about.get("stacks", {}).items()}
        return _Trace(file, given, set(steps), _step(content, max(steps)), stacks)
    except (KeyError, TypeError, AttributeError) as error:
        raise _UnusableError("no trace of --memory-trace, or no whole one") from error


def _find_traces(run: Run, traces: dict[int, _Trace]) -> None:
    """A run whose traces lie elsewhere (--memory-trace beside --memory-report) says where."""
    about = run.about or {}
    if not about.get("trace"):
        return
    wanted = [file_of_rank(Path(about["trace"]), rank) for rank in range(max(1, len(about["ranks"])))]
    for rank, file in enumerate(wanted):
        try:
            content = _content(file, run)
            trace = _trace(content, file, file)
            if content["otherData"]["origin_ns"] < about["began_ns"]:
                raise _UnusableError("of an earlier run")
            traces[rank] = trace
        except FileNotFoundError:
            continue
        except (_UnusableError, OSError) as error:
            run.remarks.append(f"{file}: {_why(error)}")
    if not traces:
        run.remarks.append(f"give the traces as well, or copy them here: this run wrote them to {wanted[0]} and so on")


def _show_steps(run: Run, traces: Sequence[_Trace]) -> None:
    """The last step that all ranks have traced; where there is none, the last of each."""
    run.steps = [one.last for one in traces]
    if absent := sorted({row["rank"] for row in run.ranks if traces} - {step.rank for step in run.steps}):
        run.remarks.append(f"there is no trace of {'ranks' if len(absent) > 1 else 'rank'} {as_ranges(absent)}")
    for one in traces:
        run.stacks |= one.stacks
    if len({step.number for step in run.steps}) > 1:
        shown = ", ".join(f"{step.number} of rank {step.rank}" for step in run.steps[:8]) + ", ..." * (len(traces) > 8)
        said = f"the last steps traced differ ({shown})"
        common = set.intersection(*(one.steps for one in traces))
        run.together = bool(common)
        if common:
            number = max(common)
            run.remarks.append(f"{said}: shown is step {number}, the last that all have")
            run.steps = [one.last if one.last.number == number else _again(one, number) for one in traces]
        else:
            run.remarks.append(f"{said}, and there is none that all have: the times of each begin with its own")
    if run.together and run.steps:
        first = min(step.began for step in run.steps)
        for step in run.steps:
            step.shift(step.began - first)


def _again(trace: _Trace, number: int) -> Step:
    """Another step of a trace, read once more: most often it is not needed, and all would be large."""
    return _step(json.loads(trace.file.read_text(encoding="utf-8")), number)


def _steps(trace: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The steps in a trace by their number, each as the event that it is."""
    return {one["args"]["step"]: one for one in trace["traceEvents"] if "step" in one.get("args", {})}


def _step(trace: dict[str, Any], number: int) -> Step:
    about, events = trace["otherData"], trace["traceEvents"]
    whole = _steps(trace)[number]
    begin, end = whole["ts"], whole["ts"] + whole["dur"]
    step = Step(
        rank=about["rank"],
        stage=about["stage"],
        stages=about.get("stages"),
        number=number,
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


def _around(op: str) -> list[str]:
    """What an operator runs again within: the layer, and each module that it is in."""
    parts = op.split(".")
    return [WHOLE, *(".".join(parts[:count]) for count in range(1, len(parts)))]


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _without(spans: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of spans in order what no other, in order, too, covers."""
    found, place = [], 0
    for begin, end in spans:
        while place < len(others) and others[place][1] <= begin:
            place += 1
        for other in itertools.islice(others, place, None):
            if other[0] >= end:
                break
            if other[0] > begin:
                found.append((begin, other[0]))
            begin = max(begin, other[1])
        if begin < end:
            found.append((begin, end))
    return found


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)
