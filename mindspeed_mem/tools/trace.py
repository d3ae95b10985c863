"""``python -m mindspeed_mem trace``: the traces of all ranks in one file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mindspeed_mem import output
from mindspeed_mem.command_line import check_apart, check_file
from mindspeed_mem.report import trace_file

DESCRIPTION = """\
Merges the files that --memory-trace wrote, one per rank, into one: a process for each rank, on one clock.
Open the result at https://ui.perfetto.dev or in chrome://tracing.
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("files", nargs="+", metavar="FILE", help="traces of one run, one file per rank")
    command.add_argument("--output", required=True, metavar="FILE", help="the merged file to write")


def main(given: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    wrong: list[str] = []
    check_file("--output", given.output, wrong)
    check_apart({"--output": given.output}, {f"FILE {file}": file for file in given.files}, wrong)
    try:
        trace = trace_file.merged(map(Path, given.files))
    except trace_file.TraceError as error:
        wrong.append(str(error))
    if wrong:
        given.refuse("\n  ".join(wrong))
    output.write(given.output, json.dumps(trace))
    ranks = trace["otherData"]["ranks"]
    print(f"{given.output}: {len(ranks)} rank{'s' * (len(ranks) != 1)}, {len(trace['traceEvents'])} events")
    return 0
