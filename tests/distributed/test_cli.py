"""``python -m mindspeed_mem`` as users call it: run, ops, doctor, alone and under torchrun."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from mindspeed_mem.activation import hot_path
from tests import warm
from tests.sweeping import but

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.distributed

SCRIPT = """
    import multiprocessing
    import os
    import sys

    import helper_beside_the_script

    print("top", __name__, os.path.basename(__file__), "mindspeed_mem.megatron_adaptor" in sys.modules, flush=True)

    class Thing:
        def __init__(self, text):
            self.text = text

    def twice(thing):
        import torch
        return Thing(2 * thing.text + ("!" if torch.cuda.current_device() == "cpu" else "?"))

    if __name__ == "__main__":
        print("main", sys.argv[1:], flush=True)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print("child", [thing.text for thing in pool.map(twice, [Thing("ab")])], flush=True)
        sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def folder(tmp_path):
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "script.py").write_text(textwrap.dedent(SCRIPT))
    (scripts / "helper_beside_the_script.py").write_text("")
    return scripts


def call(*command, status=0, cwd=ROOT, environment=(), path=()):
    """Run a command; returns (output, errors)."""
    clean = {k: v for k, v in os.environ.items() if k not in ("MINDSPEED_MEM_DEVICE", "RANK", "LOCAL_RANK")}
    search = os.pathsep.join(map(str, [*path, ROOT]))
    clean |= {"PYTHONPATH": search, "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    clean |= {"PYTHON_EXEC": warm.python(), **dict(environment)}
    done = subprocess.run([*map(str, command)], env=clean, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout, done.stderr


def mem(*arguments, **kwargs):
    return call(warm.python(), "-m", "mindspeed_mem", *arguments, **kwargs)


def torchrun(ranks, *arguments, **kwargs):
    launcher = [warm.python(), "-m", "torch.distributed.run", "--nproc-per-node", ranks, "--master-port", "0"]
    return call(*launcher, "--standalone", "-m", "mindspeed_mem", *arguments, **kwargs)


@pytest.mark.parametrize("elsewhere", but([False, True], False))
def test_run_runs_a_script_as_python_does_and_its_spawned_children_too(folder, elsewhere):
    script = folder / "script.py"
    place = {"cwd": folder} if elsewhere else {}
    out, _ = mem("run", script.name if elsewhere else script, 3, "--device", "cpu", "-x", status=3, **place)
    assert out.splitlines() == [
        "top __main__ script.py True",
        "main ['3', '--device', 'cpu', '-x']",
        "top __mp_main__ script.py True",
        "child ['abab!']",  # in the child, too, torch.cuda is repaired
    ]


def test_run_without_a_flag_changes_nothing(folder):
    code = "import torch, sys\nprint(torch.cuda.current_device, [m for m in sys.modules if 'mem.patches.' in m])"
    (folder / "plain.py").write_text(code)
    out, _ = mem("run", folder / "plain.py")
    assert "mindspeed_mem" not in out and out.endswith(" []\n")


def test_a_misspelt_flag_is_said_with_what_is_wrong_and_also_where_the_script_ignores_it(folder):
    (folder / "plain.py").write_text("print('ran')")
    near = "--survive-omm is no flag of mindspeed_mem; did you mean --survive-oom?\n"
    out, errors = mem("run", folder / "plain.py", "--survive-omm")
    assert out == "ran\n" and f"WARNING mindspeed_mem: {near}" in errors
    out, errors = mem("run", folder / "plain.py", "--survive-omm", "--recompute-layers", "x", status=2)
    assert out == "" and errors.startswith("mindspeed_mem: 2 problems with the options\n  --recompute-layers: got 'x'")
    assert errors.endswith(f"\n  {near}")


def test_run_under_torchrun(folder):
    (folder / "ranks.py").write_text(
        "import os, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"  # becomes gloo on cpu
        "total = torch.ones(1); dist.all_reduce(total)\n"
        "os.write(1, f'rank {dist.get_rank()} of {int(total)} {sys.argv[1:]}\\n'.encode())\n"
        "dist.destroy_process_group()\n"
    )
    out, _ = torchrun(2, "run", folder / "ranks.py", "--device", "cpu")
    assert sorted(out.splitlines()) == [f"rank {rank} of 2 ['--device', 'cpu']" for rank in (0, 1)]


def test_a_wrong_command_line_stops_all_ranks_before_the_script_with_one_message(folder):
    (folder / "never.py").write_text("print('the script ran')")
    wrong = ["--memory-config", folder / "missing.yaml", "--recompute-granularity", "full"]
    out, errors = torchrun(2, "run", folder / "never.py", *wrong, status=1)
    assert "the script ran" not in out
    assert errors.count("mindspeed_mem: 2 problems with the options") == 1
    assert "missing.yaml: cannot be read" in errors and "exitcode  : 2" in errors
    _, errors = mem("run", folder / "never.py", *wrong, status=2)
    assert "Traceback" not in errors and errors.count("cannot be read") == 1


def test_ctrl_c_ends_each_rank_with_one_line(folder):
    (folder / "endless.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "os.write(1, b'started\\n')\n"  # as a whole
        "while True:\n"
        "    dist.all_reduce(torch.ones(1))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job = subprocess.Popen(
        [*command, "-m", "mindspeed_mem", "run", str(folder / "endless.py"), "--device", "cpu"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a terminal's Ctrl-C reaches a whole group of processes
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # tests may run in the background
    )
    try:
        assert [job.stdout.readline() for _ in range(2)] == ["started\n"] * 2
        os.killpg(job.pid, signal.SIGINT)
        _, errors = job.communicate(timeout=60)
    finally:
        job.terminate()  # nothing, where it has ended; else its ranks end with it
    own = errors.partition("Traceback")[0]  # then that of torchrun itself
    for rank in (0, 1):
        assert own.count(f"mindspeed_mem run: interrupted on rank {rank}\n") == 1
    assert errors.count("Traceback") <= 1 and "endless.py" not in errors and "KeyboardInterrupt" not in errors


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "required: command"),
        (["fly"], "invalid choice: 'fly'"),
        (["run"], "required: script\n"),
        (["run", "--memory-config", "x.yaml"], "run: error: the script comes first, then its arguments"),
        (["ops", "--survive-oom", "script.py"], "before any script stands --survive-oom\n"),
        (["run", "no_such_script.py"], "mindspeed_mem run: no_such_script.py does not exist"),
        (["ops", "."], "mindspeed_mem ops: . is a folder"),
        (["doctor", "--fast"], "usage: python -m mindspeed_mem doctor [-h] [--json]\n"),
        (["doctor", "--fast"], "\nmindspeed_mem doctor: error: unrecognized arguments: --fast\n"),
        (
            ["plan", "--sequnce-length", "4"],
            "arguments: --sequnce-length 4; did you mean --seq-length?\n(python -m mindspeed_mem plan --help lists",
        ),
    ],
)
def test_wrong_usage(arguments, expected):
    _, errors = mem(*arguments, status=2)
    assert expected in errors and "Traceback" not in errors


@pytest.mark.parametrize("command", ["run", "ops", "doctor"])
def test_help(command):
    assert f"\n    {command} " in mem("--help")[0]
    assert mem(command, "--help")[0].startswith(f"usage: python -m mindspeed_mem {command}")


def test_doctor_is_content_with_what_is_installed(tmp_path):
    out, _ = mem("doctor", "--json", environment={"MINDSPEED_MEM_ALLOCATOR": str(tmp_path), "CXX": ""})
    found = json.loads(out)
    assert found["problems"] == [] and found["versions"]["megatron-core"]
    assert [entry["device"] for entry in found["devices"]][-1] == "cpu"
    assert [(part["name"], part["found"] is None) for part in found["optional"]] == [
        ("scipy", find_spec("scipy") is None),
        ("matplotlib", find_spec("matplotlib") is None),
        ("C++ compiler", not any(map(shutil.which, ("c++", "g++", "clang++")))),
        ("delegating allocator", True),
        ("hot path in C++", hot_path.EXTENSION.built() is None),
    ]
    status = {(row["file"], row["target"]): row["status"] for row in found["patches"]}
    schedule = "megatron.core.pipeline_parallel.schedules:"
    assert status["patches/pass_events.py", schedule + "backward_step"].startswith("applied")
    assert status["patches/survive_passes.py", "mindspeed_mem.passes:LISTENERS"] == "applied"
    assert status["patches/cpu_torch_cuda.py", "torch.cuda:current_device"] == "applied"
    mindspeed = [row for row in found["patches"] if row["file"] == "patches/mindspeed_features.py"]
    if found["versions"]["mindspeed"] is None:
        assert {(row["status"], *row["notes"]) for row in mindspeed} == {("waiting", "mindspeed is not installed")}


# As if neither scipy nor matplotlib were installed.
BARE_MACHINE = """
    import importlib.metadata, sys

    version = importlib.metadata.version

    def without(name):
        if name in ("scipy", "matplotlib"):
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    importlib.metadata.version = without
    sys.modules["scipy"] = sys.modules["matplotlib"] = None
"""

# As if megatron-core came from PYTHONPATH, and it, or what it brings, were talkative.
TALKATIVE = """
    import importlib.metadata, os, wrapt

    version = importlib.metadata.version

    def without(name):
        if name in ("megatron-core", "mindspeed"):
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    def other(module):
        print("INFO: hello", flush=True)
        os.write(1, b"and from native code")

    importlib.metadata.version = without
    wrapt.register_post_import_hook(other, "megatron.core.pipeline_parallel.schedules")
"""


def test_doctors_json_is_alone_on_standard_output_and_knows_what_is_not_installed_but_there(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(TALKATIVE))
    out, errors = mem("doctor", "--json", path=[tmp_path])
    found = json.loads(out)
    assert found["versions"]["megatron-core"] == version("megatron-core") and found["problems"] == []
    assert "INFO: hello" in errors and "and from native code" in errors


# As if another version of Megatron were installed, and another package had patched it.
OTHER_MEGATRON = """
    import wrapt

    def other(schedules):
        del schedules.backward_step
        native = schedules.forward_step
        def shorter(data_iterator): native(None, data_iterator)
        schedules.forward_step = shorter

    wrapt.register_post_import_hook(other, "megatron.core.pipeline_parallel.schedules")
"""


def test_doctor_says_what_the_absence_of_optional_parts_costs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(BARE_MACHINE))
    out, _ = mem("doctor", path=[tmp_path], environment={"CXX": "no-such-compiler", "PATH": "", "HOME": str(tmp_path)})
    for line in (
        "\nscipy: none: nothing can be planned (mindspeed-mem[adaptive])\n",
        "\nmatplotlib: none: no pictures (mindspeed-mem[picture])\n",
        "\nC++ compiler: none: no limited CPU memory, and the allocator below cannot be built\n",
        "\ndelegating allocator: none: --survive-oom ",
    ):
        assert line in out
    assert "nothing is wrong: " in out


def test_doctor_names_what_is_wrong(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(OTHER_MEGATRON))
    found = json.loads(mem("doctor", "--json", status=1, path=[tmp_path])[0])
    own = [row for row in found["patches"] if row["file"] == "patches/pass_events.py"]
    rows = {row["target"].rpartition(":")[2]: row for row in own}
    assert rows["backward_step"]["status"] == "FAILED" and rows["forward_step"]["status"].startswith("applied")
    assert "backward_step does not exist in the installed version" in rows["backward_step"]["notes"][-1]
    assert rows["forward_step"]["notes"] == ["on top of sitecustomize"]
    text, _ = mem("doctor", status=1, path=[tmp_path])
    for package in (f"torch {found['versions']['torch']}", f"megatron-core {found['versions']['megatron-core']}"):
        said = f"{package} is untested" in text
        assert said == any(one.startswith(package) for one in found["untested"])
    assert "\n2 wrong:\n  patches/pass_events.py: " in text and text.count("schedules:backward_step: FAILED") == 2


TRAINING = """
    import sys
    import mindspeed_mem.megatron_adaptor as mem
    import torch
    from megatron.core import parallel_state, tensor_parallel

    torch.distributed.init_process_group("gloo")
    size = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=size)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    mem.configure({})
    from tests.models import build_gpt, train_step
    chunks = build_gpt(sys.argv[1], layers=4)
    train_step(chunks, forward_only=True)
    train_step(chunks)
    print("went on after the first step")
"""


@pytest.mark.parametrize("ranks", but([0, 2], 2), ids=["alone", "torchrun"])
def test_ops_prints_the_operators_and_ends_after_one_step(folder, ranks):
    (folder / "training.py").write_text(textwrap.dedent(TRAINING))
    arguments = ["ops", folder / "training.py", "dense"]
    out, _ = torchrun(ranks, *arguments) if ranks else mem(*arguments)
    assert "went on" not in out
    # The last layer of a stage differs: what comes after it is no layer, or on another rank.
    alike = ["layers 0, 2:", "layer 1:", "layer 3:"] if ranks else ["layers 0-2:", "layer 3:"]
    assert [line.split(" Tr")[0] for line in out.splitlines() if "TransformerLayer[MLP]" in line] == alike
    rows = {line.split()[0]: line.split() for line in out.split("layer 3:")[0].splitlines() if len(line.split()) > 3}
    # Two sequences of 32 tokens, hidden size 64, in fp32: 16 KiB for each value that a token has per hidden unit.
    # A name with a dot in front continues that of the module above.
    unit = 2 * 32 * 64 * 4 / 2**20
    name, other, produced, saved, frees, flops = rows[".linear_proj"]
    assert other == ".wo" and float(saved) == pytest.approx(unit, abs=0.005)
    assert (frees, flops) == ("-", "-")  # of what it makes, backward needs nothing
    assert rows[".core_attention"][1] == ".flash_attention" and ".linear_proj" in rows[".core_attention"]
    assert rows[".linear_qkv"][2] == f"{3 * unit:.2f}"  # q, k and v: one storage, counted once
    # The projection to q, k and v and what the attention itself computes; the last linear layer does not run again.
    share = str(int(rows[".linear_qkv"][5]) + int(rows[".core_attention"][5]))
    assert rows["self_attention"][4:6] == [rows["self_attention"][2], share]
    assert rows["mlp"][:2] == ["mlp", "feed_forward"] and float(rows["mlp"][4]) > 2 * float(rows["mlp"][3]) / 3
    assert rows["self_attn_bda"][-3:-1] == ["-", "-"]  # it would keep as much as it frees: its input
    assert rows["input_layernorm"][4:6] == [f"{unit + 2**8 / 2**20:.2f}", "0"]
    assert "from outside the layers" in out


def test_ops_of_a_script_that_does_not_train(folder):
    (folder / "idle.py").write_text("print('idle')")
    out, errors = mem("ops", folder / "idle.py", status=1)
    assert out == "idle\n" and "the script ended without a training step" in errors
