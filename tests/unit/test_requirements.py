"""The command line where something it needs is missing: a sentence with what to do, never a traceback."""

import ast
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from mindspeed_mem import requirements

ROOT = Path(__file__).parents[2]
PLAN = (
    "plan --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 "
    "--global-batch-size 1 --device-memory-gib 8"
)
# As where these packages are not installed, or as under an older Python.
WITHOUT = "import sys; sys.modules.update(dict.fromkeys({names!r}))"
PYTHON_3_9 = """
    import collections
    import platform
    import sys

    Version = collections.namedtuple("Version", "major minor micro releaselevel serial")
    sys.version_info = Version(3, 9, 18, "final", 0)
    platform.python_version = lambda: "3.9.18"
"""


@pytest.fixture
def mem(tmp_path):
    """Runs a command after `changes` to the interpreter: (exit status, output, errors)."""

    def run(changes, *words):
        (tmp_path / "changes.py").write_text(textwrap.dedent(changes))
        # Not by sitecustomize: what the environment starts by itself is not meant.
        code = "import changes, runpy; runpy.run_module('mindspeed_mem', None, "
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
        command = [sys.executable, "-c", code + "'__main__', True)", *words]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.mark.parametrize("words", ["--help", "doctor", "schedule --microbatches 2", "run script.py"])
def test_an_old_python_is_named_with_the_one_that_is_needed(mem, words):
    status, out, err = mem(PYTHON_3_9, *words.split())
    assert (status, out) == (1, "") and err.count("\n") == 1
    assert err.startswith("mindspeed_mem: this needs Python 3.10 or newer, and runs on 3.9.18 (")


def test_what_an_old_python_reads_it_can_parse():
    for name in ("__init__.py", "__main__.py", "requirements.py"):
        ast.parse((ROOT / "mindspeed_mem" / name).read_text(), name, feature_version=(3, 7))


@pytest.mark.parametrize("name, imported", [("torch", "torch"), ("PyYAML", "yaml")])
def test_help_schedule_and_plan_do_without_what_they_do_not_need(mem, name, imported):
    without = WITHOUT.format(names=[imported, "wrapt", "numpy"])
    for words in ("--help", "plan --help", "schedule --microbatches 2", PLAN):
        status, out, err = mem(without, *words.split())
        assert (status, err) == (0, "") and out


@pytest.mark.parametrize("name, imported", [("torch", "torch"), ("PyYAML", "yaml")])
def test_doctor_says_what_is_missing_and_how_to_install_it(mem, name, imported):
    without = WITHOUT.format(names=[imported])
    wanted = f"{name} is not installed: {sys.executable} -m pip install {name}"
    assert mem(without, "doctor") == (1, f"mindspeed_mem doctor: {wanted}\n", "")
    status, out, _ = mem(without, "doctor", "--json")
    assert status == 1 and json.loads(out)["problems"] == [wanted]


def test_training_and_writing_plans_need_what_is_missing(mem, tmp_path):
    (tmp_path / "script.py").write_text("print('ran')")
    status, out, err = mem(WITHOUT.format(names=["torch", "yaml"]), "run", "script.py")
    assert (status, out) == (2, "")
    assert err.startswith("mindspeed_mem run: torch, PyYAML are not installed: ")
    status, out, err = mem(WITHOUT.format(names=["yaml"]), *PLAN.split(), "--output", "plan.yaml")
    assert (status, out) == (2, "") and "--output: PyYAML is not installed: " in err


def test_a_reader_that_has_seen_enough_is_no_error():
    command = f"{sys.executable} -m mindspeed_mem schedule --pp 8 --microbatches 4000 | head -1"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("8 stages, 4000 micro-batches\n", "")


def test_versions_that_no_test_has_run_with_are_named():
    tested = {"torch": "2.13.0+cpu", "megatron-core": "0.16.1", "mindspeed": None, "wrapt": "99"}
    assert requirements.untested(tested) == []
    others = {"torch": "2.130.0", "megatron-core": "0.20.0", "mindspeed": "0.16.0", "torch_npu": "2.14.0"}
    said = requirements.untested(others)
    assert [one.partition(" is untested: ")[0] for one in said] == [
        "torch 2.130.0",
        "megatron-core 0.20.0",
        "torch_npu 2.14.0",
    ]
    assert "0.16.1, 0.17.1, 0.18.2, 0.19.2, and patches may not do what they should" in said[1]


def test_what_a_build_adds_to_a_version_makes_no_other_one_of_it():
    works = requirements.compat("0.19.2+1a2b3c4")
    assert works == requirements.compat("0.19.2") and works["swap"] == "works"
    assert requirements.compat("0.99.0") == requirements.compat(None) == {}


def test_nothing_is_planned_without_the_solver(mem):
    status, out, err = mem(WITHOUT.format(names=["scipy"]), *PLAN.split())
    assert (status, out) == (2, "") and "pip install scipy, or 'mindspeed-mem[adaptive]'" in err
