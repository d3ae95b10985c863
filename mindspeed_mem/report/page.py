"""The page of one run, or of two to compare: one HTML file with its charts, which needs no network."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

from mindspeed_mem import __version__
from mindspeed_mem.report import page_charts, page_data
from mindspeed_mem.report.page_data import Run
from mindspeed_mem.report.units import mib

_NEEDS = ("plotly", "jinja2")
Rows = tuple[Sequence[str], list[list[str]]]
"""Names of columns, and what stands below them."""


def missing() -> str | None:
    """What has to be installed to draw a page, in words; None: nothing."""
    absent = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    return f"the page needs {' and '.join(absent)}: pip install 'mindspeed-mem[report]'"


def page(runs: Sequence[Run]) -> str:
    """The text of the page, about 5 MB of which draw the charts.

    Args:
        runs: one or two.
    """
    import jinja2
    import plotly.offline

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    return template.render(
        title=" and ".join(run.name for run in runs),
        version=__version__,
        plotly=plotly.offline.get_plotlyjs(),
        compared=_compared(runs) if len(runs) > 1 else None,
        together=page_charts.memory_of_both(runs) if len(runs) > 1 else None,
        runs=[_of_run(number, run) for number, run in enumerate(runs)],
    )


def _of_run(number: int, run: Run) -> dict[str, Any]:
    sections = [
        ("memory", "Memory over a step", page_charts.memory(run), _NO_TRACE),
        ("plan", "The plan, by layer and operator", page_charts.grid(run), _NO_TRACE),
        ("pipeline", "The pipeline", page_charts.pipeline(run), _no_pipeline(run)),
        ("copies", "Copies and second runs", page_charts.copies(run), _NO_TRACE if not run.steps else _NO_COPIES),
        ("chunks", "Chunks", page_charts.chunks(run), "No chunks were gathered in a traced step."),
        ("iterations", "Iterations", page_charts.iterations(run), _NO_METRICS),
    ]
    tables: list[tuple[str, Rows | None, str]] = [
        ("Ranks", _ranks(run), _NO_RUN),
        ("Chunks, by rank", _chunks(run), ""),
        ("Recomputed, in the whole run", _recomputed(run), ""),
        ("Pinned", _pinned(run), "Nobody else held an activation that was to leave."),
        ("For lack of memory, in the step", _marks(run), _nothing_lacked(run)),
        ("No effect", _notices(run), "Everything that was set had an effect."),
        ("Settings", _pairs(run, "settings"), _NO_RUN),
        ("Versions", _pairs(run, "versions"), _NO_RUN),
    ]
    return {
        "name": run.name,
        "id": f"run{number}",
        "facts": _facts(run),
        "remarks": run.remarks,
        "sections": sections,
        "tables": [(title, rows, why if run.about or why == _NO_RUN else _NO_RUN) for title, rows, why in tables],
    }


def _nothing_lacked(run: Run) -> str:
    """What stands in the place of an empty table: other steps may have lacked memory."""
    nothing = "No activation had to leave and no operator to run again"
    evicted, times = (sum(row[key] for row in run.ranks) for key in ("evicted_bytes", "evictions"))
    if not times:
        return f"{nothing}, in no step."
    whole = f"in the whole run {mib(evicted)} MiB had to leave, in {times} activations"
    return f"{nothing} in the step that is shown; {whole}."


_NO_TRACE = "There is no trace: run with --memory-report DIR, or give the files of --memory-trace."
_NO_RUN = "There is no run.json: it is written when a run with --memory-report DIR ends."
_NO_METRICS = "There is no metrics file: examples/pretrain_gpt.py writes one with --metrics-file."
_ONE_STAGE = "There is one pipeline stage."
_NO_COPIES = "Nothing was copied or ran again in the traced step."


def _no_pipeline(run: Run) -> str:
    if not run.steps:
        return _NO_TRACE
    return _ONE_STAGE if run.of_stages < 2 else "The ranks have traced no step in common."


def _facts(run: Run) -> list[str]:
    facts = []
    if run.about:
        facts.append(run.about["date"])
    if run.steps:
        which = f"step {run.steps[0].number}" if run.together else "the last step"
        facts.append(f"{which} of {len(run.steps)} rank{'s' * (len(run.steps) > 1)} is shown")
    if run.metrics:
        facts.append(f"{len({row['iteration'] for row in run.metrics})} iterations")
    return facts


MOST_ROWS = 100
"""Of a table that has a row for each operator or moment."""


def _table(columns: Sequence[tuple[str, Callable[[Any], str]]], rows: Sequence[Any]) -> Rows | None:
    return ([name for name, _ in columns], [[show(row) for _, show in columns] for row in rows]) if rows else None


def _most_of(
    columns: Sequence[tuple[str, Callable[[Any], str]]], rows: Sequence[Any], size: Callable[[Any], float]
) -> Rows | None:
    """The largest rows first, and of many these only."""
    found = _table(columns, sorted(rows, key=size, reverse=True))
    return found and (found[0], page_charts.first_of(found[1], MOST_ROWS))


def _ranks(run: Run) -> Rows | None:
    steps = {step.rank: step for step in run.steps}

    def of_step(show: Callable[[Any], float], row: dict[str, Any]) -> str:
        return f"{show(steps[row['rank']]):.1f}" if row["rank"] in steps else "-"

    columns: list[tuple[str, Callable[[Any], str]]] = [
        ("rank", lambda row: str(row["rank"])),
        ("peak, MiB", lambda row: mib(row["peak_bytes"])),
        ("without the plan", lambda row: mib(row["peak_bytes_without"])),
        ("out, whole run", lambda row: mib(row["bytes_out"])),
        ("in", lambda row: mib(row["bytes_in"])),
        ("recomputed", lambda row: mib(row["recomputed_bytes"])),
        ("host peak", lambda row: mib(row["host_peak_bytes"])),
        ("stalled, ms", lambda row: f"{1e3 * row['stall_seconds']:.1f}"),
        ("evicted", lambda row: f"{mib(row['evicted_bytes'])} in {row['evictions']}"),
        ("copying in the step, ms", functools.partial(of_step, lambda step: step.copying())),
        ("of that hidden", functools.partial(of_step, lambda step: step.hidden())),
        ("stalled in it", functools.partial(of_step, lambda step: step.stalled())),
    ]
    return _table(columns, run.ranks)


def _chunks(run: Run) -> Rows | None:
    columns: list[tuple[str, Callable[[Any], str]]] = [
        ("rank", lambda row: str(row["rank"])),
        ("chunks", lambda row: str(row["chunks"])),
        ("on the host", lambda row: str(row["on_host"])),
        ("on the host, MiB", lambda row: mib(row["host_bytes"])),
        ("gathered, MiB", lambda row: mib(row["counts"]["gathered_bytes"])),
        ("gathers", lambda row: str(row["counts"]["gathers"])),
        ("ahead of use", lambda row: str(row["counts"]["ahead"])),
        ("peak, MiB", lambda row: mib(row["counts"]["peak_bytes"])),
    ]
    return _table(columns, (run.about or {}).get("chunks", []))


def _recomputed(run: Run) -> Rows | None:
    rows = [(rank["rank"], one) for rank in run.ranks for one in rank["recomputed_by_operator"]]
    columns: list[tuple[str, Callable[[Any], str]]] = [
        ("rank", lambda row: str(row[0])),
        ("layer", lambda row: run.layer(row[1]["layer"])),
        ("operator", lambda row: row[1]["op"] or page_data.WHOLE),
        ("dropped, MiB", lambda row: mib(row[1]["bytes"])),
        ("second runs", lambda row: str(row[1]["runs"])),
    ]
    return _most_of(columns, rows, lambda row: row[1]["bytes"])


def _pinned(run: Run) -> Rows | None:
    rows = [(rank["rank"], one) for rank in run.ranks for one in rank["pinned"]]
    columns: list[tuple[str, Callable[[Any], str]]] = [
        ("rank", lambda row: str(row[0])),
        ("layer", lambda row: run.layer(row[1]["layer"])),
        ("operator", lambda row: row[1]["op"] or "layer"),
        ("MiB", lambda row: mib(row[1]["bytes"])),
        ("by", lambda row: row[1]["by"]),
    ]
    return _most_of(columns, rows, lambda row: row[1]["bytes"])


def _marks(run: Run) -> Rows | None:
    rows = [(step.rank, *mark) for step in run.steps for mark in step.marks]
    columns: list[tuple[str, Callable[[Any], str]]] = [
        ("rank", lambda row: str(row[0])),
        ("ms into the step", lambda row: f"{row[1]:.1f}"),
        ("what", lambda row: row[2]),
        ("times", lambda row: str(row[3])),
    ]
    return _most_of(columns, rows, lambda row: row[3])


def _notices(run: Run) -> Rows | None:
    found = _table([("what was said", str)], (run.about or {}).get("notices", []))
    return found and (found[0], page_charts.first_of(found[1], MOST_ROWS))


def _pairs(run: Run, what: str) -> Rows | None:
    pairs = sorted((run.about or {}).get(what, {}).items())
    return _table([("what", lambda pair: pair[0]), ("value", lambda pair: str(pair[1]))], pairs)


def _compared(runs: Sequence[Run]) -> Rows | None:
    """What both runs have: the highest of their ranks, the second beside the first."""
    found: list[list[str]] = []
    for name, unit, of in _FIGURES:
        values = [of(run) for run in runs]
        if any(value is None for value in values):
            continue
        before, after = (float(value) for value in values if value is not None)
        ratio = f"{after / before:.3f}" if before else "-"
        found.append([name, f"{before:.2f} {unit}", f"{after:.2f} {unit}", ratio])
    return (["highest of the ranks", *(run.name for run in runs), "ratio"], found) if found else None


def _of_ranks(key: str, scale: float) -> Callable[[Run], float | None]:
    return lambda run: max((row[key] * scale for row in run.ranks), default=None)


def _of_metrics(key: str, scale: float) -> Callable[[Run], float | None]:
    """In the last half of the iterations: the first ones make what stays."""

    def found(run: Run) -> float | None:
        last = max((row["iteration"] for row in run.metrics), default=0)
        return max(
            (row[key] * scale for row in run.metrics if 2 * row["iteration"] > last and _is_number(row.get(key))),
            default=None,
        )

    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


_FIGURES: tuple[tuple[str, str, Callable[[Run], float | None]], ...] = (
    ("peak of activations", "MiB", _of_ranks("peak_bytes", 2**-20)),
    ("copied to the host", "MiB", _of_ranks("bytes_out", 2**-20)),
    ("recomputed", "MiB", _of_ranks("recomputed_bytes", 2**-20)),
    ("host memory, peak", "MiB", _of_ranks("host_peak_bytes", 2**-20)),
    ("stalled for copies", "ms", _of_ranks("stall_seconds", 1e3)),
    ("the traced step", "ms", lambda run: max((step.length for step in run.steps), default=None)),
    ("longest step, last half of the iterations", "ms", _of_metrics("step_ms", 1.0)),
    ("peak of activations, last half", "MiB", _of_metrics("peak_activation_bytes", 2**-20)),
)
