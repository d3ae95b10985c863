"""The table of features: its options exist, conflicts are reported all at once, and off means off."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from megatron.core import package_info
from megatron.core.transformer import TransformerConfig

from mindspeed_mem import features, requirements
from mindspeed_mem.device import Backend
from mindspeed_mem.features import FEATURES, FeatureError, Settings, add_arguments, check, conflicts, scan
from mindspeed_mem.features.rows import dest_of
from mindspeed_mem.patching import upstream
from mindspeed_mem.zero.core.placement import Placement
from tests import compat

ROOT = Path(__file__).parents[2]
SWAP = {"swap_config": {"swap": True}}
RECOMPUTE = {"recompute_config": {"recompute": True}}
FLAGS = {  # each as on a command line, and what it stands for
    "--recompute-layers": ["0,3-5"],
    "--select-recompute": [r"mlp\.linear_fc1=0-1", "self_attention"],
    "--select-comm-recompute": [r".*\.norm=all"],
}
WITH_VALUES = {
    "--pipeline-stages": "3,5",
    "--max-inflight-microbatches": "2",
    "--pipeline-schedule": "v",
    "--chunk-zero-stage": "3",
    "--optimizer-parallel": "sharding",
    "--memory-trace": "trace.json",
    "--memory-report": "pages",
}


@pytest.fixture(autouse=True)
def no_device_named(monkeypatch):
    monkeypatch.delenv("MINDSPEED_MEM_DEVICE", raising=False)


@pytest.fixture
def swap_file(tmp_path):
    path = tmp_path / "swap.yaml"
    path.write_text(json.dumps(SWAP))
    return str(path)


def problems_of(args, **kwargs):
    with pytest.raises(FeatureError) as caught:
        check(args, **kwargs)
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return caught.value.problems


def test_patches_named_in_the_table_exist():
    from fnmatch import filter as matching

    files = [path.stem for path in (ROOT / "patches").glob("*.py")]
    named = [p for f in FEATURES for p in f.patches] + list(features.ON_HOST)
    assert [pattern for pattern in named if not matching(files, pattern)] == []


def test_nothing_given_is_nothing_on():
    parser = add_arguments(argparse.ArgumentParser())
    assert check(parser.parse_args([])) == check({}) == check(scan([])) == Settings()
    assert check({"device": "auto", "hidden_size": 3, "swap_attention": True}) == Settings()


def test_swap_on(swap_file):
    parser = add_arguments(argparse.ArgumentParser())
    arguments = ["--device", "cpu", f"--memory-config={swap_file}", "--swap-host-memory-gib", "0.5", "--sdpa-attention"]
    settings = check(parser.parse_args(arguments))
    assert settings == check(scan(arguments))
    assert settings.on == ("--device", "--memory-config", "--swap-host-memory-gib", "--sdpa-attention")
    assert settings.backend.type == "cpu" and settings.memory.swap.swap
    assert settings.host_limit_bytes == 2**29
    assert settings.patches == ("cpu_*", "activation_*", "sdpa_*")


@pytest.mark.parametrize("flag", FLAGS)
def test_recompute_needs_no_file(flag):
    parser = add_arguments(argparse.ArgumentParser())
    arguments = ["--device", "cpu", flag, *FLAGS[flag]]
    settings = check(scan(arguments))
    assert settings == check(parser.parse_args(arguments)) == check(asked_by(flag))
    assert settings.on == ("--device", flag) and settings.patches == ("cpu_*", "activation_*", "recompute_*")
    assert settings.memory.recompute.active and not settings.memory.swap.swap and settings.notices == ()


def test_the_values_of_the_recompute_flags():
    def rules(**args):
        return [(r.pattern, r.layers) for r in check({"device": "cpu", **args}).memory.recompute.rules]

    for value in ("0,3-5", "0, 3-4 ,5", [0, 3, 4, 5], [[0], [3, 4, 5]], (0, 3, 4, 5)):
        assert rules(recompute_layers=value) == [(None, (0, 3, 4, 5))]
    assert rules(recompute_layers="all") == rules(recompute_layers=True) == [(None, True)]
    assert rules(recompute_layers=0) == rules(recompute_layers="0") == [(None, (0,))]
    several = ["mlp=0", "mlp=2-3", "a=b=1", r"x\.y"]
    expected = [("mlp", (0, 2, 3)), ("a=b", (1,)), (r"x\.y", True)]
    assert rules(select_recompute=several) == expected
    assert rules(select_recompute={"mlp": [0, 2, 3], "a=b": 1, r"x\.y": True, "off": False}) == expected
    assert rules(select_comm_recompute="mlp=all") == [("mlp", True)]
    assert rules(select_comm_recompute=True) == [(r".*\.norm", True)]
    for off in ([], {}, False, None, {"mlp": False}):
        assert check({"select_recompute": off, "device": "cpu"}).memory is None


def test_flags_are_merged_with_the_file():
    settings = check({"memory_config": SWAP, "select_recompute": "mlp=1", "device": "cpu"})
    assert settings.on == ("--device", "--memory-config", "--select-recompute")
    assert settings.memory.swap.swap and settings.memory.recompute.active
    (problem,) = problems_of({"memory_config": RECOMPUTE, "recompute_layers": "0", "device": "cpu"})
    assert "recompute_config.recompute: got True, and --recompute-layers is given as well" in problem


def test_a_file_that_only_recomputes():
    settings = check({"memory_config": RECOMPUTE, "device": "cpu", "swap_host_memory_gib": 1})
    assert settings.on == ("--device", "--memory-config", "--swap-host-memory-gib")
    assert settings.memory.recompute.active and settings.patches == ("cpu_*", "activation_*", "recompute_*")
    assert settings.host_limit_bytes is None
    assert settings.notices == ("--swap-host-memory-gib has no effect: nothing is swapped",)
    off = {"swap_config": {"swap": False}, **RECOMPUTE}
    assert check({"memory_config": off, "device": "cpu"}).notices == ()


def test_output_gradients_without_anything_put_off_have_no_effect():
    plan = {"swap_config": {"swap": True, "op_swap": [], "output_gradients": True}}
    (notice,) = check({"device": "cpu", "memory_config": plan}).notices
    assert notice.startswith("swap_config.output_gradients has no effect") and "--split-backward" in notice
    for more in ({"split_backward": True}, {"pipeline_schedule": "zb"}):
        assert check({"device": "cpu", "memory_config": plan, **more}).notices == ()


def test_surviving_needs_no_plan_and_takes_the_host_budget():
    settings = check(scan(["--survive-oom", "--swap-host-memory-gib", "2", "--device", "cpu"]))
    assert settings.on == ("--device", "--swap-host-memory-gib", "--survive-oom")
    assert settings.survive_oom and settings.memory is None and settings.host_limit_bytes == 2 * 2**30
    assert (
        settings.patches
        == ("cpu_*", "activation_*", "recompute_distributed", "recompute_fused", "recompute_random", "survive_*")
        and settings.notices == ()
    )
    off = check({"memory_config": {"swap_config": {"swap": False}}, "survive_oom": True, "device": "cpu"})
    assert off.survive_oom and off.memory is None and off.patches == settings.patches
    both = check({"memory_config": RECOMPUTE, "survive_oom": True, "swap_host_memory_gib": 1, "device": "cpu"})
    assert both.memory is not None and both.host_limit_bytes == 2**30 and both.notices == ()
    assert both.patches == (*settings.patches, "recompute_*")


def test_surviving_refuses_an_allocator_that_is_not_torchs(monkeypatch):
    monkeypatch.setattr(Backend, "foreign_allocator", lambda self: "a pluggable allocator")
    (problem,) = problems_of({"survive_oom": True, "device": "cpu"})
    assert "--survive-oom cannot be combined with a pluggable allocator" in problem
    check({"memory_config": SWAP, "device": "cpu"})


def test_a_configuration_without_swap_switches_nothing_on_and_bars_nothing():
    off = {"swap_config": {"swap": False}}
    settings = check({"memory_config": off, "recompute_granularity": "full", "device": "cpu"})
    assert settings.memory is None and settings.patches == ("cpu_*",)
    assert any("nothing is swapped" in notice for notice in settings.notices)


def test_the_device_is_the_machines_where_none_is_named():
    settings = check({"memory_config": SWAP})
    best = "cuda" if torch.cuda.is_available() else "cpu"
    assert settings.backend.type in (best, "npu")
    assert ("cpu_*" in settings.patches) == (settings.backend.type == "cpu")


def test_the_environment_names_a_device(monkeypatch):
    monkeypatch.setenv("MINDSPEED_MEM_DEVICE", "cpu")
    assert check({}).patches == ("cpu_*",)
    monkeypatch.setenv("MINDSPEED_MEM_DEVICE", "abacus")
    assert "'abacus'" in problems_of({})[0]
    assert check({"device": "cpu"}).backend.type == "cpu"


def asked_by(flag):
    """The settings that switch on what `flag` stands for, and nothing else."""
    if flag == "--memory-config":
        return {"memory_config": SWAP, "device": "cpu"}
    if flag in ("--survive-oom", "--adaptive-memory-optimization", "--split-backward"):
        return {flag[2:].replace("-", "_"): True, "device": "cpu"}
    if flag in WITH_VALUES:
        return {flag[2:].replace("-", "_"): WITH_VALUES[flag], "device": "cpu"}
    value = FLAGS[flag][0] if flag == "--recompute-layers" else FLAGS[flag]
    return {flag[2:].replace("-", "_"): value, "device": "cpu"}


BARRED = [(f.flag, o) for f in FEATURES for o in f.bars]


@pytest.mark.parametrize(("flag", "option"), BARRED, ids=str)
def test_each_barred_option_is_refused(flag, option):
    asked = asked_by(flag)
    value = option.value or ("local" if option.off else True)
    if option.origin == "mindspeed_mem":
        value = asked_by(option.flag)[option.dest]
    (problem,) = problems_of({**asked, option.dest: value})
    assert problem.startswith(f"{flag} cannot be combined with {option}") and f": {option.why}. " in problem
    assert option.off is None or problem.endswith(f"Leave one of them out, or give {option.flag} {option.off}")
    # ... but not what means off, and not with nothing asked for
    off = None if option.origin == "mindspeed_mem" else option.off or ("selective" if option.value else False)
    check({**asked, option.dest: off})
    check({"device": "cpu", option.dest: value})


def test_a_plan_file_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for name in (".", "/", str(tmp_path), str(tmp_path / "file" / "plan.yaml")):
        asked = {"adaptive_memory_optimization": True, "adaptive_plan_file": name, "device": "cpu"}
        (problem,) = problems_of(asked)
        assert problem.startswith("--adaptive-plan-file: got") and "allowed: a file" in problem
    check({**asked, "adaptive_plan_file": str(tmp_path / "new" / "plan.yaml")})


CHUNK_DETAILS = {
    "placement_policy": ("auto:1.5GiB", "placement", Placement("auto", 3 * 2**29)),
    "host_optimizer_step": ("host", "step_on_host", True),
    "chunk_reduce_each_microbatch": (True, "reduce_each", True),
    "chunk_host_memory_gib": (2, "host_limit_bytes", 2**31),
    "min_chunk_size_mib": ("0.5", "min_chunk_size", 2**18),
    "chunk_search_range_mib": (8, "search_range", 2**22),
    "chunk_hidden_dim": ("640", "hidden_size", 640),
}


@pytest.mark.parametrize("name", CHUNK_DETAILS)
def test_details_of_chunk_zero(name):
    given, field, expected = CHUNK_DETAILS[name]
    (problem,) = problems_of({"device": "cpu", name: given})
    assert "needs --chunk-zero-stage" in problem
    for stage in (1, "2", 3):
        settings = check({"device": "cpu", "chunk_zero_stage": stage, name: given})
        assert settings.chunk.stage == int(stage) and getattr(settings.chunk, field) == expected
        assert settings.chunk.backend.type == "cpu" and settings.patches == ("cpu_*", "chunk_*")
    assert check({"chunk_zero_stage": 0, "device": "cpu"}).chunk.stage == 0


def test_chunk_zero_needs_the_distributed_optimizer():
    check({"chunk_zero_stage": 2, "device": "cpu"} | {"use_distributed_optimizer": True})
    args = argparse.Namespace(chunk_zero_stage=2, device="cpu", use_distributed_optimizer=False)
    (problem,) = problems_of(args)
    assert problem.startswith("--chunk-zero-stage needs --use-distributed-optimizer: its buckets are the chunks")


def test_what_limits_the_adaptive_plan_needs_it():
    for name, value in {"adaptive_plan_file": "plan.yaml", "device_memory_gib": 1.5}.items():
        (problem,) = problems_of({"device": "cpu", name: value})
        assert "--adaptive-memory-optimization" in problem
    settings = check(
        {
            "adaptive_memory_optimization": True,
            "adaptive_plan_file": "plan.yaml",
            "device_memory_gib": 1.5,
            "device": "cpu",
        }
    )
    assert settings.adaptive and settings.survive_oom and settings.memory is None
    assert settings.plan_file == Path("plan.yaml") and settings.device_limit_bytes == 3 * 2**29


def test_an_adaptive_run_needs_the_solver_from_the_start(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    check({"survive_oom": True, "device": "cpu"})
    with pytest.raises(FeatureError, match="--adaptive-memory-optimization: scipy.* is not installed: pip install"):
        check({"adaptive_memory_optimization": True, "device": "cpu"})


def test_what_only_recompute_bars():
    barred = {"fp8": "hybrid"}
    check({"memory_config": SWAP, "device": "cpu", **barred})
    for asked in ({"memory_config": RECOMPUTE}, {"memory_config": SWAP | RECOMPUTE}, {"recompute_layers": "all"}):
        (problem,) = problems_of({"device": "cpu", **asked, **barred})
        assert "cannot be combined with --" in problem
    (problem,) = problems_of({"memory_config": SWAP, "recompute_layers": 0, "device": "cpu", **barred})
    assert problem.startswith("--memory-config and --recompute-layers cannot be combined with --")


def test_what_a_command_line_says_is_refused_before_its_parser_sees_it(swap_file):
    line = f"--memory-config {swap_file} --device=cpu --smart-swap --recompute-granularity=full --cuda-graph-impl local"
    assert len(problems_of(scan([*line.split(), "--cpu-offloading-num-layers", "0"]))) == 3


def test_all_problems_are_reported_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    bad = tmp_path / "bad.yaml"
    bad.write_text("swap_config: {swap: True, layer_swap: {layers: [9], backward_prefetch: 0}, op_swaps: 1}")
    problems = problems_of(
        {
            "device": "cuda",
            "memory_config": str(bad),
            "swap_host_memory_gib": -1,
            "sdpa_attention": True,
            "transformer_impl": "transformer_engine",
            "fine_grained_activation_offloading": True,
            "num_layers": 4,
            "memory-config": 1,
        }
    )
    text = "\n".join(problems)
    assert len(problems) == 6
    for part in (
        "did you mean 'memory_config'",
        "--swap-host-memory-gib: got -1; allowed: a number above 0",
        "swap_config.layer_swap.layers",
        "backward_prefetch",
        "op_swaps",
        "--fine-grained-activation-offloading",
        "--sdpa-attention needs --transformer-impl local",
        "'cuda' is not available",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"device": "tpu"}, "--device: got 'tpu'; allowed: auto, cpu, cuda, npu"),
        ({"swap_host_memory_gib": "much", "memory_config": SWAP}, "--swap-host-memory-gib: got 'much'; allowed:"),
        ({"swap_host_memory_gib": float("inf"), "memory_config": SWAP}, "--swap-host-memory-gib: got inf; allowed:"),
        ({"swap_host_memory_gib": True, "memory_config": SWAP}, "--swap-host-memory-gib: got True; allowed:"),
        ({"swap_host_memory_gib": 4}, "--swap-host-memory-gib needs --memory-config"),
        ({"memory_config": 7}, "--memory-config: got 7; allowed: a file name"),
        ({"memory_config": "/no/such.yaml"}, "/no/such.yaml: cannot be read"),
        ({"sdpa_attention": "no"}, "--sdpa-attention: got 'no'; allowed: True or False"),
        ({"recompute_layers": "3-1"}, "--recompute-layers: got '3-1'; allowed: layer indices counted from 0"),
        ({"recompute_layers": "1,,2"}, "--recompute-layers: got '1,,2'; allowed: layer indices"),
        ({"recompute_layers": "0-99999999999"}, "--recompute-layers: got '0-99999999999'; allowed: layer indices"),
        ({"recompute_layers": [-1]}, "--recompute-layers[0]: got -1 (int); allowed: a layer index"),
        ({"recompute_layers": "4", "num_layers": 4}, "--recompute-layers: got layer 4; allowed: 0 to 3"),
        ({"select_recompute": ["mlp=x"]}, "--select-recompute: got ['mlp=x']; allowed: layer indices"),
        ({"select_recompute": ["a("]}, "--select-recompute: got 'a(' (str); allowed: names"),
        ({"select_recompute": 3}, "--select-recompute: got 3; allowed: patterns"),
        ({"select_comm_recompute": {"mlp": [0.5]}}, "--select-comm-recompute mlp[0]: got 0.5"),
        ({"recompute_layers": "0", "swap_host_memory_gib": 1}, "--swap-host-memory-gib needs --memory-config"),
        ({"chunk_zero_stage": 4}, "--chunk-zero-stage: got 4; allowed: 1, 2 or 3"),
        ({"chunk_zero_stage": True}, "--chunk-zero-stage: got True; allowed: 1, 2 or 3"),
        ({"placement_policy": "gpu", "chunk_zero_stage": 1}, "--placement-policy: got 'gpu'; allowed: device, host"),
        ({"placement_policy": "device:0", "chunk_zero_stage": 1}, "a budget is a number of bytes above 0"),
        ({"placement_policy": "static:1.5", "chunk_zero_stage": 1}, "the fraction lies between 0 and 1"),
        ({"memory_trace": "t.json", "memory_trace_steps": "7-5"}, "--memory-trace-steps: got '7-5'; allowed: steps"),
        ({"memory_trace": "t.json", "memory_trace_steps": "0"}, "--memory-trace-steps: got '0'; allowed: steps"),
        ({"memory_trace": "t.json", "memory_trace_steps": []}, "--memory-trace-steps: got []; allowed: steps"),
        ({"memory_trace_steps": "5"}, "--memory-trace-steps needs --memory-trace"),
        ({"recompute_layer": "0"}, "did you mean 'recompute_layers'?"),
    ],
)
def test_bad_values(args, expected):
    (problem,) = problems_of(args)
    assert expected in problem


def test_layers_out_of_range_need_the_number_of_layers():
    config = {"swap_config": {"swap": True, "layer_swap": {"layers": [4], "backward_prefetch": 1}}}
    check({"memory_config": config, "device": "cpu"})
    assert "swap_config.layer_swap" in problems_of({"memory_config": config, "num_layers": 4, "device": "cpu"})[0]


def test_layers_of_a_decoder_count_on():
    line = "--recompute-layers 3 --device cpu --num-layers 2"
    assert check(scan([*line.split(), "--decoder-seq-length", "16"])).memory is not None
    with pytest.raises(FeatureError, match="allowed: 0 to 1, since the model has 2 layers"):
        check(scan(line.split()))
    with pytest.raises(FeatureError, match="got layer 3; allowed: 0, since the model has one layer"):
        check({"recompute_layers": 3, "device": "cpu", "num_layers": 1})


def test_conflicts_of_a_transformer_config():
    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
    assert config.transformer_impl != "local"  # a default, not a choice
    assert conflicts(config, [feature.flag for feature in FEATURES]) == []
    config = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    (problem,) = conflicts(config, ["--memory-config"])
    assert "--recompute-granularity full" in problem
    assert conflicts(config, ["--device"]) == []


def test_flags_are_added_where_the_parser_lacks_them():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="own")
    assert add_arguments(add_arguments(parser)) is parser
    help_text = parser.format_help()
    assert help_text.count("mindspeed_mem:") == 1
    words = [line.split()[0] for line in help_text.splitlines() if line.startswith("  -")]
    assert all(words.count(feature.flag) == 1 for feature in FEATURES)
    assert parser.parse_args([]).device == "own"


def test_scanning_takes_whole_flags_only():
    assert scan(["--memory", "x", "--dev", "cpu", "positional"]) == argparse.Namespace()
    assert scan(["--device=cpu", "--", "--sdpa-attention"]) == argparse.Namespace(device="cpu")
    assert scan(["--num-layers", "12"]).num_layers == 12
    several = ["--select-recompute", "a", "b=1", "--select-recompute=c", "--num-layers=4"]
    assert scan(several) == argparse.Namespace(select_recompute=["a", "b=1", "c"], num_layers=4)
    assert scan(["--optimizer", "adam", "muon"]).optimizer == ["adam", "muon"]
    for flag in ("--memory-config", "--select-recompute"):
        with pytest.raises(FeatureError, match=flag):
            scan([flag])


def test_the_options_of_megatron_near_ours_are_no_mistake():
    names = {field.name: None for field in dataclasses.fields(TransformerConfig)}
    assert check(names) == Settings()


def test_flags_that_look_like_ours_are_named():
    words = [
        "--survive-omm",
        "--split_backward",
        "--memory-confg=a.yaml",
        "--survive-oom",
        "--recompute-num-layers",
        "1",
        "--lr",
        "--",
        "-x",
    ]
    assert features.misspelt(words) == [
        "--survive-omm is no flag of mindspeed_mem; did you mean --survive-oom?",
        "--split_backward is no flag of mindspeed_mem; did you mean --split-backward?",
        "--memory-confg is no flag of mindspeed_mem; did you mean --memory-config?",
    ]


def test_a_v_has_bars_of_its_own(monkeypatch):
    for schedule, expected in (("zb", 0), ("v", 3)):
        asked = {"device": "cpu", "pipeline_schedule": schedule, "mtp_num_layers": 1, "is_hybrid_model": True}
        found = [] if not expected else problems_of({**asked, "ckpt_format": "torch"})
        assert len(found) == expected and all("--pipeline-schedule cannot be combined with" in one for one in found)
        assert check({**asked, "ckpt_format": "torch"}) if not expected else "--ckpt-format torch" in str(found)
    for option in ("--ckpt-format", "--ckpt-convert-format"):
        arguments = ["--device", "cpu", "--pipeline-schedule", "v", option, "torch"]
        assert len(problems_of(scan(arguments))) == 1
    monkeypatch.setattr(upstream, "version_of", lambda _: "0.15.3")
    (problem,) = problems_of({"device": "cpu", "pipeline_schedule": "v"})
    assert "needs megatron-core 0.16 or newer" in problem and "give zb" in problem
    assert check({"device": "cpu", "pipeline_schedule": "zb"}).zero_bubble


def test_no_split_optimizer_is_saved_in_a_format_that_one_rank_writes():
    """Also at the end of a conversion: that rank waited for the others, which had gone on."""
    for option in ("--ckpt-format", "--ckpt-convert-format"):
        asked = ["--device", "cpu", "--optimizer-parallel", "sharding", option]
        (problem,) = problems_of(scan([*asked, "torch"]))
        assert f"--optimizer-parallel cannot be combined with {option} torch: there one rank saves" in problem
        assert check(scan([*asked, "torch_dist"])).optimizer_parallel == "sharding"


def test_a_cap_is_a_whole_number():
    parser = add_arguments(argparse.ArgumentParser())
    arguments = ["--device", "cpu", "--max-inflight-microbatches", "2"]
    settings = check(scan(arguments))
    assert settings == check(parser.parse_args(arguments)) == check({"device": "cpu", "max_inflight_microbatches": 2})
    assert settings.max_inflight == 2 and settings.patches == ("cpu_*", "pipeline_cap")
    assert check({}).max_inflight is None and not check({}).zero_bubble
    zb = check({"device": "cpu", "pipeline_schedule": "zb"})
    assert zb.zero_bubble and zb.patches == ("cpu_*", "pipeline_cap", "pipeline_split", "pipeline_delayed")
    v = check({"device": "cpu", "pipeline_schedule": "v"})
    assert v.zero_bubble and v.v_placement and not zb.v_placement
    assert v.patches == ("cpu_*", "pipeline_cap", "pipeline_split", "pipeline_delayed", "pipeline_v")
    assert check({"device": "cpu", "pipeline_schedule": "1f1b"}) == check({"device": "cpu"})
    (problem,) = problems_of({"device": "cpu", "pipeline_schedule": "interleaved"})
    assert problem.startswith("--pipeline-schedule: got 'interleaved'") and "1f1b" in problem
    for wrong in ("0", 0, -1, "2.5", 1.5, "two", "", True, [2], "\u0662"):
        (problem,) = problems_of({"device": "cpu", "max_inflight_microbatches": wrong})
        assert problem == f"--max-inflight-microbatches: got {wrong!r}; allowed: a whole number of at least 1"


ANOTHER_JOB = {  # for each flag two values with which a plan may be another one
    "--memory-config": [{"swap_config": {"swap": True}}, None],
    "--recompute-layers": ["0", "1"],
    "--select-recompute": ["mlp=0", "mlp=1"],
    "--select-comm-recompute": ["mlp=0", "mlp=1"],
    "--chunk-zero-stage": [2, 3],
    "--placement-policy": ["host", "host:2GiB"],
    "--host-optimizer-step": ["device", "host"],
    "--chunk-reduce-each-microbatch": [False, True],
    "--chunk-host-memory-gib": [1, 2],
    "--min-chunk-size-mib": [1, 2],
    "--chunk-search-range-mib": [1, 2],
    "--chunk-hidden-dim": [1, 2],
    "--optimizer-parallel": ["grouping", "sharding"],
    "--sdpa-attention": [False, True],
    "--pipeline-stages": ["3,5", "5,3"],
}


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.flag)
def test_a_kept_plan_goes_by_every_feature_or_the_table_says_why_not(feature):
    if feature.same_plan:
        assert feature.flag not in ANOTHER_JOB and feature.dest not in features.plan_facts(Settings())
        return
    needed = {dest_of(flag): 3 for flag in feature.needs_features[:1]}
    asked = [{**needed, "device": "cpu", feature.dest: value} for value in ANOTHER_JOB[feature.flag]]
    one, other = (json.dumps(features.plan_facts(check(args))) for args in asked)
    assert one != other
    assert one == json.dumps(features.plan_facts(check(asked[0])))


def test_what_an_old_megatron_cannot_carry_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(package_info, "__version__", "0.12.1")
    with pytest.raises(FeatureError) as caught:
        check({"chunk_zero_stage": 2, "pipeline_stages": "2,2", "recompute_layers": "all"})
    assert len(caught.value.problems) == 2
    for flag, problem in zip(("--chunk-zero-stage", "--pipeline-stages"), caught.value.problems, strict=True):
        assert problem.startswith(f"{flag} needs megatron-core 0.14 or newer, and 0.12.1 is installed: ")
    assert not check({"recompute_layers": "all"}).notices


def test_a_megatron_that_no_test_has_run_with_is_noticed(monkeypatch):
    monkeypatch.setattr(package_info, "__version__", "0.99.0")
    (notice,) = check({"recompute_layers": "all"}).notices
    assert notice.startswith("megatron-core 0.99.0 is untested: this version of mindspeed_mem was tested with ")
    assert not check({}).notices


def test_the_table_of_versions_is_that_of_the_features():
    """`make compat` has been run, nothing failed, and its page is there."""
    for version, found in requirements.COMPAT.items():
        assert found["doctor"] == "works" and found["features"].keys() == compat.FEATURES.keys()
        for name, result in found["features"].items():
            since = compat.since(compat.FEATURES[name][0])
            refused = bool(since) and upstream.parts(version) < upstream.parts(since)
            assert result.partition(": ")[0] == ("refused" if refused else "works"), (version, name)
    assert compat.PAGE.read_text(encoding="utf-8") == compat.page(requirements.COMPAT)
