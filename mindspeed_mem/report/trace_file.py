"""Files of traces in Chrome's format, which Perfetto reads, too: one per rank, and all ranks in one.

A file grows by a step at a time and is whole after each. Times in it are microseconds since its own ``origin_ns``, a
moment in nanoseconds since 1970: the ranks' files are put together by that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mindspeed_mem import output

VERSION = 1
_END = "\n]}\n"


class TraceError(ValueError):
    """Files that cannot be put together; the message has all reasons."""


def file_of_rank(file: Path, rank: int) -> Path:
    """``trace.json`` of rank 3 is ``trace.rank3.json``."""
    return file.with_name(f"{file.stem}.rank{rank}{file.suffix}")


def begin(file: Path, about: dict[str, Any], events: Iterable[dict[str, Any]]) -> None:
    """Write a new file.

    Args:
        about: its ``rank`` and ``origin_ns`` at least.
        events: of Chrome's format; at least one.
    """
    head = json.dumps({"displayTimeUnit": "ms", "otherData": {"version": VERSION, **about}})[:-1]
    output.write(file, f'{head}, "traceEvents": [\n{_lines(events)}{_END}')


def extend(file: Path, events: Sequence[dict[str, Any]]) -> None:
    """Add events to a file that `begin` has written. Where that raises OSError, the file is as it was before."""
    if not events:
        return
    data = memoryview(f",\n{_lines(events)}{_END}".encode())
    with open(file, "r+b", buffering=0) as opened:
        end = opened.seek(-len(_END), os.SEEK_END)
        try:
            while data:
                data = data[opened.write(data) :]
        except OSError:
            opened.truncate(end)
            opened.seek(end)
            opened.write(_END.encode())  # it had room for that
            raise


def merged(files: Iterable[Path]) -> dict[str, Any]:
    """The traces of several ranks as one, by one clock. Raises TraceError."""
    found: dict[int, tuple[Path, dict[str, Any]]] = {}
    wrong = []
    for file in files:
        try:
            trace = json.loads(file.read_text(encoding="utf-8"))
            about, _ = trace["otherData"], trace["traceEvents"]
            rank, _, version = about["rank"], about["origin_ns"], about["version"]
        except (ValueError, TypeError, KeyError, RecursionError):
            wrong.append(f"{file} is no trace of --memory-trace")
            continue
        except OSError as error:
            wrong.append(f"{file}: {error.strerror}")
            continue
        if version != VERSION:
            wrong.append(f"{file} is a trace of another version ({version}; this one reads {VERSION})")
        elif rank in found:
            wrong.append(f"{file} and {found[rank][0]} are both of rank {rank}; give one file of each rank of one run")
        else:
            found[rank] = file, trace
    if wrong:
        raise TraceError("\n  ".join(wrong))
    origin = min(trace["otherData"]["origin_ns"] for _, trace in found.values())
    events = []
    for _, (_, trace) in sorted(found.items()):
        later = (trace["otherData"]["origin_ns"] - origin) / 1e3
        events += [
            {**event, "ts": round(event["ts"] + later, 3)} if "ts" in event else event for event in trace["traceEvents"]
        ]
    about = {"version": VERSION, "ranks": sorted(found), "origin_ns": origin}
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}


def _lines(events: Iterable[dict[str, Any]]) -> str:
    return ",\n".join(map(json.dumps, events))
