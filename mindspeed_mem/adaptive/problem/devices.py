"""What devices can do: a table of data sheets and measurements, and how much of these a training job reaches.

    {"h100": {"memory_gib": 79.1,
              "sheet": {"tflops": 989, "memory_gbps": 3350, "link_gbps": 64, "neighbour_gbps": 450},
              "measured": {"tflops": 794.5, "link_alone_gbps": 55.7, "link_all_gbps": 35.4},
              "sources": [{"of": "sheet", "url": "...", "read": "2026-11-23"}]}}

`memory_gib` is what torch reports, the least that was found. `tflops` are those of bf16 matrix products, dense (half of
what sheets give "with sparsity"); GB/s are of one direction, half of what sheets give for both. Measured `tflops` and
`memory_gbps` are those of the best single operator, `link_alone_gbps` of copies to the host while no other device of
the node copies, `link_all_gbps` while all do. `network_gbps` is what a device has to itself of what its node sends to
others. Either of `sheet` and `measured` may lack what the other one says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

_SHEET = ("tflops", "memory_gbps", "link_gbps", "neighbour_gbps", "network_gbps")
_MEASURED = ("tflops", "memory_gbps", "link_alone_gbps", "link_all_gbps", "neighbour_gbps", "network_gbps")
_KEYS = ("memory_gib", "sheet", "measured", "note", "sources")
_OF_MEASURED = {"tflops": 0.8}
"""Layers reach less than the best shape does. Copies and moves are taken as measured."""
_OF_SHEET = {"tflops": 0.65, "memory_gbps": 0.8, "link_alone_gbps": 0.8, "link_all_gbps": 0.55, "neighbour_gbps": 0.8}
_OF_SHEET["network_gbps"] = 0.8
"""Where nobody measured. Eight H100 that copy at once reach 0.55 of their sheet (openxla/xla#21708), NCCL some 350 of
450 GB/s on H100 (NVIDIA/nccl#986), a single kernel 0.9 of its memory's speed; the rest is assumed."""


class DeviceFileError(ValueError):
    """A table of devices cannot be used; `problems` holds one line for each reason."""

    def __init__(self, source: str, problems: list[str]):
        self.problems = [f"{source}: {one}" for one in problems]
        super().__init__("\n  ".join(self.problems))


class Device(NamedTuple):
    """Its memory, the speeds that are reached as `Machine` has them, and a sentence on where they come from."""

    memory_gib: float | None
    speeds: dict[str, float]
    said: str


def table(more: str | None = None) -> dict[str, dict[str, Any]]:
    """All devices by name; those in the file `more`, which is JSON or YAML, add to ours or replace them.

    Raises:
        DeviceFileError: the file cannot be read, or says something else than above.
    """
    found = json.loads(Path(__file__).with_name("devices.json").read_text(encoding="utf-8"))
    return found if more is None else found | _read(more)


def device(name: str, row: Mapping[str, Any], alone: bool, said: Mapping[str, object]) -> Device:
    """What a rank on such a device can count on.

    Args:
        name: what messages call it.
        row: its entry in a table.
        alone: no other device of its node copies to the host.
        said: speeds that the user gave, which need no words; those that are asked for besides `Machine`'s are there,
            as None where they were not given.
    """
    sheet, measured = row.get("sheet", {}), row.get("measured", {})
    speeds, words = {}, []
    link = "link_alone_gbps" if alone else "link_all_gbps"
    names = {"tflops": "tflops", "memory_gbps": "memory_gbps", "link_gbps": link, "tensor_gbps": "neighbour_gbps"}
    names |= {speed: "network_gbps" for speed in ("inter_node_gbps",) if speed in said}
    texts = {
        "tflops": "{:g} TFLOP/s",
        "memory_gbps": "{:g} GB/s device memory",
        "link_gbps": f"{{:g}} GB/s to the host{'' if alone else ' with all devices of a node copying'}",
        "tensor_gbps": "{:g} GB/s to its neighbours",
        "inter_node_gbps": "{:g} GB/s to other nodes",
    }
    for speed, figure in names.items():
        if figure in measured:
            share, most, origin = _OF_MEASURED.get(figure, 1.0), measured[figure], "measured"
        elif (listed := "link_gbps" if speed == "link_gbps" else figure) in sheet:
            share, most, origin = _OF_SHEET[figure], sheet[listed], "on its sheet"
        else:
            continue
        speeds[speed] = share * most
        if said.get(speed) is None:
            part = f"{100 * share:g} % of {most:g} " if share != 1 else ""
            words.append(f"{texts[speed].format(round(speeds[speed], 1))} ({part}{origin})")
    return Device(row.get("memory_gib"), speeds, f"Assumed for {name}: {', '.join(words)}." if words else "")


def _read(source: str) -> dict[str, dict[str, Any]]:
    try:
        text = Path(source).read_text(encoding="utf-8")
        if text.lstrip().startswith("{"):
            found = json.loads(text)
        else:
            import yaml  # only such a file needs it

            found = yaml.safe_load(text)
    except OSError as error:
        raise DeviceFileError(source, [f"cannot be read ({error.strerror})"]) from error
    except ImportError as error:
        raise DeviceFileError(source, ["is not JSON, and PyYAML is not installed"]) from error
    except Exception as error:  # of either parser
        raise DeviceFileError(source, [f"is neither JSON nor YAML ({error})"]) from error
    wrong: list[str] = []
    if not isinstance(found, dict) or not all(isinstance(row, dict) for row in found.values()):
        raise DeviceFileError(source, ["takes devices by name, each with memory_gib, sheet or measured"])
    for name, row in found.items():
        wrong += [f"{name}.{key}: unknown; allowed: {', '.join(_KEYS)}" for key in row if key not in _KEYS]
        numbers: list[tuple[str, Any]] = [("memory_gib", row["memory_gib"])] if "memory_gib" in row else []
        for part, allowed in (("sheet", _SHEET), ("measured", _MEASURED)):
            figures = row.get(part, {})
            if not isinstance(figures, dict):
                wrong.append(f"{name}.{part}: allowed: numbers by name")
                continue
            unknown = [key for key in figures if key not in allowed]
            wrong += [f"{name}.{part}.{key}: unknown; allowed: {', '.join(allowed)}" for key in unknown]
            numbers += [(f"{part}.{key}", value) for key, value in figures.items() if key in allowed]
        for key, value in numbers:
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                wrong.append(f"{name}.{key}: got {value!r}; allowed: a number above 0")
    if wrong:
        raise DeviceFileError(source, wrong)
    return found
