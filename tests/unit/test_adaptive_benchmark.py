"""`benchmarks/adaptive.py --replay`: what is predicted of all policies, from a profile alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

from mindspeed_mem.adaptive.problem import profile_file
from tests import warm
from tests.planning import small_problem

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "adaptive.py"
RUN = """
import runpy, sys
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
assert "torch" not in sys.modules
"""


def test_a_recorded_profile_is_replayed_without_a_model(tmp_path):
    target = tmp_path / "profile.json"
    profile_file.write(profile_file.Profile(problem=small_problem(layers=4, micro_batches=2, link=2.0)), target)
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
    profile_file.write(profile_file.Profile(problem=small_problem()), target)
    words = [sys.executable, str(SCRIPT), "--replay", str(target), "--caps", "half"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1 and "such as 105GB, not 'half'" in done.stderr


def test_two_benchmarks_run_at_once():
    """They meet nobody: the port that one would take may be another's."""
    code = (
        "from gpt import start_one_rank; import os, torch.distributed as dist; start_one_rank('cpu'); "
        "assert dist.get_world_size() == 1 and 'MASTER_PORT' not in os.environ; dist.destroy_process_group()"
    )
    search = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    environment = {**os.environ, "PYTHONPATH": search, "MINDSPEED_MEM_DEVICE": "cpu"}
    environment.pop("MASTER_PORT", None)
    code = "import mindspeed_mem.megatron_adaptor as mem; mem.configure({'device': 'cpu'}); " + code
    subprocess.run([warm.python(), "-c", code], env=environment, check=True, timeout=120)


def test_plans_of_small_problems_are_compared_with_all_there_are(tmp_path):
    words = [sys.executable, str(ROOT / "benchmarks/planner_gaps.py"), "--count", "1", "--json", str(tmp_path / "g")]
    words += [word for kind in ("one stage", "two stages", "two stages of two parts") for word in ("--kind", kind)]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads((tmp_path / "g").read_text())["kinds"]
    assert len(found) == 3 and all(row["problems"] == 1 and row["worst_percent"] < 0.5 for row in found.values())
