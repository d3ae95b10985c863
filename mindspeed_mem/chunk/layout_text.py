"""A chunk layout as text: a row with a bar for each chunk; a sequence of chunks that repeats is shown once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from mindspeed_mem.chunk.layout import ChunkContents, Layout

BF16 = 2  # bytes
MIB = 2**20
_BAR = 24  # columns
_MOST_CHUNKS = 40  # shown in full
_LONGEST_CYCLE = 32  # chunks


def mib(elements: int) -> str:
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
            what = "alike" if length == 1 else f"the same {length} chunks {_times(times - 1)} more"
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
    found, place = [], 0
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


def _row(place: int, layout: Layout) -> tuple[str, ...]:
    chunk = layout.chunks[place]
    width = max(1, round(_BAR * chunk.capacity / layout.largest))
    filled = min(width, round(_BAR * chunk.used / layout.largest))
    share = f"{100 * chunk.used / max(1, chunk.capacity):.2f} %"
    return str(place), f"{chunk.capacity:,}", mib(chunk.capacity), share, "#" * filled + "." * (width - filled)


def _contents(chunk: ChunkContents) -> str:
    first, last = chunk.parameters[0].name, chunk.parameters[-1].name
    return f"  {first}" if len(chunk.parameters) == 1 else f"  {first} to {last} ({len(chunk.parameters)} parameters)"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
