"""A chunk layout as a picture: a bar for each chunk, cut into its parameters, with the padding in red."""

from __future__ import annotations

from pathlib import Path

from mindspeed_mem.chunk.layout import Layout
from mindspeed_mem.chunk.layout_text import BF16, MIB
from mindspeed_mem.output import save_figure

_KINDS = {
    "embedding or output": ("wte", "wpe", "embed", "lm_head", "output_layer"),
    "attention": ("attn", "attention"),
    "MLP": ("mlp",),
    "other (norms)": ("",),
}
_COLOURS = ("#8c6bb1", "#4a90d9", "#5cab7d", "#c9c9c9")
_PADDING = "#d9412f"
_LINES_UP_TO = 60  # chunks: in thinner bars lines between parameters would hide them


def draw(layout: Layout, target: str | Path, title: str) -> None:
    """Write the picture to `target`. Raises ImportError if matplotlib is not installed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(10, min(16, max(3, 1.8 + 0.22 * layout.count))), layout="constrained")
    FigureCanvasAgg(figure)
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
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("chunk")
    axes.set_xlabel("MiB in bf16")
    axes.set_title(title, fontsize=9)
    named = dict(zip((*_KINDS, f"padding ({layout.waste_fraction:.4%})"), (*_COLOURS, _PADDING), strict=True))
    patches = [Patch(color=colour, label=name) for name, colour in named.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8)
    save_figure(figure, target)


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
