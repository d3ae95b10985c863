"""Files that commands write: refused before the work where that cannot go well, and never left half-written."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_mem import output
from mindspeed_mem.__main__ import main
from mindspeed_mem.report import trace_file

ROOT = Path(__file__).parents[2]
SHAPE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --global-batch-size 1"
)
PLAN = ["plan", *SHAPE.split(), "--device-memory-gib", "8"]


@contextlib.contextmanager
def small_disk(nbytes=100):
    """Inside, no file may grow beyond that: for a writer that is like a full disk. pytest may write to a file, too."""
    earlier = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, earlier)


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    target = tmp_path / "plan.yaml"
    output.write(target, "earlier")
    with small_disk(), pytest.raises(OSError) as failed:
        output.write(target, "x" * 200)
    assert failed.value.filename == str(target) and failed.value.strerror == "File too large"
    assert target.read_text() == "earlier" and os.listdir(tmp_path) == ["plan.yaml"]
    link = tmp_path / "link"
    link.symlink_to(target)
    target.chmod(0o640)
    output.write(link, b"later")
    assert link.is_symlink() and target.read_text() == "later" and target.stat().st_mode & 0o777 == 0o640


def test_what_is_no_plain_file_is_written_to(capfd):
    assert output.why_not("/dev/stdout") is None
    output.write("/dev/stdout", "text")
    assert capfd.readouterr().out == "text"
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        output.write("/dev/full", "text")


@pytest.mark.parametrize("option", ["--output", "--write-trace"])
def test_plan_refuses_a_target_before_it_plans(tmp_path, capsys, option):
    long = tmp_path / ("x" * 300)
    for target, reason in (
        (tmp_path, f"{tmp_path} is a folder; name a file in it"),
        (tmp_path / "no" / "plan.yaml", f"there is no folder {tmp_path}/no"),
        ("/proc/plan.yaml", "nothing can be written to /proc/plan.yaml: No such file or directory"),
        (long, f"nothing can be written to {long}: File name too long"),
    ):
        assert main([*PLAN, option, str(target)]) == 2
        assert capsys.readouterr() == ("", f"mindspeed_mem plan:\n  {option}: {reason}\n")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("command", [PLAN, ["schedule", "--microbatches", "2"], ["chunks", "--model", "gpt2-xl"]])
def test_pictures_are_refused_in_the_same_way(tmp_path, capsys, command):
    target = tmp_path / "folder.svg"
    target.mkdir()
    assert main([*command, "--picture", str(target)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and f"  --picture: {target} is a folder; name a file in it\n" in captured.err


def test_a_disk_that_fills_up_is_told_with_the_path(tmp_path, capsys):
    target = tmp_path / "plan.yaml"
    with small_disk():
        assert main([*PLAN, "--output", str(target)]) == 1
    captured = capsys.readouterr()
    assert captured.err == f"mindspeed_mem plan: {target} cannot be written or read: File too large\n"
    assert "this plan" in captured.out and os.listdir(tmp_path) == []


def test_a_trace_that_no_longer_grows_stays_one(tmp_path):
    file, event = tmp_path / "trace.json", {"ph": "X", "name": "x" * 50}
    trace_file.begin(file, {"rank": 0, "origin_ns": 0}, [event])
    with small_disk(500), pytest.raises(OSError, match="File too large"):
        trace_file.extend(file, [event] * 10)
    assert json.loads(file.read_text())["traceEvents"] == [event]
    trace_file.extend(file, [event] * 2)
    assert json.loads(file.read_text())["traceEvents"] == [event] * 3


def test_output_that_goes_nowhere_is_told():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "mindspeed_mem", "schedule", "--microbatches", "2"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, timeout=120)
    assert done.returncode == 1 and done.stderr.startswith("mindspeed_mem schedule: No space left on device\n")
    assert "Traceback" not in done.stderr
