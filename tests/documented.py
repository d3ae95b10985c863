"""What README and docs show: blocks, commands and what these print."""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
TASKS = [
    ROOT / "docs" / f"{name}.md"
    for name in (
        *("out-of-memory", "long-sequence", "moe", "pipeline-imbalance", "small-host", "choosing-a-layout"),
        *("reading-the-report", "writing-a-plan", "before-a-big-run", "upgrading"),
    )
]
"""Pages of one task each, whose commands take long: only --sweep runs them."""

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


class Command(NamedTuple):
    block: Block
    text: str
    shown: str


def blocks(*languages: str) -> list[Block]:
    return [block for page in [README, *DOCS] for block in blocks_of(page) if block.language in languages]


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in FENCED.finditer(text):
        yield Block(page, text.count("\n", 0, found.start()) + 1, *found.groups())


def commands() -> list[Command]:
    """What stands behind "$ ", lines that end with a backslash joined, with the lines that it prints."""
    found = []
    for block in blocks("console"):
        for part in re.split(r"^\$ ", block.text.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            found.append(Command(block, command, shown))
    return found


def program(block: Block) -> str | None:
    """The file that a block of Python is, if its first line says so."""
    named = re.match(r"# (\w+\.py)\n", block.text)
    return named and named[1]


def prints(shown: str, printed: str) -> bool:
    """Whether that is what a page shows; "..." there stands for anything, white space for any."""
    return doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)


ELSEWHERE = {
    "make": "it makes environments, or takes hours",
    "benchmarks/swap.py": "the rounds of a benchmark take long",
    "build-allocator": "it writes into the environment; tests/memory/test_delegating_allocator.py builds it",
    "gpt2_medium": "too large for a test; tests/examples/test_gemini.py trains smaller ones",
}


def why_not(command: Command) -> str | None:
    """Why tests/examples/test_pages.py does not run it; None: it does, with --sweep."""
    words = command.text.split()
    for mark, reason in ELSEWHERE.items():
        if mark in words:
            return reason
    beside = {program(block) for block in blocks_of(command.block.page)} - {None}
    return "tests/unit/test_docs.py runs the programs that pages hold" if beside & set(words) else None
