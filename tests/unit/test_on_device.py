"""`benchmarks/on_device.py`: pieces in processes of their own, what is kept of them, and most of them once, tiny."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import warm

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "on_device.py"
DEVICE = {"type": "cpu", "name": "made up", "memory": None, "count": 1, "host": {"processor": "one", "memory": 10**9}}
DEVICE |= {"versions": {"torch": "2"}}


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("on_device", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "on_device", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pieces(script, monkeypatch):
    """Pieces of one line of Python each."""

    def piece(name, code, minutes=1.0, **more):
        return script.Piece(name=name, minutes=minutes, command=lambda job: ["-c", code, str(job.target)], **more)

    write = "import sys; open(sys.argv[1], 'w').write('{}')"
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    found = (
        piece("good", f"print('a table'); {write}"),
        piece("bad", "print('half of it'); raise ValueError('because')"),
        piece("long", f"print('begun', flush=True); {child}", minutes=0.01),
        piece("elsewhere", write, absent=lambda device: f"not for {device['type']}"),
        piece("last", write),
    )
    monkeypatch.setattr(script, "PIECES", found)
    return found


def ran(script, folder, seconds=60.0, **more):
    run = script.Run(folder, DEVICE, False, time.monotonic() + seconds)
    run.do(script.PIECES, **{"again": False, **more})
    return {name: record["status"] for name, record in run.records.items()}


def test_a_piece_that_fails_or_takes_too_long_is_noted_and_the_rest_goes_on(script, pieces, tmp_path):
    begun = time.monotonic()
    expected = {"good": "done", "bad": "FAILED", "long": "STOPPED", "elsewhere": "skipped", "last": "done"}
    assert ran(script, tmp_path) == expected and time.monotonic() - begun < 50
    page = (tmp_path / "README.md").read_text()
    assert "half of it" in page and "ValueError: because" in page and "a table" in page and "begun" in page
    assert "| elsewhere | skipped: not for cpu |" in page and "longer than its 0.0 minutes" in page
    assert json.loads((tmp_path / "bad.json").read_text())["exit_status"] == 1
    assert not (tmp_path / "elsewhere.json").exists()


def test_what_is_there_of_the_same_source_and_device_is_not_run_again(script, pieces, tmp_path, monkeypatch):
    def date(name):
        return (tmp_path / f"{name}.json").stat().st_mtime_ns

    ran(script, tmp_path)
    before = {name: date(name) for name in ("good", "bad", "long")}
    ran(script, tmp_path)
    assert date("bad") > before["bad"]  # it failed: perhaps something was missing that is there now
    assert [date(name) for name in ("good", "long")] == [before["good"], before["long"]]
    run = script.Run(tmp_path, DEVICE, False, time.monotonic() + 60)
    run.do([pieces[0]], again=True)
    assert date("good") > before["good"] and date("long") == before["long"]
    monkeypatch.setattr(script, "source", lambda: "another")
    assert script.Run(tmp_path, DEVICE, False, 0.0).records == {}


@pytest.mark.parametrize(("memory", "together"), [(10**11, True), (10**9, False)])
def test_only_what_is_not_timed_runs_side_by_side(script, tmp_path, monkeypatch, memory, together):
    """Each piece of two that waits for the other one comes to an end."""
    wait = (
        "import pathlib, sys, time\n"
        "here, other = map(pathlib.Path, sys.argv[1:3]); here.touch(); end = time.time() + {}\n"
        "while time.time() < end and not other.exists(): time.sleep(0.05)\n"
        "open(sys.argv[3], 'w').write(str(int(other.exists())))"
    )

    def piece(name, other, timed):
        code = wait.format(30 if together and not timed else 2)  # seconds, the first few of a wait that has an end
        files = [str(tmp_path / f"{one}.there") for one in (name, other)]
        return script.Piece(
            name=name, minutes=1.0, command=lambda job: ["-c", code, *files, str(job.target)], timed=timed
        )

    found = (piece("a", "b", False), piece("b", "a", False), piece("c", "d", True), piece("d", "c", True))
    monkeypatch.setattr(script, "PIECES", found)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    run = script.Run(tmp_path, DEVICE | {"memory": memory}, False, time.monotonic() + 60)
    run.do(found, again=True)
    met = {name: record["figures"] for name, record in run.records.items()}
    assert met == {"a": int(together), "b": 1, "c": 0, "d": 1}  # the second finds what the first has left


def test_what_the_time_does_not_suffice_for_is_left_for_the_next_call(script, pieces, tmp_path):
    assert set(ran(script, tmp_path, seconds=0.0).values()) == {"not begun", "skipped"}
    assert not list(tmp_path.glob("*.json")) and "0.0 minutes were left" in (tmp_path / "README.md").read_text()
    assert ran(script, tmp_path)["last"] == "done"


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        ({"full": 1.3, "block": 1.1, "mine": 1.02}, ("met", "MISSED", "met")),
        ({"full": 1.3, "block": 1.25, "mine": 1.06}, ("met", "met", "MISSED")),
        ({"full": 1.2, "mine": 1.04}, ("MISSED", "met", "met")),
        ({"full": 1.2}, ("untold", "untold", "untold")),
    ],
)
def test_the_goals_of_the_adaptive_plan(script, rows, lines):
    import on_device_page
    from policies import ADAPTIVE, FULL, KEEP_ALL

    names = {"full": FULL, "block": "Megatron block recompute, 1 of 2", "mine": ADAPTIVE}
    policies = {names[name]: {"median_of_ratios": ratio, "peer": name != "mine"} for name, ratio in rows.items()}
    policies[KEEP_ALL] = {"median_of_ratios": 1.0, "peer": True}
    goals = on_device_page.goals("adaptive", {"caps": {"105GB": {"policies": policies}}})
    words = [line.partition(":")[0] for line in on_device_page.goal_lines(goals)]
    assert tuple(words[:3]) == lines


def test_the_page_tells_what_plans_of_attach_reach(script):
    import on_device_page

    rows = {
        "no pack": {"same": True, "median_of_ratios": 1.0, "peak_bytes": 9},
        "gradient checkpointing": {"same": True, "median_of_ratios": 1.3, "peak_bytes": 2},
        "found under a cap of 50%": {"same": True, "median_of_ratios": 1.04, "peak_bytes": 5, "cap_bytes": 5},
    }
    lines = on_device_page.goal_lines(on_device_page.goals("attach", {"variants": rows}))
    assert [line.partition(":")[0] for line in lines] == ["met", "met"] and "+25.0 %" in lines[1]
    for other in ({"peak_bytes": 6}, {"median_of_ratios": 1.31}, {"same": False}):
        changed = rows | {"found under a cap of 50%": rows["found under a cap of 50%"] | other}
        lines = on_device_page.goal_lines(on_device_page.goals("attach", {"variants": changed}))
        assert any(line.startswith("MISSED") for line in lines), other


def test_every_plan_that_is_compared_bit_for_bit_is_one():
    """The compared models need a device for some of them."""
    code = """
import bits
from mindspeed_mem.plan import load_memory_config
for plan in (*bits.PLANS.values(), *bits.ITS_PLANS.values(), *bits.OF_EXPERTS.values()):
    load_memory_config(plan)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=SCRIPT.parent, capture_output=True, text=True, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr


def test_a_piece_that_is_not_there_is_refused():
    done = subprocess.run([sys.executable, str(SCRIPT), "--only", "swop"], capture_output=True, text=True)
    assert done.returncode == 1 and "--only swop: allowed are doctor, gpu-tests, " in done.stderr


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "only",
    [
        pytest.param(["bits-gemini", "swap", "host_cost"], id="some"),
        pytest.param(
            ["bits-gemini", "swap", "host_cost", "recompute", "adaptive", "chunk_zero"],
            marks=pytest.mark.sweep,
            id="all",
        ),
    ],
)
def test_the_benchmarks_run_from_end_to_end(only, tmp_path):
    """With tiny sizes; without the pieces of which other tests run the like."""
    words = [warm.python(), str(SCRIPT), "--device", "cpu", "--tiny", "--only", ",".join(only)]
    environment = {**os.environ, "PYTHONPATH": "", "PYTHON_EXEC": warm.python()}  # it finds the package by itself
    done = subprocess.run(
        [*words, "--results", str(tmp_path / "results")], capture_output=True, text=True, env=environment
    )
    page = (tmp_path / "results" / "README.md").read_text()
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{page}"
    records = [json.loads((tmp_path / "results" / f"{name}.json").read_text()) for name in only]
    assert [record["status"] for record in records] == ["done"] * len(only)
    assert page.count("- met: losses and gradients are equal") == len(
        {"swap", "recompute", "adaptive"}.intersection(only)
    )
    assert "- met: the bits are stock Megatron's (5 comparisons)" in page


def test_a_library_that_is_installed_and_cannot_be_imported_is_absent(script, monkeypatch, tmp_path):
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    cuda = {"type": "cuda"}
    (package / "pytorch.py").write_text("raise OSError('libcudnn.so.9: cannot open shared object file')\n")
    why = script.no_transformer_engine(cuda)
    assert why == "transformer_engine cannot be imported: OSError: libcudnn.so.9: cannot open shared object file"
    (package / "pytorch.py").write_text("")
    assert script.no_transformer_engine(cuda) is None
