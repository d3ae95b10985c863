"""`make wheel-check`: the package as pip installs it, on each Python that is found, outside the checkout.

    python -m tests.wheels [3.10 3.13 ...] [--folder FOLDER] [--keep]

Builds the wheel from a copy of the sources; then, one Python after the other: a fresh environment, torch for the CPU
(.ci/cpu-torch), the wheel with its extras as pip resolves them, and in an empty folder `python -m mindspeed_mem doctor`
and `demo`. The exit status is 1 if one of them fails, or a Python that was asked for is not there.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("mindspeed_mem", "patches", "examples", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
EXTRAS = "megatron,adaptive,report"
OF_CUDA = re.compile(r"^Requires-Dist: (nvidia|cuda|triton).*\n", re.MULTILINE)
WHERE = "import mindspeed_mem, mindspeed_mem.patches as p; print(mindspeed_mem.__file__, *p.__path__)"


class Failed(Exception):
    """What did not work, with what it printed."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="3.X", help="those of Python (all that are found)")
    parser.add_argument("--folder", type=Path, help="where environments go (a temporary one)")
    parser.add_argument("--keep", action="store_true", help="leave the environments there")
    parser.add_argument("--torch", default=pinned_torch(), help="its version")
    given = parser.parse_args(arguments)
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        wheel = build(folder)
        print(f"{wheel.name}: {wheel.stat().st_size // 1024} KiB", flush=True)
        for version in given.versions or PYTHONS:
            python = find(version)
            if python is None:
                results[version] = "FAILED: not found" if given.versions else "not found, NOT RUN"
            else:
                try:
                    results[version] = checked(python, wheel, folder / f"python{version}", given.torch)
                except Failed as error:
                    results[version] = f"FAILED: {error}"
                if not given.keep:
                    shutil.rmtree(folder / f"python{version}", ignore_errors=True)
            print(f"Python {version}: {results[version]}", flush=True)
    return int(any(result.startswith("FAILED") for result in results.values()))


def pinned_torch() -> str:
    return re.findall(r"^torch==(\S+)$", (ROOT / "requirements-cpu.txt").read_text(), re.MULTILINE)[0]


def build(folder: Path) -> Path:
    """The wheel, from a copy: a build folder of the checkout could hide a file that is missing."""
    copy = folder / "sources"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy)
    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder / "wheel", copy], folder)
    shutil.rmtree(copy)
    [wheel] = (folder / "wheel").glob("mindspeed_mem-*.whl")
    return wheel


def find(version: str) -> str | None:
    """An interpreter of that version which starts: on PATH, or pyenv's."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [f"python{version}", *sorted(map(str, root.glob(f"{version}.*/bin/python3")))]
    code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    for candidate in candidates:
        path = shutil.which(candidate)
        if path and subprocess.run([path, "-c", code], capture_output=True, text=True).stdout.strip() == version:
            return path
    return None


def checked(python: str, wheel: Path, folder: Path, torch: str) -> str:
    """What was installed, and what the demo printed; raises Failed."""
    shutil.rmtree(folder, ignore_errors=True)
    work = folder / "work"
    work.mkdir(parents=True)
    run([python, "-m", "venv", folder / "venv"], work)
    own = folder / "venv" / "bin" / "python"
    run([ROOT / ".ci" / "cpu-torch", own, torch], work)
    packages = Path(run([own, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], work).strip())
    [metadata] = packages.glob("torch-*.dist-info/METADATA")
    metadata.write_text(OF_CUDA.sub("", metadata.read_text()))  # or pip brings what a CPU has no use for
    run([own, "-m", "pip", "install", "--quiet", f"{wheel}[{EXTRAS}]"], work)
    for place in run([own, "-c", WHERE], work).split():
        if not Path(place).is_relative_to(packages):
            raise Failed(f"imported from {place}, not from the wheel")
    doctor = run([own, "-m", "mindspeed_mem", "doctor"], work)
    demo = run([own, "-m", "mindspeed_mem", "demo", "--device", "cpu"], work)
    if demo.count(" yes") != 3 or not (work / "mindspeed_mem_demo" / "page.html").is_file():
        raise Failed(f"the demo:\n{demo}")
    return f"works\n  {doctor.splitlines()[0]}\n" + re.sub("^", "  ", demo.strip(), flags=re.MULTILINE)


def run(command: Sequence[str | Path], folder: Path) -> str:
    """What a command prints, without what would lead it back to the checkout."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "MINDSPEED_MEM"))}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run([*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        printed = (done.stdout + done.stderr)[-6000:]
        raise Failed(f"{' '.join(map(str, command))}: exit status {done.returncode}\n{printed}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
