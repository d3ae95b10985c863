"""How --pipeline-stages splits a model's layers over its pipeline, read from either of its two forms.

With P stages of V virtual stages each, the model has P * V parts, in the order in which a micro-batch runs through
them: chunk 0 of all stages, then chunk 1 of all, and so on. Any part may have no layers. The embedding stands in the
first part; multi-token-prediction layers, output head and loss stand in the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_mem.schedule.checks import ScheduleError


@dataclass(frozen=True)
class LayerSplit:
    """The layers of a model in parts."""

    counts: tuple[int, ...]
    """Decoder layers of each part, in the model's order."""
    stages: int
    mtp_layers: int = 0

    @property
    def virtual_stages(self) -> int:
        return len(self.counts) // self.stages

    @property
    def layout(self) -> str:
        """The same as Megatron's ``pipeline_model_parallel_layout``, such as ``Ett|ttt|tL``."""
        parts = ["t" * count for count in self.counts]
        parts[0] = "E" + parts[0]
        parts[-1] += "m" * self.mtp_layers + "L"
        return "|".join(parts)


def split(
    entries: Sequence[int],
    num_layers: int,
    stages: int,
    virtual_stages: int | None = None,
    mtp_layers: int = 0,
) -> LayerSplit:
    """What `entries` say: the layers of each part or, if they cannot be that, the part of each layer.

    `virtual_stages` None: not known, so that the number of counts tells it; parts of layers are then stages. Where
    entries fit both forms (``1,1,1,1``: 4 layers on 2 stages), they are counts. Raises ScheduleError with all that is
    wrong with either form.
    """
    parts = stages * (virtual_stages or 1)
    wrong = _as_counts(entries, num_layers, stages, virtual_stages)
    if not wrong:
        return LayerSplit(tuple(entries), stages, mtp_layers)
    wrong_too = _as_parts(entries, num_layers, parts)
    if not wrong_too:
        return LayerSplit(tuple(entries.count(part) for part in range(parts)), stages, mtp_layers)
    what = "pipeline stage" if (virtual_stages or 1) == 1 else "chunk (of all stages the first, then the second)"
    raise ScheduleError(
        f"--pipeline-stages: got {','.join(map(str, entries))} for {num_layers} layers on "
        f"{_sizes(stages, virtual_stages)}: neither the layers of each {what} ({'; '.join(wrong)}) "
        f"nor the {what} of each layer ({'; '.join(wrong_too)})"
    )


def parts_of_layers(counts: Sequence[int]) -> tuple[int, ...]:
    """The part of each layer, which says the same as the layers of each part."""
    return tuple(part for part, count in enumerate(counts) for _ in range(count))


def describes(layout: str, entries: Sequence[int]) -> bool:
    """Whether this layout of Megatron's, written out without repetitions, is the split that `entries` say."""
    counts = tuple(part.count("t") for part in layout.split("|"))
    written_out = layout.startswith("E") and layout.endswith("L") and set(layout) <= set("EtmL|")
    return written_out and tuple(entries) in (counts, parts_of_layers(counts))


def _as_counts(entries: Sequence[int], num_layers: int, stages: int, virtual_stages: int | None) -> list[str]:
    found = []
    if virtual_stages is None and len(entries) % stages:
        found.append(f"{_numbers(entries)}, must be {stages}, or a multiple of that for virtual stages")
    if virtual_stages is not None and len(entries) != stages * virtual_stages:
        found.append(f"{_numbers(entries)}, must be {stages * virtual_stages}")
    if sum(entries) != num_layers:
        found.append(f"{sum(entries)} in all, must be {num_layers}")
    return found


def _as_parts(entries: Sequence[int], num_layers: int, parts: int) -> list[str]:
    found = []
    if len(entries) != num_layers:
        found.append(f"{_numbers(entries)}, must be {num_layers}")
    outside = sorted({entry for entry in entries if entry not in range(parts)})
    if outside:
        found.append(f"got {', '.join(map(str, outside))}, must be from 0 to {parts - 1}")
    back = next((layer for layer in range(1, len(entries)) if entries[layer] < entries[layer - 1]), None)
    if back is not None:
        found.append(f"{entries[back]} comes after {entries[back - 1]}, must not be less")
    return found


def _numbers(entries: Sequence[int]) -> str:
    return "1 number" if len(entries) == 1 else f"{len(entries)} numbers"


def _sizes(stages: int, virtual_stages: int | None) -> str:
    text = "1 pipeline stage" if stages == 1 else f"{stages} pipeline stages"
    return text if virtual_stages is None else f"{text} of {virtual_stages} chunk{'s' * (virtual_stages > 1)}"
