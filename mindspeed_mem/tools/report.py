"""``python -m mindspeed_mem report``: one page of a run, or of two beside each other."""

from __future__ import annotations

import argparse
from pathlib import Path

from mindspeed_mem import output
from mindspeed_mem.command_line import check_apart, check_file

DESCRIPTION = """\
Makes one HTML page of a run, from its --memory-report folder or from files: traces of --memory-trace, a metrics
file (--metrics-file of examples/pretrain_gpt.py), the profile beside an adaptive plan. The page needs no network.
Where one of these is missing, the page says how to get it. Other files in a folder, and damaged ones, are left out
and named on the page.
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", nargs="+", metavar="RUN", help="folder or files of one run")
    command.add_argument(
        "--with", dest="other", nargs="+", metavar="RUN", help="folder or files of another run, to compare with"
    )
    command.add_argument(
        "--names", nargs="+", metavar="NAME", help="names for the run, or for both (default: from the files)"
    )
    command.add_argument("--output", default="report.html", metavar="FILE", help="default: %(default)s")


def main(given: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    from mindspeed_mem.report import page, page_data

    wrong: list[str] = []
    check_file("--output", given.output, wrong)
    files = [*given.run, *(given.other or ())]
    check_apart({"--output": given.output}, {f"RUN {file}": file for file in files}, wrong)
    if missing := page.missing():
        wrong.append(missing)
    sources = [one for one in (given.run, given.other) if one]
    paths = [[Path(file) for file in files] for files in sources]
    names = given.names or ([None] if len(paths) == 1 else page_data.names_apart(*paths))
    if len(names) != len(sources):
        wrong.append(f"--names takes a name for each run: {len(sources)}, not {len(names)}")
        names = [None] * len(sources)
    elif len(set(names)) < len(names):
        wrong.append(f"--names: got {names[0]!r} for both runs; give them different ones")
    runs = []
    for files, name in zip(paths, names, strict=True):
        try:
            runs.append(page_data.read(files, name))
        except page_data.PageError as error:
            wrong.append(str(error))
    if wrong:
        given.refuse("\n  ".join(wrong))
    output.write(given.output, page.page(runs))
    print(f"{given.output}: open it in a browser")
    return 0
