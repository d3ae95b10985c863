"""What the sources of patched symbols were when the patches were written (upstream.json), and whether they still are.

`make hashes` writes the table anew for the installed packages, after the patches have been read against them:

    package: {"version_in": module with its __version__,
              "files": {version: {module: hash}}, "symbols": {target: {hash: versions}}}

A module whose whole file is a known one needs no further look, so that checking costs no more than reading the files.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib.util
import inspect
import io
import json
import re
import runpy
import sys
import textwrap
import tokenize
from pathlib import Path
from typing import Any, NamedTuple

TABLE = Path(__file__).with_suffix(".json")
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER}
_FSTRING_START = getattr(tokenize, "FSTRING_START", None)  # from Python 3.12 on an f-string is several tokens
_FSTRING_END = getattr(tokenize, "FSTRING_END", None)


@functools.cache
def table() -> dict[str, Any]:
    """The table by package: the first part of a module's name."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


def version_of(package: str) -> str | None:
    """The version of the package in use, without what a build adds to it (``+cpu``); None where there is none.

    Read from its file: the package itself may be half imported, or not to be imported yet.
    """
    name = table()[package]["version_in"]
    if name in sys.modules:
        return str(sys.modules[name].__version__).partition("+")[0]
    found = importlib.util.find_spec(package)
    for folder in (found and found.submodule_search_locations) or ():
        path = Path(folder, *name.split(".")[1:]).with_suffix(".py")
        if path.is_file():
            return str(_run(str(path))["__version__"]).partition("+")[0]
    return None


_run = functools.cache(runpy.run_path)


def within(package: str, since: str = "", before: str = "") -> bool:
    """Whether the package's version in use is one of these; of a package that is not in the table, any is."""
    version = version_of(package) if (since or before) and package in table() else None
    if version is None:
        return True
    return (not since or parts(since) <= parts(version)) and (not before or parts(version) < parts(before))


def parts(version: str) -> tuple[int, ...]:
    """The numbers at the beginning of a version: a candidate for a release (``0.17.0rc1``) counts as the release."""
    return tuple(int(part) for part in re.match(r"[\d.]*", version)[0].split(".") if part)  # type: ignore[index]


class Difference(NamedTuple):
    """Between a symbol and what the patch on it was written against."""

    text: str
    is_change: bool
    """False where this version of the package is in no table: nobody has looked at it."""


def difference(target: str, original: Any) -> Difference | None:
    """What is to be said of ``original``, found at ``target``; None where it is as it was, or not in the table."""
    package = package_of(target)
    known = table().get(package)
    if known is None or target not in known["symbols"]:
        return None
    original = inspect.unwrap(getattr(original, "__func__", original))
    home, path = _home(original)
    version, versions = version_of(package), sorted(known["files"], key=parts)
    of_version = [known["files"][version]] if version in versions else known["files"].values()
    if path and any(files.get(home) == _file_hash(path) for files in of_version):
        return None
    hashed = source_hash(original)
    checked = known["symbols"][target].get(hashed, "").split()
    if (version in checked if version in versions else checked) or home.partition(".")[0] != package:
        return None  # or others have patched it meanwhile
    if version in versions:
        return Difference(f"upstream changed: this is not {package} {version} (source {hashed})", True)
    tables = f"there are hashes for {package} {', '.join(versions)}, not for {version}"
    return Difference(f"not checked: {tables}", False)


def source_hash(function: Any) -> str:
    """12 hex digits over the source of a function or class, comments, docstrings and layout aside, the same on every
    version of Python; ``unknown`` where there is no source."""
    try:
        return _hash("\n".join(_tokens(textwrap.dedent(inspect.getsource(function)))))
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        return "unknown"


def package_of(target: str) -> str:
    """The top-level package of a symbol's name (``module:dotted.name``), or of a module's."""
    return target.partition(":")[0].partition(".")[0]


def _hash(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:12]


def _tokens(source: str) -> list[str]:
    lines, found, begins = source.splitlines(keepends=True), [], True
    depth, start = 0, (0, 0)
    for kind, text, first, last, _ in tokenize.generate_tokens(io.StringIO(source).readline):
        if kind == _FSTRING_START:
            depth, start = depth + 1, start if depth else first
        elif kind == _FSTRING_END:
            depth -= 1
            if not depth:
                found.append(_between(lines, start, last))
        if kind in _LAYOUT or depth or kind == _FSTRING_END:
            continue
        if kind == tokenize.NEWLINE and len(found) and found[-1] == "docstring":
            found.pop()
            continue
        docstring = kind == tokenize.STRING and begins and "f" not in text.lower()[: text.find(text[-1])]
        begins = kind in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        marks = {tokenize.NEWLINE: "newline", tokenize.INDENT: "indent", tokenize.DEDENT: "dedent"}
        found.append("docstring" if docstring else marks.get(kind, text))
    return found


def _between(lines: list[str], first: tuple[int, int], last: tuple[int, int]) -> str:
    inside = lines[first[0] - 1 : last[0]]
    inside[-1] = inside[-1][: last[1]]
    inside[0] = inside[0][first[1] :]
    return "".join(inside)


def _home(original: Any) -> tuple[str, str]:
    """The module that defines it, and that module's file; empty where there is none."""
    name = getattr(original, "__globals__", {}).get("__name__") or getattr(original, "__module__", None) or ""
    path = getattr(sys.modules.get(name), "__file__", None) or ""
    return (name, path) if path.endswith(".py") else ("", "")


@functools.cache
def _file_hash(path: str) -> str:
    return _hash(Path(path).read_bytes())


def write(originals: dict[str, Any], path: Path) -> None:
    """Write the table with the sources of these symbols, as those of the versions in use. A target whose symbol is None
    is not there to be looked at, and keeps what it has; one that is not named any more goes."""
    written = copy.deepcopy(table())
    for package, entry in written.items():
        version, files = version_of(package), {}
        if version is None:
            continue
        entry["symbols"] = {target: known for target, known in entry["symbols"].items() if target in originals}
        for target, original in originals.items():
            if original is None or package_of(target) != package:
                continue
            original = inspect.unwrap(getattr(original, "__func__", original))
            hashed = source_hash(original)
            if hashed == "unknown":
                continue
            known = {h: set(v.split()) - {version} for h, v in entry["symbols"].get(target, {}).items()}
            known.setdefault(hashed, set()).add(version)
            entry["symbols"][target] = {h: " ".join(sorted(v, key=parts)) for h, v in known.items() if v}
            home, file = _home(original)
            if file:
                files[home] = _file_hash(file)
        if files:
            entry["files"][version] = entry["files"].get(version, {}) | files
    path.write_text(json.dumps(written, indent=1, sort_keys=True) + "\n", encoding="utf-8")
