"""`python -m mindspeed_mem plan`: what it prints, writes, draws and refuses."""

import dataclasses
import importlib.util
import re
import subprocess
import sys

import pytest

from mindspeed_mem.__main__ import main
from mindspeed_mem.activation.observe.rank_profile import HostCost
from mindspeed_mem.adaptive.problem import devices, profile_file
from mindspeed_mem.adaptive.problem.definition import GIB
from mindspeed_mem.command_line import NO_MATPLOTLIB
from mindspeed_mem.plan import load_memory_config

SHAPE = (
    "--layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --micro-batch-size 2 "
    "--global-batch-size 8 --pipeline-model-parallel-size 2 --data-parallel-size 1 --link-gbps 20 --reserve-gib 0 "
    "--attention-dropout 0 --hidden-dropout 0 "
)
LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --num-query-groups 8 "


@pytest.fixture
def plan(capsys, monkeypatch):
    """Runs the command with these words; returns its status, output and errors."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(words):
        status = main(["plan", *words.split()])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def row(out, name):
    return next(line for line in out.splitlines() if line.startswith(name)).removeprefix(name).split()


def test_it_compares_the_plan_with_the_alternatives_and_writes_it(plan, tmp_path):
    target = tmp_path / "plan.yaml"
    status, out, err = plan(f"{SHAPE} --device-memory-gib 24 --output {target}")
    assert (status, err) == (0, "")
    assert "\n8 layers, 2 pipeline stages, 4 micro-batches; limit 24.00 GiB on each rank\n" in out
    assert "estimates from FLOPs" in out and "400 TFLOP/s" in out and "20 GB/s to the host" in out
    kept, full, found = (row(out, name) for name in ("keep all", "Megatron's full recompute", "this plan"))
    assert kept[-1] == "no" and found[-1] == "yes" and float(found[-2]) <= 24 < float(kept[-2])
    assert float(kept[0]) <= float(found[0]) < float(full[0]) and full[1:3] == ["+0.0", "%"]
    slower, costly = (row(out, f"this plan, {what}") for what in ("link at 70 %", "copies cost 5 %"))
    assert float(slower[0]) >= float(found[0]) <= float(costly[0]) and slower[-2:] == costly[-2:] == found[-2:]
    assert "K keep, S swap, R recompute" in out and "self_attention.linear_qkv" in out
    loaded = load_memory_config(target, num_layers=8)
    assert loaded.notices == () and (loaded.swap.op_swap or loaded.recompute.active)
    assert "estimates from FLOPs" in target.read_text()


def test_what_it_planned_from_can_be_kept_and_planned_from_again(plan, tmp_path):
    target = tmp_path / "profile.json"
    _, first, _ = plan(f"{SHAPE} {LLAMA} --device-memory-gib 24 --write-trace {target}")
    profile = profile_file.read(target)
    assert profile.origin == "estimated" and profile.shapes["pipeline"] == 2
    assert profile.problem.device_limit == 24 * GIB
    status, again, _ = plan(f"--trace {target} --device-memory-gib 24 --reserve-gib 0")
    assert status == 0 and again == first
    _, other, _ = plan(f"--trace {target} --device-memory-gib 20 --reserve-gib 0 --swap-host-memory-gib 1")
    assert "limit 20.00 GiB, host 1.00 GiB" in other
    assert float(row(other, "this plan")[0]) >= float(row(again, "this plan")[0])


def test_a_plan_over_a_link_that_blocks_says_so_and_is_slower(plan, tmp_path):
    target = tmp_path / "profile.json"
    plan(f"{SHAPE} {LLAMA} --device-memory-gib 24 --write-trace {target}")
    measured = dataclasses.replace(profile_file.read(target), origin="measured")
    link = dataclasses.replace(measured.problem.link, blocking=True)
    profile_file.write(measured, target)
    _, hidden, _ = plan(f"--trace {target} --device-memory-gib 20 --reserve-gib 0")
    profile_file.write(dataclasses.replace(measured, problem=dataclasses.replace(measured.problem, link=link)), target)
    status, out, _ = plan(f"--trace {target} --device-memory-gib 20 --reserve-gib 0")
    text = "Computation stands still while anything is copied"
    assert status == 0 and text in out and text not in hidden
    assert float(row(hidden, "this plan")[0]) < float(row(out, "this plan")[0])


def test_what_the_engine_takes_of_the_host_is_in_the_seconds_and_said(plan, tmp_path):
    target = tmp_path / "profile.json"
    _, estimated, _ = plan(f"{SHAPE} {LLAMA} --device-memory-gib 24 --write-trace {target}")
    assert "the host time that swap and recompute take is not counted" in estimated
    free = dataclasses.replace(profile_file.read(target), origin="measured")
    host = HostCost(moved_seconds=2e-2, rerun_seconds=5e-2)
    found = []
    for one in (free, dataclasses.replace(free, problem=dataclasses.replace(free.problem, host=host))):
        profile_file.write(one, target)
        found.append(plan(f"--trace {target} --device-memory-gib 20 --reserve-gib 0")[1])
    text = "20000 us for each tensor that is swapped, 50000 us for each operator that runs again"
    assert text in found[1] and text not in found[0]
    keep, mine = ([float(row(out, name)[0]) for out in found] for name in ("keep all", "this plan"))
    assert keep[0] == keep[1] and mine[0] < mine[1]


def test_what_does_not_fit_ends_with_status_1_and_says_what_is_needed(plan, tmp_path):
    target = tmp_path / "plan.yaml"
    status, out, err = plan(f"{SHAPE} --device-memory-gib 10 --output {target}")
    assert status == 1 and not target.exists()
    assert "keep all" in out and "this plan" not in out
    assert "no plan fits: pipeline stage" in err and "three things to try" in err


def test_what_to_try_is_about_the_largest_holder(plan):
    states, chunks, split, smaller = (
        "split the optimizer's states over data-parallel ranks (--use-distributed-optimizer)",
        "split gradients and parameters too, or keep them on the host (--chunk-zero-stage 3, --placement-policy host)",
        "split the model further (--tensor-model-parallel-size, --pipeline-model-parallel-size)",
        "a smaller --micro-batch-size, or --context-parallel-size for long sequences",
    )

    def tries(words):
        _, _, err = plan(words)
        assert "held there, the largest first: " in err
        return err.splitlines()[-1].removeprefix("  three things to try: ").split("; ")

    assert tries(f"{SHAPE} --device-memory-gib 10") == [states, chunks, split]
    assert tries(f"{SHAPE} --device-memory-gib 10 --use-distributed-optimizer") == [chunks, split, smaller]
    few = "--layers 1 --hidden-size 64 --num-attention-heads 1 --vocab-size 1 --seq-length 65536 --micro-batch-size 8 "
    found = tries(f"{few} --global-batch-size 8 --device-memory-gib 0.1 --swap-host-memory-gib 1 --reserve-gib 0")
    assert found[:2] == ["more host memory for swap (--swap-host-memory-gib)", smaller] and len(found) == 3


def test_virtual_stages_and_tensor_parallel_ranks_are_planned_for(plan):
    words = SHAPE + "--num-layers-per-virtual-pipeline-stage 2 --tensor-model-parallel-size 4 --sequence-parallel "
    status, out, _ = plan(words + "--use-distributed-optimizer --device-memory-gib 8")
    assert status == 0 and "2 virtual stages" in out and row(out, "0 ")[:2] == ["5", "4+2"]


def test_a_reserve_is_kept_by_default(plan):
    words = SHAPE.replace("--reserve-gib 0 ", "") + "--tensor-model-parallel-size 2 "
    _, out, _ = plan(words + "--device-memory-gib 14")
    # 0.875 GiB, a 16th, for contexts; 0.21875, a 64th, for the groups of tensor and pipeline parallelism each; 2 %.
    assert "limit 12.41 GiB (14.00 less a reserve of 1.59) on each rank" in out
    assert "contexts 0.88, communicators 0.44, fragmentation 0.28 GiB" in out
    peak = float(row(out, "this plan")[-2])
    left = float(out.partition("the plan leaves ")[2].partition(" GiB beside the reserve")[0])
    assert peak + left == pytest.approx(12.41, abs=0.011)
    _, out, _ = plan(words + "--device-memory-gib 14 --reserve-gib 1.5")
    assert "limit 12.50 GiB (14.00 less a reserve of 1.50)" in out and "communicators" not in out
    status, _, err = plan(words + "--device-memory-gib 4")
    assert status == 1 and "a reserve of 0.46 GiB is kept besides: --reserve-gib" in err
    _, out, _ = plan(words + "--device-memory-gib 80")
    # As much as libraries and communicators take: 1 GiB, and 688 MiB for each group.
    assert "contexts 1.00, communicators 1.34, fragmentation 1.60 GiB" in out
    for wrong in ("--device-memory-gib 24 --reserve-gib 24", "--reserve-gib 1"):
        status, _, err = plan(words + wrong)
        assert status == 2 and "  --reserve-gib " in err


def test_many_virtual_stages_leave_the_table_readable(plan):
    words = "--layers 32 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 --micro-batch-size 1 "
    words += "--global-batch-size 16 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2 "
    _, out, _ = plan(words + "--device-memory-gib 40")
    start = out.index("stage  in flight")
    assert [line.split()[1:3] for line in out[start:].splitlines()[1:5]] == [
        ["19", "8+8+4+4"],
        ["17", "8+8+4+4"],
        ["15", "8+7+4+3"],
        ["13", "8+5+4+1"],
    ]
    assert len(out[start:].splitlines()[1]) < 100


@pytest.mark.parametrize(
    ("words", "reasons"),
    [
        (
            "--hidden-size x --num-attention-heads 0 --seq-length 8 --micro-batch-size 1 --normalization L "
            "--device-memory-gib -3 --link-gbps none --output no/such.yaml --picture plan.gif",
            [
                "--device-memory-gib takes a number above 0, not '-3'",
                "--num-layers, --global-batch-size: missing; --model, --hf-config or --megatron say the model's shape, "
                "--trace says all of it",
                "--hidden-size takes a whole number of at least 1, not 'x'",
                "--num-attention-heads takes a whole number of at least 1, not '0'",
                "--normalization takes LayerNorm, RMSNorm, not 'L'",
                "--link-gbps takes a number above 0, not 'none'",
                "--output: there is no folder no",
                "--picture takes a file that ends in .svg, .png, .pdf, not 'plan.gif'",
            ],
        ),
        (
            "--num-layers 7 --hidden-size 100 --num-attention-heads 3 --seq-length 8 --micro-batch-size 2 "
            "--global-batch-size 5 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 "
            "--num-query-groups 2 --device-memory-gib 1",
            [
                "--hidden-size 100 is no multiple of --num-attention-heads 3; give --kv-channels",
                "--num-layers 7 is no multiple of --pipeline-model-parallel-size 2: --pipeline-stages says how many "
                "each has",
                "--global-batch-size 5 is no multiple of --micro-batch-size times data-parallel ranks, 2",
                "--num-attention-heads 3 is no multiple of --num-query-groups 2",
                "--num-attention-heads 3 is no multiple of --tensor-model-parallel-size 2",
            ],
        ),
        (
            f"{SHAPE} --device-memory-gib 9 --context-parallel-size 3 --attention-backend unfused --hidden-dropout 0",
            [
                "--attention-backend unfused is not split over --context-parallel-size ranks: that needs flash",
                "--seq-length 4096 is no multiple of twice --context-parallel-size 3: each rank takes two pieces",
            ],
        ),
        (
            f"{SHAPE} --device-memory-gib 9 --attention-dropout 1",
            ["--attention-dropout is a share below 1, not 1"],
        ),
        (
            f"{SHAPE} --device-memory-gib 1e308 --swap-host-memory-gib 1e308 --tflops 1e-300 --num-layers {'9' * 5000}",
            [
                "--device-memory-gib takes a number of at most 1e+09, not '1e308'",
                "--swap-host-memory-gib takes a number of at most 1e+09, not '1e308'",
                f"--num-layers takes a whole number of at most 2147483647, not '{'9' * 60}'... (5000 characters)",
                "--tflops takes a number of at least 1e-09, not '1e-300'",
            ],
        ),
        (
            f"{SHAPE} --device-memory-gib 9 --num-layers 200000 --mtp-num-layers 200000",
            [
                "--num-layers takes a whole number of at most 100000, not 200000",
                "--mtp-num-layers takes a whole number of at most 100000, not 200000",
            ],
        ),
        (
            f"{SHAPE} --device-memory-gib 9 --global-batch-size 16777216",
            [
                "16777216 forward passes a step (pipeline stages: 2, micro-batches: 8388608): allowed: at most 1048576"
                ", which may take minutes; --global-batch-size counts sequences, not tokens",
            ],
        ),
        (
            f"{SHAPE} --device-memory-gib 9 --seq-length 2147483647 --ffn-hidden-size 2147483647",
            [
                "--num-layers, --hidden-size and other sizes of layers, --seq-length, --micro-batch-size: what they "
                "take together is more than can be counted; give smaller ones",
            ],
        ),
        (
            "--trace no/such.json --hidden-size 4 --device-memory-gib 1",
            [
                "--trace says what --hidden-size would; give either",
                "--trace no/such.json: cannot be read (No such file or directory)",
            ],
        ),
    ],
)
def test_bad_input_is_refused_with_all_reasons(plan, words, reasons):
    status, out, err = plan(words)
    first, *lines = [
        line for line in err.splitlines() if NO_MATPLOTLIB not in line
    ]  # one more where matplotlib is absent
    assert (status, out, first) == (2, "", "mindspeed_mem plan:")
    assert lines == ["  " + reason for reason in reasons]


def test_no_file_is_written_over_another(plan, tmp_path):
    same, table, profile = tmp_path / "same.svg", tmp_path / "table.json", tmp_path / "profile.json"
    link = tmp_path / "link.svg"
    link.symlink_to(same)
    table.write_text("{}")
    words = f"{SHAPE} --device-memory-gib 24 --devices {table} "
    status, out, err = plan(words + f"--output {same} --write-trace {tmp_path}/./same.svg --picture {link}")
    assert (status, out) == (2, "") and not same.exists()
    assert f"--output and --write-trace and --picture name the same file, {same}: give each its own" in err
    status, _, err = plan(words + f"--output {table}")
    assert status == 2 and table.read_text() == "{}"
    assert f"--output would write over what --devices reads, {table}: name another file" in err
    assert plan(f"{SHAPE} --device-memory-gib 24 --write-trace {profile}")[0] == 0
    status, _, err = plan(f"--trace {profile} --write-trace {profile}")
    assert status == 2 and f"--write-trace would write over what --trace reads, {profile}" in err
    assert plan(f"{SHAPE} --device-memory-gib 24 --output /dev/null --write-trace /dev/null")[0] == 0


def test_it_draws_step_time_over_limits(plan, tmp_path):
    pytest.importorskip("matplotlib")
    target = tmp_path / "plan.svg"
    words = SHAPE.replace("--layers 8", "--layers 2").replace("--global-batch-size 8", "--global-batch-size 4")
    status, out, _ = plan(f"{words} --device-memory-gib 11 --picture {target}")
    assert status == 0 and f"drawn to {target}" in out
    assert target.read_bytes().startswith(b"<?xml")


def test_without_matplotlib_it_says_how_to_install_it(plan, tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    status, out, err = plan(f"{SHAPE} --device-memory-gib 24 --picture {tmp_path / 'a.svg'}")
    assert (status, out) == (2, "") and "pip install matplotlib" in err


def test_it_needs_neither_torch_nor_megatron_nor_matplotlib():
    code = (
        "import sys; from mindspeed_mem.__main__ import main; "
        f"main(['plan', *{SHAPE.split()!r}, '--device-memory-gib', '60']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'megatron', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_models_and_devices_go_by_name(plan):
    words = "--micro-batch-size 1 --global-batch-size 8 --tensor-model-parallel-size 8 --use-distributed-optimizer "
    status, named, _ = plan(words + "--model llama3-8b --device-name h100 --num-layers 4 --data-parallel-size 2")
    assert status == 0 and "(79.10 less a reserve of " in named
    spelt = (
        "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8 --vocab-size 128256 "
        "--seq-length 8192 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
        "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --num-layers 4 "
        "--device-memory-gib 79.1 --tflops 635.6 --memory-gbps 2680 --link-gbps 35.4 --tensor-gbps 360 "
    )
    assumed = (
        "Assumed for h100: 635.6 TFLOP/s (80 % of 794.5 measured), 2680 GB/s device memory (80 % of 3350 on its "
        "sheet), 35.4 GB/s to the host with all devices of a node copying (measured), 360 GB/s to its neighbours (80 "
        "% of 450 on its sheet).\n"
    )
    assert named.startswith(assumed) and "35.4 GB/s to the host, 360 GB/s between tensor-parallel ranks" in named
    assert plan(words + spelt + "--data-parallel-size 2") == (0, named.replace(assumed, ""), "")
    _, smaller, _ = plan(words + "--model gpt2 --tensor-model-parallel-size 2 --device-name h100 --device-memory-gib 4")
    assert "\n12 layers, 1 pipeline stage, 8 micro-batches; limit " in smaller and "(4.00 less" in smaller
    _, partly, _ = plan(words + "--model gpt2 --device-name h100 --tensor-model-parallel-size 2 --link-gbps 30")
    assert "35.4" not in partly and "30 GB/s to the host" in partly
    status, _, err = plan(words + "--model gpt5 --device-name z80")
    assert status == 2 and "  --model takes gpt2, gpt2-medium, " in err and "  --device-name takes a100-40g, " in err
    _, _, err = plan("--trace no/such.json --device-name h100")
    assert "  --trace says what --device-name would; give either" in err


def test_what_is_assumed_of_a_device_stands_in_the_first_line(plan):
    _, out, _ = plan(SHAPE + "--device-memory-gib 60")
    assert out.startswith(
        "No device is named: assumed --tflops 400, --memory-gbps 2500, --tensor-gbps 200 (--device-name"
    )
    _, out, _ = plan(SHAPE + "--device-memory-gib 60 --tflops 300 --memory-gbps 2000 --tensor-gbps 100")
    assert out.startswith("8 layers, 2 pipeline stages")


def test_alone_on_its_node_a_device_copies_faster(plan):
    words = "--model gpt2 --micro-batch-size 1 --global-batch-size 8 --device-name h100 "
    assert "55.7 GB/s to the host (measured)" in plan(words)[1]
    assert "35.4 GB/s to the host with all devices" in plan(words + "--data-parallel-size 2")[1]


def test_devices_come_from_a_file_too(plan, tmp_path):
    words = "--model gpt2 --micro-batch-size 1 --global-batch-size 8 --device-name mine --devices "
    table = tmp_path / "devices.yaml"
    table.write_text("mine: {memory_gib: 10, measured: {tflops: 100, link_alone_gbps: 20}, sheet: {memory_gbps: 500}}")
    status, out, _ = plan(words + str(table))
    assert status == 0 and "(10.00 less a reserve of " in out
    assert out.startswith(
        "Assumed for mine: 80 TFLOP/s (80 % of 100 measured), 400 GB/s device memory (80 % of 500 on its sheet), 20 "
        "GB/s to the host (measured).\n"
    )
    _, out, _ = plan(words + str(table) + " --tensor-model-parallel-size 2")  # of its links it says nothing then
    assert "assumed --link-gbps 50, --tensor-gbps 200 (" in out.splitlines()[0]
    table.write_text("mine: {memory: 10, measured: {tflops: fast, flops: 1}}")
    status, _, err = plan(words + str(table))
    assert status == 2
    for line in ("mine.memory: unknown", "mine.measured.flops: unknown", "mine.measured.tflops: got 'fast'"):
        assert f"  --devices {table}: {line}" in err
    for text in ("[1]", "{", "a: ["):
        table.write_text(text)
        assert plan(words + str(table))[0] == 2


def test_every_device_has_dated_sources():
    for name, row in devices.table().items():
        assert row["sources"] and all(set(one) == {"of", "url", "read"} for one in row["sources"]), name
        for alone in (True, False):
            found = devices.device(name, row, alone, {})
            assert found.memory_gib and set(found.speeds) == {"tflops", "memory_gbps", "link_gbps", "tensor_gbps"}
            assert all(speed > 0 for speed in found.speeds.values())


def test_this_device_is_measured(plan, tmp_path, monkeypatch):
    monkeypatch.setenv("MINDSPEED_MEM_DEVICE", "cpu")
    monkeypatch.setattr("mindspeed_mem.device.speeds._SIDES", (64,))
    monkeypatch.setattr("mindspeed_mem.device.speeds._MOVED", 2**20)
    table = tmp_path / "here.json"
    assert plan(f"--measure --output {table}")[0] == 0
    words = (
        "--model gpt2 --micro-batch-size 1 --global-batch-size 8 --device-memory-gib 10 --device-name here --devices "
    )
    status, out, _ = plan(words + str(table))
    assert status == 0 and out.startswith("Assumed for here: ") and out.splitlines()[0].count("measured") == 3
    assert "--measure says what --model would; give either" in plan("--measure --model gpt2")[2]


def test_each_decision_says_what_it_saves_and_costs(plan):
    words = f"{SHAPE} --swap-host-memory-gib 0 --device-memory-gib"
    _, out, _ = plan(f"{words} 24 --next-gib")
    table = out[out.index("\ndecision ") :].splitlines()[2:]
    rows = [line.rsplit(maxsplit=5) for line in table[: table.index(next(one for one in table if one[0] == "("))]]
    assert rows and all(name.startswith("recompute ") for name, *_ in rows)  # nothing may leave for the host
    each = [[float(number) for number in numbers] for _, *numbers in rows]
    assert each == sorted(each, key=lambda numbers: numbers[-1])
    for _, saved, work, step, ratio in each:
        assert saved > 0 and 0 <= step <= 2.1 * work  # at most what both stages do again
        assert ratio == pytest.approx(step / (saved / 1024), abs=0.06 * (1 + 1024 / saved))  # of figures as printed
    more, less = (
        float(re.search(rf"with 1 GiB {what} a step takes .*\((.*) ms\)", out)[1]) for what in ("more", "less")
    )
    assert more <= 0 <= less and more < less
    _, kept, _ = plan(f"{words} 200")
    assert "decision" not in kept and "with 1 GiB" not in kept


def test_schedules_that_split_the_backward_are_planned_with_what_waits(plan):
    words = f"{SHAPE} {LLAMA} --device-memory-gib 60 "
    found = {name: plan(words + name)[1] for name in ("", "--split-backward", "--pipeline-schedule zb")}
    whole, within, zb = (row(found[name], "keep all") for name in found)
    assert float(zb[0]) < float(whole[0]) == float(within[0])
    full = {name: float(row(out, "Megatron's full recompute")[-2]) for name, out in found.items()}
    assert full[""] < full["--split-backward"] < full["--pipeline-schedule zb"]
    waits = [line.split()[:3] for line in found["--pipeline-schedule zb"].splitlines() if line.startswith(("0 ", "1 "))]
    assert "wait for W" in found["--pipeline-schedule zb"] and waits == [["0", "2", "1"], ["1", "1", "2"]]


def test_a_v_has_both_ends_of_the_model_on_its_first_stage_and_a_cap_holds_less(plan, tmp_path):
    target = tmp_path / "profile.json"
    words = f"{SHAPE} {LLAMA} --device-memory-gib 60 --pipeline-schedule v "
    status, out, _ = plan(words + f"--write-trace {target}")
    stages = profile_file.read(target).problem.stages
    assert status == 0 and "2 virtual stages" in out
    assert [[part.first_layer for part in stage.parts] for stage in stages] == [[0, 6], [2, 4]]
    assert [bool(stage.parts[1].after.weight_bytes) for stage in stages] == [True, False]
    _, capped, _ = plan(words + "--max-inflight-microbatches 2")
    kept, less = (row(text, "keep all") for text in (out, capped))
    assert float(less[0]) > float(kept[0]) and float(less[-2]) < float(kept[-2])
    assert plan(f"--trace {target} --device-memory-gib 60 --reserve-gib 0")[1] == out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--pipeline-schedule dualpipe", "--pipeline-schedule takes 1f1b, zb, v, not 'dualpipe'"),
        ("--pipeline-schedule zb --pipeline-model-parallel-size 1", "--pipeline-schedule zb needs"),
        ("--pipeline-schedule v --max-inflight-microbatches 1", "the cap of passes in flight is 1"),
        ("--split-backward --chunk-zero-stage 1 --use-distributed-optimizer", "--chunk-zero-stage is refused beside"),
    ],
)
def test_schedules_that_are_not_are_refused(plan, words, reason):
    status, _, err = plan(f"{SHAPE} --device-memory-gib 60 {words}")
    assert status == 2 and reason in err
