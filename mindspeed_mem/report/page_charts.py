"""The charts of a page, by plotly; each with what it shows in words and in figures for whoever cannot see it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING

from mindspeed_mem.passes import BACKWARD, FORWARD, WEIGHT
from mindspeed_mem.plan.layers import as_ranges
from mindspeed_mem.report.page_data import AGAIN, COMPUTE, IN, OUT, STALL, Cell, Run, Span, Step
from mindspeed_mem.schedule.simulation import DeadlockError, simulate

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MOST = 8
"""Ranks that a chart shows."""
NAMED = 400
"""Bars: more of them have no room for their names."""
FINEST = 2000
"""Points of a line, bars of a row, rows of a table: with more, neighbours are shown as one, and rows left out."""
COLOURS = {
    "device": "#2f7ed8",
    "without": "#e07b39",
    "host": "#3a9d5d",
    FORWARD: "#5b9bd5",
    WEIGHT: "#8e7cc3",
    BACKWARD: "#2f8f6b",
    OUT: "#d9822b",
    IN: "#b8a03a",
    AGAIN: "#9a62b3",
    STALL: "#c0392b",
    "keep": "#9aa5b1",
}
"""Which can be told apart on white, on black and, for the most part, without colours."""
_CONFIG = {
    "displaylogo": False,
    "responsive": True,
    # Newer plotlies offer to upload a chart; selecting does nothing here, and the key Tab would stop at each button.
    "modeBarButtonsToRemove": ["sendChartToCloud", "sendDataToCloud", "select2d", "lasso2d"],
    "plotlyServerURL": "",
}
_EDGE = "rgba(255,255,255,0.6)"
_GRID = "rgba(128,128,128,0.3)"


@dataclass(frozen=True)
class Chart:
    """A chart as HTML, what it shows in a sentence, and its figures as a table."""

    html: str
    words: str
    columns: Sequence[str]
    rows: list[list[str]]


def memory(run: Run) -> Chart | None:
    """Bytes over the traced step, a panel per rank."""
    from plotly.subplots import make_subplots

    steps = run.steps[:MOST]
    if not steps:
        return None
    figure = make_subplots(
        rows=len(steps),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.12 / len(steps),
        subplot_titles=[f"rank {step.rank}, stage {step.stage}" for step in steps],
    )
    rows = []
    for row, step in enumerate(steps, 1):
        for series, name, colour in _series(step):
            points = _thinned(step.counters[series])
            figure.add_scatter(
                x=[at for at, _ in points],
                y=[value for _, value in points],
                mode="lines",
                name=name,
                legendgroup=name,
                showlegend=row == 1,
                line={"shape": "hv", "width": 2, "color": colour, "dash": "dot" if "without" in name else "solid"},
                row=row,
                col=1,
            )
            highest = max(points, key=lambda point: point[1])
            rows.append([str(step.rank), name, f"{highest[1]:.2f}", f"{highest[0]:.1f}"])
        figure.update_yaxes(title_text="MiB", rangemode="tozero", row=row, col=1)
    figure.update_xaxes(title_text=_since(run), row=len(steps), col=1)
    words = f"Activations of {_of(run, steps)} over one step: on the device, on the host, and without the plan."
    return _chart(figure, 130 + 190 * len(steps), words, ("rank", "what", "highest, MiB", "at, ms"), rows)


def memory_of_both(runs: Sequence[Run]) -> Chart | None:
    """The device's activations over the traced step of the first rank of each run."""
    import plotly.graph_objects as go

    if not all(run.steps for run in runs):
        return None
    figure, rows = go.Figure(), []
    for run, dash in zip(runs, ("solid", "dash"), strict=False):
        step = run.steps[0]
        for series, name, colour in _series(step)[:1]:
            points = _thinned(step.counters[series])
            figure.add_scatter(
                x=[at for at, _ in points],
                y=[value for _, value in points],
                mode="lines",
                name=f"{run.name}: {name}",
                line={"shape": "hv", "dash": dash, "color": colour if dash == "solid" else COLOURS["without"]},
            )
            rows.append([run.name, f"{max(value for _, value in points):.2f}", f"{step.length:.1f}"])
    figure.update_yaxes(title_text="MiB", rangemode="tozero")
    figure.update_xaxes(title_text="ms since the first rank began the step")
    words = "Activations on the device over one step of the first rank of each run."
    return _chart(figure, 340, words, ("run", "highest, MiB", "step, ms"), rows)


def _series(step: Step) -> list[tuple[str, str, str]]:
    wanted = (
        ("device bytes, activations", "on the device", COLOURS["device"]),
        ("device bytes without the plan, activations", "without the plan", COLOURS["without"]),
        ("host bytes, activations", "on the host", COLOURS["host"]),
        ("device bytes, gathered chunks", "gathered chunks", COLOURS[AGAIN]),
        ("device bytes, allocated", "allocated in all", COLOURS["keep"]),
    )
    return [one for one in wanted if one[0] in step.counters]


_BECOME = ("kept", "swapped", "recomputed", "both")


def grid(run: Run) -> Chart | None:
    """Layers x operators: what becomes of each, its MiB and ms."""
    import plotly.graph_objects as go

    cells = run.grid()
    if not cells:
        return None
    layers, operators = sorted({layer for layer, _ in cells}), list(dict.fromkeys(op for _, op in cells))
    kinds = {"keep": 0, "swap": 1, "recompute": 2, "swap, recompute": 3}
    colours = (COLOURS["keep"], COLOURS[OUT], COLOURS[AGAIN], "#c2577a")
    scale = [(edge, colour) for n, colour in enumerate(colours) for edge in (n / 4, (n + 1) / 4)]
    table = [[cells.get((layer, op)) for op in operators] for layer in layers]
    figure = go.Figure(
        go.Heatmap(
            x=[op or "(between operators)" for op in operators],
            y=[run.layer(layer) for layer in layers],
            z=[[None if one is None else kinds[one.what] for one in row] for row in table],
            text=[["" if one is None else _in_cell(one) for one in row] for row in table],
            customdata=[["" if one is None else _in_words(one) for one in row] for row in table],
            texttemplate="%{text}" if len(operators) <= 20 else None,
            textfont={"size": 10, "color": "#111"},
            hovertemplate="%{y}, %{x}: %{customdata}<extra></extra>",
            colorscale=scale,
            zmin=-0.5,
            zmax=3.5,
            xgap=1,
            ygap=1,
            colorbar={"tickvals": [0, 1, 2, 3], "ticktext": _BECOME},
        )
    )
    figure.update_yaxes(autorange="reversed", type="category")
    figure.update_xaxes(type="category", tickangle=-30)
    rows = [
        [run.layer(layer), op or "(between operators)", one.what, _mib(one.moved), _mib(one.kept), _ms(one.forward)]
        for (layer, op), one in cells.items()
    ]
    counts = ", ".join(
        f"{sum(one.what == kind for one in cells.values())} {word}" for kind, word in zip(kinds, _BECOME, strict=True)
    )
    words = (
        f"What becomes of each operator's activations in a pass: {counts}; in each its MiB and the ms of its forward. "
        "What is within something that runs again does so, too."
    )
    columns = ("layer", "operator", "what", "moved, MiB", "kept by its backward, MiB", "forward, ms")
    return _chart(figure, 180 + 34 * len(layers), words, columns, rows)


def _in_cell(one: Cell) -> str:
    size = one.moved or one.kept
    parts = [f"{_mib(size)} MiB"] if size else []
    return "<br>".join(parts + ([f"{_ms(one.forward)} ms"] if one.forward is not None else []))


def _in_words(one: Cell) -> str:
    parts = [one.what]
    parts += [f"{_mib(one.moved)} MiB moved"] if one.moved else []
    parts += [f"{_mib(one.kept)} MiB needed by its backward"] if one.kept is not None else []
    parts += [f"{_ms(one.forward)} ms forward"] if one.forward is not None else []
    return ", ".join(parts)


def pipeline(run: Run) -> Chart | None:
    """Passes of each stage as they ran, and below as their order would have them, each with its stage's mean time."""
    stages = run.stages()
    if run.of_stages < 2 or not run.together:
        return None
    measured = [sorted(step.passes(), key=lambda one: one.begin) for step in stages]
    bars = [
        (f"stage {step.stage}, measured", one, _direction(one))
        for step, passes in zip(stages, measured, strict=True)
        for one in passes
    ]
    rows = [
        [str(step.stage), f"{sum(one.length for one in passes):.1f}", f"{step.length:.1f}", _idle(step, passes)]
        for step, passes in zip(stages, measured, strict=True)
    ]
    missing = sorted(set(range(run.of_stages)) - {step.stage for step in stages})
    planned = [] if missing else _planned(measured)
    bars += [(f"stage {stages[number].stage}, planned", one, _direction(one)) for number, one in planned]
    kinds = ("measured", "planned") if planned else ("measured",)
    figure = _bars(bars, [f"stage {step.stage}, {how}" for step in stages for how in kinds], _since(run))
    words = f"Passes of {len(stages)} of {run.of_stages} pipeline stages in one step."
    if planned:
        words += (
            " Planned: the same order where each pass takes its stage's mean and waits for nothing but what it works "
            f"on. That would take {max(one.end for _, one in planned):.1f} ms."
        )
    elif missing:
        words += f" What would have been planned takes a trace of each: there is none of {_stages(missing)}."
    columns = ("stage", "in passes, ms", "step, ms", "idle")
    return _chart(figure, 150 + 60 * len(stages), words, columns, rows)


def _planned(measured: Sequence[Sequence[Span]]) -> list[tuple[int, Span]]:
    """By stage; empty where some passes were not seen."""
    order = [
        [(_direction(one), one.more["micro-batch"], one.more["model chunk"]) for one in stage] for stage in measured
    ]
    if any(number is None for stage in order for _, number, _ in stage) or not all(order):
        return []
    chunks = 1 + max(chunk for stage in order for _, _, chunk in stage)
    took = {
        kind: [mean(one.length for one in stage if _direction(one) == kind) for stage in measured]
        for kind in (FORWARD, BACKWARD, WEIGHT)
        if all(any(_direction(one) == kind for one in stage) for stage in measured)
    }
    if FORWARD not in took or BACKWARD not in took:
        return []
    try:
        v = chunks == 2 and _turns_back(measured)
        weight = took.get(WEIGHT, 0.0)
        timeline = simulate(order, chunks, v=v, forward=took[FORWARD], backward=took[BACKWARD], weight=weight)
    except (DeadlockError, ValueError):
        return []
    return [
        (number, Span(COMPUTE, f"{one.work[0]} {one.work[1]}", one.start, one.end - one.start, {}))
        for number, spans in enumerate(timeline.stages)
        for one in spans
    ]


def _turns_back(measured: Sequence[Sequence[Span]]) -> bool:
    """Whether the second chunks lie in a V: then the last stage runs its own before the first stage does."""
    first, last = (
        min((one.begin for one in stage if _direction(one) == FORWARD and one.more["model chunk"] == 1), default=0.0)
        for stage in (measured[0], measured[-1])
    )
    return last < first


def _stages(numbers: Sequence[int]) -> str:
    """``stage 1``, or ``stages 0, 2-3``."""
    return f"stage{'s' * (len(numbers) > 1)} {as_ranges(numbers)}"


def _idle(step: Step, passes: Iterable[Span]) -> str:
    return f"{100 * (1 - sum(one.length for one in passes) / step.length):.0f} %" if step.length else "-"


def _direction(one: Span) -> str:
    return next((kind for kind in (FORWARD, WEIGHT) if one.name.startswith(kind)), BACKWARD)


def copies(run: Run) -> Chart | None:
    """When each rank computed, copied and ran something again."""
    steps = run.steps[:MOST]
    if not any(one.track in (OUT, IN, AGAIN) for step in steps for one in step.spans):
        return None
    seen = {one.track for step in steps for one in step.spans}
    tracks = [track for track in (COMPUTE, OUT, IN, AGAIN, STALL) if track in seen]
    bars = [(f"rank {step.rank} {COMPUTE}", one, _direction(one)) for step in steps for one in step.passes()]
    bars += [
        (f"rank {step.rank} {one.track}", one, one.track)
        for step in steps
        for one in step.spans
        if one.track in tracks[1:]
    ]
    rows = []
    for step in steps:
        for track in (OUT, IN):
            of_track = [one for one in step.spans if one.track == track]
            moved = sum(one.more["bytes"] for one in of_track) / 2**20
            rows.append([str(step.rank), track, f"{len(of_track)}", f"{moved:.2f}", f"{_length(of_track):.1f}"])
        again = [one for one in step.spans if one.track == AGAIN]
        rows.append([str(step.rank), AGAIN, f"{len(again)}", "", f"{_length(again):.1f}"])
        rows.append([str(step.rank), "copies hidden behind operators", "", "", f"{step.hidden():.1f}"])
        rows.append([str(step.rank), "computing waited for copies", "", "", f"{step.stalled():.1f}"])
    figure = _bars(bars, [f"rank {step.rank} {track}" for step in steps for track in tracks], _since(run))
    block = " Copies of this device stop its computing: none are hidden." if steps[0].copies_block else ""
    words = f"Passes, copies, second runs and waits for copies of {_of(run, steps)} in one step.{block}"
    return _chart(figure, 150 + 95 * len(steps), words, ("rank", "what", "times", "MiB", "ms"), rows)


def _length(spans: Iterable[Span]) -> float:
    return sum(one.length for one in spans)


def chunks(run: Run) -> Chart | None:
    """When each chunk was gathered."""
    steps = [step for step in run.steps[:MOST] if step.gathers]
    if not steps:
        return None
    bars = [(f"rank {step.rank} {one.name}", one, IN) for step in steps for one in step.gathers]
    rows = [
        [str(step.rank), one.name, f"{one.more['bytes'] / 2**20:.2f}", f"{one.begin:.1f}", f"{one.length:.1f}"]
        for step in steps
        for one in step.gathers
    ]
    names = sorted(
        {name for name, _, _ in bars}, key=lambda name: [int(part) for part in name.split() if part.isdigit()]
    )
    words = f"Gathers of chunks by {_of(run, steps)} in one step, from the order until they may be used."
    return _chart(
        _bars(bars, names, _since(run)), 150 + 22 * len(names), words, ("rank", "chunk", "MiB", "at, ms", "ms"), rows
    )


def iterations(run: Run) -> Chart | None:
    """What the metrics say, iteration by iteration."""
    from plotly.subplots import make_subplots

    wanted = (
        ("loss", "loss", 1.0),
        ("step_ms", "step, ms", 1.0),
        ("peak_activation_bytes", "peak of activations, MiB", 2**-20),
        ("swapped_bytes", "copied to the host, MiB", 2**-20),
        ("stall_ms", "stalled for copies, ms", 1.0),
    )
    there = [one for one in wanted if any(isinstance(row.get(one[0]), int | float) for row in run.metrics)]
    if not there:
        return None
    figure = make_subplots(rows=len(there), cols=1, shared_xaxes=True, vertical_spacing=0.04)
    ranks, rows = sorted({row.get("rank", 0) for row in run.metrics})[:MOST], []
    for number, (key, title, scale) in enumerate(there, 1):
        for rank in ranks if key != "loss" else ranks[-1:]:  # the same on all; those of the last stage have it
            points = [
                (row["iteration"], row[key] * scale)
                for row in run.metrics
                if row.get("rank", 0) == rank and isinstance(row.get(key), int | float)
            ]
            finite = [value for _, value in points if math.isfinite(value)]
            figure.add_scatter(
                x=[at for at, _ in points],
                y=[value if math.isfinite(value) else None for _, value in points],
                name=f"rank {rank}",
                mode="lines+markers",
                legendgroup=str(rank),
                showlegend=number == min(2, len(there)),
                line={"color": _OF_RANKS[ranks.index(rank)]},
                row=number,
                col=1,
            )
            if points:
                values = [value for _, value in points]
                highest = f"{max(finite):.4g}" if finite else "-"
                rows.append([title, str(rank), f"{values[0]:.4g}", f"{values[-1]:.4g}", highest])
        figure.update_yaxes(title_text=title.replace(", ", ",<br>"), row=number, col=1)
    figure.update_xaxes(title_text="iteration", row=len(there), col=1)
    words = "What the metrics file says of each iteration."
    return _chart(figure, 80 + 170 * len(there), words, ("what", "rank", "first", "last", "highest"), rows)


_OF_RANKS = ("#2f7ed8", "#e07b39", "#3a9d5d", "#9a62b3", "#b8a03a", "#c2577a", "#4aa3a3", "#7d8a97")


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """The lowest and the highest of neighbours, where there are many."""
    if len(points) <= FINEST:
        return points
    size = 2 * -(-len(points) // FINEST)
    found: list[tuple[float, float]] = []
    for begin in range(0, len(points), size):
        some = points[begin : begin + size]
        found += sorted({min(some, key=lambda one: one[1]), max(some, key=lambda one: one[1])})
    return found


def _joined(bars: Sequence[tuple[str, Span, str]]) -> list[tuple[str, Span, str]]:
    """Bars of a row that lie so near each other that no eye parts them as one, where there are many."""
    rows: dict[tuple[str, str], list[Span]] = {}
    for name, one, kind in bars:
        rows.setdefault((name, kind), []).append(one)
    near = max((one.end for _, one, _ in bars), default=0.0) / FINEST
    found = []
    for (name, kind), spans in rows.items():
        if len(spans) > FINEST:
            some: list[tuple[float, float, int]] = []
            for one in sorted(spans, key=lambda span: span.begin):
                if some and one.begin - some[-1][1] < near:
                    some[-1] = some[-1][0], max(some[-1][1], one.end), some[-1][2] + 1
                else:
                    some.append((one.begin, one.end, 1))
            spans = [Span(kind, f"{count} of them", begin, end - begin, {}) for begin, end, count in some]
        found += [(name, one, kind) for one in spans]
    return found


def _bars(bars: Sequence[tuple[str, Span, str]], names: Sequence[str], since: str) -> Figure:
    """Spans in rows, those of a kind in one colour."""
    import plotly.graph_objects as go

    figure, bars = go.Figure(), _joined(bars)
    for kind in dict.fromkeys(kind for _, _, kind in bars):
        mine = [(name, one) for name, one, of in bars if of == kind]
        figure.add_bar(
            base=[one.begin for _, one in mine],
            x=[one.length for _, one in mine],
            y=[name for name, _ in mine],
            orientation="h",
            name=kind,
            text=[_number(one) if kind in (FORWARD, BACKWARD, WEIGHT) else "" for _, one in mine]
            if len(mine) <= NAMED
            else None,
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            constraintext="none",
            cliponaxis=True,
            marker={
                "color": COLOURS[kind],
                "line": {"width": 0.5 if kind in (FORWARD, BACKWARD, WEIGHT) else 0, "color": _EDGE},
            },
            customdata=[[one.name, one.begin, one.end] for _, one in mine],
            hovertemplate="%{y}: %{customdata[0]}, %{customdata[1]:.2f} to %{customdata[2]:.2f} ms<extra></extra>",
        )
    figure.update_layout(barmode="overlay", bargap=0.15)
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=list(names), autorange="reversed")
    figure.update_xaxes(title_text=since)
    return figure


def _number(one: Span) -> str:
    """Of a pass's micro-batch; empty where it has none."""
    found = one.name.rpartition(" ")[2]
    return found if found.isdigit() else ""


def _since(run: Run) -> str:
    return "ms since the first rank began the step" if run.together else "ms since each rank began its own step"


def _chart(figure: Figure, height: int, words: str, columns: Sequence[str], rows: list[list[str]]) -> Chart:
    figure.update_layout(
        height=height,
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 12},
        margin={"l": 60, "r": 20, "t": 60, "b": 50},
        legend={"orientation": "h", "yref": "container", "y": 1.0, "yanchor": "top", "x": 0},
    )
    figure.update_xaxes(gridcolor=_GRID, zerolinecolor=_GRID, automargin=True)
    figure.update_yaxes(gridcolor=_GRID, zerolinecolor=_GRID, automargin=True)
    html = figure.to_html(full_html=False, include_plotlyjs=False, config=_CONFIG)
    return Chart(html, words, columns, first_of(rows, FINEST))


def first_of(rows: list[list[str]], count: int) -> list[list[str]]:
    """Not more rows than so many, and one that says how many there are besides."""
    if len(rows) <= count:
        return rows
    return [*rows[:count], [f"... and {len(rows) - count} more", *[""] * (len(rows[0]) - 1)]]


def _of(run: Run, shown: Sequence[Step]) -> str:
    everyone = len(run.steps)
    return f"{len(shown)} of {everyone} ranks" if len(shown) < everyone else f"{everyone} rank{'s' * (everyone > 1)}"


def _mib(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
