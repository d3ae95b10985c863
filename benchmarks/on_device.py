"""Everything that is to be known of an accelerator, in pieces, in order of value, within the time that there is.

    python benchmarks/on_device.py                              # the accelerator that is there; 25 minutes
    python benchmarks/on_device.py --device npu --minutes 9     # again: goes on where it stopped
    python benchmarks/on_device.py --only adaptive              # this piece, also if it has been run
    python benchmarks/on_device.py --device cpu --tiny          # tries the command itself out

Nothing is installed and nothing fetched: torch, megatron-core and wrapt have to be there. Each piece is a process of
its own; those that are not timed run side by side where there is room. One that takes longer than its limit is stopped,
one that fails is noted with the end of its output, and the others go on. Results go to a folder, a JSON file for each
piece and a page (README.md), which is written anew after each piece. A piece whose file there is of this source and
this device is not run again, unless it failed or --only names it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT)]

from on_device_page import DONE, FAILED, NO_TIME, SKIPPED, STOPPED, page, wrong  # noqa: E402

from mindspeed_mem import output  # noqa: E402

SOFT = 0.8
"""Of a piece's limit: what a benchmark that can end earlier by itself is told."""
KEPT = 60
"""Lines of output."""
AT_ONCE, ROOM = 4, 12e9
"""Pieces that are not timed, where there are twice as many processors, and so many bytes of the device for each."""


@dataclass(frozen=True)
class Job:
    """What a piece may need to know for its command."""

    device: dict[str, Any]
    """See `probe`."""
    tiny: bool
    minutes: float
    """That a benchmark should take at most."""
    target: Path
    """Where its figures go."""

    def words(self, script: str, *more: object, json: bool = True) -> list[str]:
        """The command of a benchmark."""
        where = ["--json", self.target] if json else []
        return [*map(str, (HERE / script, *more, "--device", self.device["type"], *where))]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One process."""

    name: str
    minutes: float
    """At most."""
    command: Callable[[Job], list[str]]
    """What follows the interpreter."""
    read: Callable[[Job, str], Any] = lambda job, printed: json.loads(job.target.read_text())
    """Its figures, from its file and what it printed."""
    absent: Callable[[dict[str, Any]], str | None] = lambda device: None
    """Why it cannot be run here on this device."""
    timed: bool = False
    """Its figures are times: nothing else may run meanwhile."""


# ---- the pieces
def bits(group: str, minutes: float, absent: Callable[[dict[str, Any]], str | None] = lambda device: None) -> Piece:
    """One group of features beside stock Megatron."""
    return Piece(
        name=f"bits-{group}",
        minutes=minutes,
        command=lambda job: job.words("bits.py", group, *["--tiny"] * job.tiny),
        absent=absent,
    )


def no_transformer_engine(device: dict[str, Any]) -> str | None:
    if device["type"] != "cuda":
        return f"it is for CUDA, and this is {device['type']}"
    if importlib.util.find_spec("transformer_engine") is None:
        return "transformer_engine is not installed"
    # What is installed may be for another torch or CUDA; in a process of its own, as it takes memory of the device.
    tried = subprocess.run(
        [sys.executable, "-c", "import transformer_engine.pytorch"], capture_output=True, text=True, check=False
    )
    said = tried.stderr.strip().splitlines()[-1:] or [f"exit status {tried.returncode}"]
    return f"transformer_engine cannot be imported: {said[0]}" if tried.returncode else None


def gpu_tests(job: Job) -> list[str]:
    """Only the files with such tests: to collect all others takes longer than to run these."""
    marked = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    return ["-m", "pytest", "-q", "-rf", "-m", "gpu", "-p", "no:cacheprovider", *map(str, marked)]


def read_tests(job: Job, printed: str) -> dict[str, Any]:
    lines = printed.splitlines()
    closing = [line for line in lines if re.search(r"\d+ (passed|failed|skipped|error).* in [\d.]+s", line)]
    return {"closing": closing[-1].strip("= "), "failed": [one for one in lines if one.startswith(("FAILED", "ERROR"))]}


def no_gpu_tests(device: dict[str, Any]) -> str | None:
    absent = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if device["type"] != "cuda":
        return f"these tests are for CUDA, and this is {device['type']}"
    return f"{' and '.join(absent)} not installed" if absent else None


def swap(job: Job) -> list[str]:
    tiny = ("--shape", 2, 32, 2, 64, 32, 1, 2, 64, "--rounds", 1)
    return job.words("swap.py", "--minutes", job.minutes, *tiny if job.tiny else ())


def recompute(job: Job) -> list[str]:
    tiny = ("--shape", 2, 32, 2, 64, 32, 1, 2, 64, "--rounds", 1, "--only", "selective: mlp;norms;swap everything")
    return job.words("recompute.py", "--minutes", job.minutes, *tiny if job.tiny else ())


def host_cost(job: Job) -> list[str]:
    tiny = ("--rounds", 1, "--steps", 1, "--only", "swap everything", "recompute norms")
    return job.words("host_cost.py", "--minutes", job.minutes, *tiny if job.tiny else ())


def attach(job: Job) -> list[str]:
    return job.words("attach.py", "--minutes", job.minutes, *["--tiny", "--dtype", "fp32", "--rounds", 1] * job.tiny)


def no_transformers(device: dict[str, Any]) -> str | None:
    return None if importlib.util.find_spec("transformers") else "transformers is not installed"


def adaptive(job: Job) -> list[str]:
    """The model of the goals; on a smaller device a smaller one, of which a step without recompute fits."""
    how: tuple[object, ...] = ("--finalists", 3, "--losses", 2, "--minutes", job.minutes)
    memory, whole_model = job.device["memory"] or 0, 125e9
    if job.tiny:
        how = ("--shape", 3, 64, 2, 128, 64, 1, 2, 64, "--rounds", 1, "--caps", 0.5, "--finalists", 1)
        how += ("--margin", 0.02, "--losses", 1)
    elif job.device["type"] != "cpu" and memory < whole_model:
        micro_batch = 4 if memory > 48e9 else 1
        layers = int((0.9 * memory - 4e9 - micro_batch * 3e9) / (0.8e9 + micro_batch * 1.3e9))
        how += ("--shape", max(layers, 2), 4096, 32, 11008, 8192, micro_batch, 1, 32000, "--caps", 0.5)
    return job.words("adaptive.py", *how)


def chunk_zero(job: Job) -> list[str]:
    how: tuple[object, ...] = ("--layers", 2, "--vocab", 8192, "--rounds", 5, "--minutes", job.minutes)
    if job.tiny:
        sizes = {"layers": 1, "hidden": 32, "heads": 2, "ffn": 64, "seq-length": 32, "vocab": 64, "rounds": 1}
        how = ("--only", "stage 1, host;everything gathered")
        how += tuple(word for name, size in sizes.items() for word in (f"--{name}", size))
    return job.words("chunk_zero.py", "--ranks", 1, *how)


PIECES = (  # in order of value
    Piece(
        name="doctor",
        minutes=2,
        command=lambda job: ["-m", "mindspeed_mem", "doctor", "--json"],
        read=lambda job, printed: json.loads(printed),
    ),
    Piece(name="gpu-tests", minutes=5, command=gpu_tests, read=read_tests, absent=no_gpu_tests),
    bits("activations", minutes=4),
    bits("transformer-engine", minutes=4, absent=no_transformer_engine),
    bits("chunks", minutes=4),
    bits("gemini", minutes=2),
    bits("pipeline", minutes=3),
    Piece(name="swap", minutes=4, command=swap, timed=True),
    Piece(name="recompute", minutes=6, command=recompute, timed=True),
    Piece(name="host_cost", minutes=4, command=host_cost, timed=True),
    Piece(name="attach", minutes=4, command=attach, absent=no_transformers, timed=True),
    Piece(name="adaptive", minutes=8.9, command=adaptive, timed=True),
    Piece(name="chunk_zero", minutes=7, command=chunk_zero, timed=True),
)


# ---- the command
def main() -> int:
    given = _arguments()
    if given.probe:
        print(json.dumps(probe(given.device)))
        return 0
    chosen = _chosen(given.only)
    device = _probed(given.device)
    if device["type"] == "cpu" and given.device == "auto":
        raise SystemExit("there is no accelerator that torch can use; --device cpu --tiny tries the command itself out")
    today = datetime.date.today().isoformat()
    name = re.sub(r"[^a-z0-9]+", "-", device["name"].lower()).strip("-")
    folder = given.results or HERE / "results" / f"{name}-{today}"
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(folder, device, given.tiny, time.monotonic() + 60 * given.minutes)
    run.do([piece for piece in PIECES if piece.name in chosen], again=given.only is not None)
    print(f"{folder / 'README.md'}")
    return 1 if wrong(run.records) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "npu"), default="auto")
    parser.add_argument("--minutes", type=float, default=25, help="begin nothing that would end later; default 25")
    parser.add_argument("--only", help="these pieces, separated by commas: " + ", ".join(one.name for one in PIECES))
    parser.add_argument("--results", type=Path, help="default: benchmarks/results/DEVICE-DATE")
    parser.add_argument("--tiny", action="store_true", help="sizes that say nothing: to try the command itself out")
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _chosen(only: str | None) -> set[str]:
    names = {piece.name for piece in PIECES}
    chosen = names if only is None else set(filter(None, re.split(r"[,\s]+", only)))
    if chosen - names or not chosen:
        raise SystemExit(f"--only {only}: allowed are {', '.join(piece.name for piece in PIECES)}")
    return chosen


class Run:
    """The pieces of one call, and what the folder had of them."""

    def __init__(self, folder: Path, device: dict[str, Any], tiny: bool, end: float) -> None:
        self.folder, self.device, self.tiny, self.end = folder, device, tiny, end
        self.facts = {"device": device, "source": source(), "commit": _commit(), "tiny": tiny}
        self.records: dict[str, dict[str, Any]] = {}
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        for piece in PIECES:
            with contextlib.suppress(OSError, ValueError):
                record = json.loads(self._file(piece).read_text())
                same = all(record[key] == self.facts[key] for key in ("device", "source", "tiny"))
                if same and record["status"] != FAILED:  # it may have lacked something that is there now
                    self.records[piece.name] = record

    def do(self, pieces: Iterable[Piece], again: bool) -> None:
        """Run them: first those that are not timed, as many at a time as host and device have room for, then the others
        one after the other. `again`: also those that have been run."""
        waiting = [piece for piece in pieces if again or piece.name not in self.records]
        alone = 2 if self.tiny and self.device["type"] == "cpu" else 1  # nobody reads these times
        roomy = (os.cpu_count() or 1) >= 2 * AT_ONCE and (self.device["memory"] or 0) >= AT_ONCE * ROOM
        for timed, at_once in ((False, AT_ONCE if roomy else alone), (True, alone)):
            self._run_some([piece for piece in waiting if piece.timed == timed], at_once)
        self._write_page()

    def _run_some(self, pieces: list[Piece], at_once: int) -> None:
        with ThreadPoolExecutor(at_once) as pool:
            try:
                for _ in pool.map(self._one, pieces):
                    pass
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(self._running):
                    _stop(process)
                raise

    def _one(self, piece: Piece) -> None:
        reason, left = piece.absent(self.device), (self.end - time.monotonic()) / 60
        if reason is not None:
            record = {"status": SKIPPED, "reason": reason}
        elif left < min(0.6 * piece.minutes, 5):
            record = {"status": NO_TIME, "reason": f"{max(left, 0):.1f} minutes were left"}
        else:
            print(f"{piece.name} ...", flush=True)
            record = self._run(piece, min(piece.minutes, left))
        said = record.get("reason") or f"{record['seconds']:.0f} s"
        print(f"{piece.name}: {record['status']} ({said})", flush=True)
        with self._lock:
            self.records[piece.name] = record
            self._write_page()

    def _run(self, piece: Piece, minutes: float) -> dict[str, Any]:
        """In a process of its own; what it gave is in a file of the folder, unless the whole time has ended it."""
        with tempfile.TemporaryDirectory() as folder:
            job = Job(self.device, self.tiny, round(SOFT * minutes, 2), Path(folder) / "figures.json")
            command, begun = [sys.executable, *piece.command(job)], time.monotonic()
            files = [Path(folder) / name for name in ("printed", "complained")]
            with files[0].open("wb") as printed, files[1].open("wb") as complained:
                process = subprocess.Popen(
                    command,
                    stdout=printed,
                    stderr=complained,
                    cwd=ROOT,
                    env=_environment(self.tiny),
                    start_new_session=True,
                )
                self._running.add(process)
                try:
                    status = process.wait(60 * minutes)
                except subprocess.TimeoutExpired:
                    status = None
                finally:
                    _stop(process)
                    self._running.discard(process)
            texts = [file.read_text(errors="replace") for file in files]
            shown = [word.replace(str(ROOT) + os.sep, "").replace(folder + os.sep, "") for word in command[1:]]
            record = {"piece": piece.name, **self.facts, "date": datetime.date.today().isoformat()}
            record |= {"command": shown, "seconds": time.monotonic() - begun, "exit_status": status}
            record |= {"printed": _end(texts[0]), "complained": _end(texts[1])}
            try:
                if status is not None:
                    record["figures"] = piece.read(job, texts[0])
            except (OSError, ValueError, LookupError) as error:  # it did not come so far
                record["complained"] += [f"no figures: {type(error).__name__}: {error}"]
        if status is None:
            own = minutes >= piece.minutes
            record |= {"status": STOPPED, "reason": f"longer than {'its' if own else 'the'} {minutes:.1f} minutes"}
            if not own:
                return record | {"status": NO_TIME}
        else:
            record["status"] = DONE if "figures" in record else FAILED
        output.write(self._file(piece), json.dumps(record, indent=1) + "\n")
        return record

    def _file(self, piece: Piece) -> Path:
        return self.folder / f"{piece.name}.json"

    def _write_page(self) -> None:
        rows = {piece.name: self.records.get(piece.name) for piece in PIECES}
        output.write(self.folder / "README.md", page(self.facts, rows))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End it, with all that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):  # the second also for what it leaves behind
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


def _end(text: str) -> list[str]:
    return text.splitlines()[-KEPT:]


def _environment(tiny: bool) -> dict[str, str]:
    """This package found first, kernels that can be made reproducible, and no name of a host looked up."""
    found = dict(os.environ)
    found["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [found.get("PYTHONPATH")])])
    found["PYTHONUNBUFFERED"] = "1"
    found.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if sys.platform == "linux":
        found.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if tiny:
        found.setdefault("OMP_NUM_THREADS", "1")
    return found


# ---- what the figures are of
def source() -> str:
    """Tells versions of what is measured apart, also where there is no git."""
    files = [path for folder in ("mindspeed_mem", "patches", "benchmarks") for path in (ROOT / folder).rglob("*")]
    code = sorted(path for path in files if path.suffix in {".py", ".cpp", ".h"})
    found = hashlib.sha256()
    for path in code:
        found.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def _commit() -> str | None:
    try:
        words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _probed(name: str) -> dict[str, Any]:
    """`probe` in a process of its own: this one must hold no memory of the device."""
    words = [sys.executable, str(HERE / "on_device.py"), "--probe", "--device", name]
    done = subprocess.run(words, capture_output=True, text=True, env=_environment(tiny=False))
    if done.returncode:
        raise SystemExit(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout.splitlines()[-1])


def probe(name: str) -> dict[str, Any]:
    """The device and what is around it: type, name, bytes of memory, count, host, versions."""
    from importlib.metadata import PackageNotFoundError, version

    from timing import machine

    from mindspeed_mem import __version__
    from mindspeed_mem.device import get_backend

    backend = get_backend(name)
    told = backend.describe()
    around = machine(backend.type)
    versions = {"python": around["python"], "mindspeed_mem": __version__, "torch": told["torch"]}
    versions |= {key: str(told[key]) for key in ("cuda", "torch_npu", "cann") if told.get(key)}
    for package in ("megatron-core", "triton", "transformer_engine", "apex", "scipy"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "type": backend.type,
        "name": backend.type if backend.is_host else str(told["device"]),
        "memory": told["memory_bytes"],
        "count": told.get("count", 1),
        "host": {"processor": around["processor"], "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")},
        "versions": versions,
    }


if __name__ == "__main__":
    sys.exit(main())
