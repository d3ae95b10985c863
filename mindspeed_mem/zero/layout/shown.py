"""A chunk layout as text and as a picture: a bar for each chunk; in text a sequence that repeats is shown once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path

from mindspeed_mem.output import save_figure
from mindspeed_mem.zero.layout.cutting import ChunkContents, Layout

BF16 = 2  # bytes
MIB = 2**20
_BAR = 24  # columns
_MOST_CHUNKS = 40  # shown in full
_LONGEST_CYCLE = 32  # chunks
_KINDS = {
    "embedding or output": ("wte", "wpe", "embed", "lm_head", "output_layer"),
    "attention": ("attn", "attention"),
    "MLP": ("mlp",),
    "other (norms)": ("",),
}
_COLOURS = ("#8c6bb1", "#4a90d9", "#5cab7d", "#c9c9c9")
_PADDING = "#d9412f"
_LINES_UP_TO = 60  # chunks: in thinner bars lines between parameters would hide them


def bf16_mib(elements: int) -> str:
    """What so many elements take in bf16."""
    return f"{elements * BF16 / MIB:,.2f}"


def lines(layout: Layout) -> list[str]:
    """The whole table: two lines for each chunk, the second with what lies in it."""
    contents = [(one.capacity, *(piece.elements for piece in one.parameters)) for one in layout.chunks]
    rows: list[tuple[str, ...]] = []
    notes: list[str] = []
    hidden = 0
    for start, length, times in cycles(contents):
        for place in range(start, start + length):
            if len(rows) >= _MOST_CHUNKS:
                hidden += 1
                continue
            rows.append(_row(place, layout))
            notes.append(_contents(layout.chunks[place]))
        if times > 1 and hidden:
            hidden += length * (times - 1)
        elif times > 1:
            again, last = start + length, start + length * times - 1
            more = "once" if times == 2 else f"{times - 1} times"
            what = "alike" if length == 1 else f"the same {length} chunks {more} more"
            which = f"chunks {again} to {last}" if last > again else f"chunk {again}"
            notes[-1] += f"\n  {which}: {what}"
    heads = ("chunk", "elements", "MiB bf16", "used", "")
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(4)]
    table = [
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}  {row[4]}"
        for row in (heads, *rows)
    ]
    text = [table[0].rstrip()]
    for row, note in zip(table[1:], notes, strict=True):
        text += [row, *note.split("\n")]
    return text + [f"  (and {hidden} chunks more)"] * bool(hidden)


def cycles(items: Sequence[Hashable]) -> list[tuple[int, int, int]]:
    """Cuts items into sequences that repeat: (start, length, times), so that few are left to show.

    At each place the sequence is taken that saves most items by repeating, the shortest of equals; greedy.
    """
    found: list[tuple[int, int, int]] = []
    place = 0
    while place < len(items):
        saved, length, times = 0, 1, 1
        for size in range(1, min(_LONGEST_CYCLE, (len(items) - place) // 2) + 1):
            end = place + size
            while end < len(items) and items[end] == items[end - size]:
                end += 1
            repeats = (end - place) // size
            if size * (repeats - 1) > saved:
                saved, length, times = size * (repeats - 1), size, repeats
        if times == 1 and found and found[-1][2] == 1:
            start, before, _ = found.pop()
            found.append((start, before + 1, 1))
        else:
            found.append((place, length, times))
        place += length * times
    return found


def draw(layout: Layout, target: str | Path, title: str) -> None:
    """Write the picture to `target`. Raises ImportError if matplotlib is not installed."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, min(16, max(3, 1.8 + 0.22 * layout.count))), layout="constrained")
    axes = figure.subplots()
    edge = 0.4 if layout.count <= _LINES_UP_TO else 0
    for colour in (*_COLOURS, _PADDING):
        bars = [bar for place in range(layout.count) for bar in _bars(layout, place) if bar[3] == colour]
        if bars:
            rows, lefts, widths, _ = zip(*bars, strict=True)
            line = "white" if edge else "none"
            axes.barh(rows, widths, left=lefts, height=0.8, color=colour, edgecolor=line, linewidth=edge)
    axes.set_ylim(layout.count - 0.5, -0.5)
    axes.set_xlim(0, layout.largest * BF16 / MIB)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("chunk")
    axes.set_xlabel("MiB in bf16")
    axes.set_title(title, fontsize=9)
    named = dict(zip((*_KINDS, f"padding ({layout.waste_fraction:.4%})"), (*_COLOURS, _PADDING), strict=True))
    patches = [Patch(color=colour, label=name) for name, colour in named.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8)
    save_figure(figure, target)


def _row(place: int, layout: Layout) -> tuple[str, ...]:
    chunk = layout.chunks[place]
    width = max(1, round(_BAR * chunk.capacity / layout.largest))
    filled = min(width, round(_BAR * chunk.used / layout.largest))
    share = f"{100 * chunk.used / max(1, chunk.capacity):.2f} %"
    return str(place), f"{chunk.capacity:,}", bf16_mib(chunk.capacity), share, "#" * filled + "." * (width - filled)


def _contents(chunk: ChunkContents) -> str:
    first, last = chunk.parameters[0].name, chunk.parameters[-1].name
    return f"  {first}" if len(chunk.parameters) == 1 else f"  {first} to {last} ({len(chunk.parameters)} parameters)"


def _bars(layout: Layout, place: int) -> list[tuple[int, float, float, str]]:
    """(row, left, width, colour) of the parameters of one chunk and of all that is between and after them, in MiB."""
    chunk, bars, end = layout.chunks[place], [], 0
    for piece in chunk.parameters:
        bars.append((place, end, piece.offset - end, _PADDING))
        end = piece.offset + piece.elements
        bars.append((place, piece.offset, piece.elements, _colour(piece.name)))
    bars.append((place, end, chunk.capacity - end, _PADDING))
    scale = BF16 / MIB
    return [(row, left * scale, width * scale, colour) for row, left, width, colour in bars if width]


def _colour(name: str) -> str:
    norm = "norm" in name or ".ln_" in name
    kinds = zip(_KINDS.values(), _COLOURS, strict=True)
    return _COLOURS[-1] if norm else next(colour for words, colour in kinds if any(word in name for word in words))
