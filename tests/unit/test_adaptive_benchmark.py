"""`benchmarks/adaptive.py --replay`: what is predicted of all policies, from a profile alone."""

import subprocess
import sys
from pathlib import Path

from mindspeed_mem.adaptive import trace
from tests.planning import small_problem

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "adaptive.py"
RUN = """
import runpy, sys
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
assert "torch" not in sys.modules
"""


def test_a_recorded_profile_is_replayed_without_a_model(tmp_path):
    target = tmp_path / "profile.json"
    trace.write(trace.Profile(problem=small_problem(layers=4, micro_batches=2, link=2.0)), target)
    words = [sys.executable, "-c", RUN, str(SCRIPT), "--replay", str(target), "--caps", "0.3,2.3GB"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    share, size = done.stdout.split("cap 2.3GB: ")
    assert share.startswith("cap 0.3: ") and size.startswith("2193.5 MiB, predicted\n")
    for text in (share, size):
        rows = {line[:46].strip(): line[46:].split() for line in text.splitlines() if len(line) > 80}
        ratios = {name: float(row[0]) for name, row in rows.items() if row[-2] == "yes" and "cap" not in name}
        assert {"Megatron full recompute", "Megatron selective: mlp", "Megatron block recompute, 1 of 4"} < rows.keys()
        assert min(ratios, key=ratios.get) == "adaptive plan"
        assert "adaptive plan against the best by hand" in text


def test_caps_that_are_no_numbers_are_refused(tmp_path):
    target = tmp_path / "profile.json"
    trace.write(trace.Profile(problem=small_problem()), target)
    words = [sys.executable, str(SCRIPT), "--replay", str(target), "--caps", "half"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1 and "such as 105GB, not 'half'" in done.stderr
