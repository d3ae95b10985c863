"""The options of others that the table of features names exist where the table says they do."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from megatron.core.transformer import TransformerConfig

from mindspeed_mem.features import FEATURES, FeatureError, check, conflicts, scan

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "beside-megatron.md"
OPTIONS = [option for feature in FEATURES for option in (*feature.needs, *feature.bars)]

# Options of Megatron-LM core_v0.16.1 (or of a later one) that are no fields of TransformerConfig, and of MindSpeed
# core_r0.16.0; both are compared with the real parsers where those are there.
MEGATRON_LM = {
    "--check-weight-hash-across-dp-replicas-interval",
    "--ckpt-convert-format",
    "--ckpt-format",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--hybrid-override-pattern",
    "--log-params-norm",
    "--num-distributed-optimizer-instances",
    "--num-layers-per-virtual-pipeline-stage",
    "--optimizer",
    "--optimizer-cpu-offload",
    "--overlap-param-gather-with-optimizer-step",
    "--rl-offload-optimizer-during-inference",
    "--save-wgrads-interval",
    "--te-rng-tracker",
    "--use-distributed-optimizer",
    "--use-legacy-models",
    "--use-megatron-fsdp",
    "--use-nccl-ub",
    "--use-precision-aware-optimizer",
    "--use-torch-fsdp2",
    "--yaml-cfg",
}
LATER_MEGATRON_LM = {"--hybrid-layer-pattern"}
EARLIER_MEGATRON_LM = {"--use-custom-fsdp"}
"""Before 0.14."""
MINDSPEED = {
    "--automated-pipeline",
    "--compress-dense",
    "--dist-train",
    "--layerzero",
    "--moe-allgather-overlap-comm",
    "--moe-alltoall-overlap-comm",
    "--moe-fb-overlap",
    "--moe-unperm2-mem-optim-swap",
    "--moe-zero-memory",
    "--noop-layers",
    "--pipeline-num-transformer-layers",
    "--quant-grads",
    "--quant-states",
    "--recompute-in-advance",
    "--recompute-activation-function",
    "--recompute-in-bubble",
    "--recompute-norm",
    "--reuse-fp32-param",
    "--schedules-method",
    "--smart-swap",
    "--swap-attention",
    "--swap-optimizer",
    "--use-multiparameter-pipeline-model-parallel",
    "--virtual-optimizer",
}
# Of its earlier versions; core_r0.16.0 has the first two in a parser that nothing uses.
EARLIER_MINDSPEED = {
    "--layerzero",
    "--adaptive-recompute-device-size",
    "--adaptive-recompute-device-swap",
    "--memory-fragmentation",
}
# Of its later versions, 26.0 and 26.1.
LATER_MINDSPEED = {"--compress-activation", "--compress-optimizer", "--swap-layer-input"}
MINDSPEED_LLM = {
    "--layerwise-disaggregated-training",
    "--mla-zero-memory",
    "--num-layer-list",
    "--o2-optimizer",
    "--recompute-mla-up-proj",
}
"""Of 26.1.0."""

LATER_MEGATRON = {"--moe-paged-stash"}
"""Of megatron-core 0.18 and 0.19."""

OPTIONS_OF_MEGATRON_LM = """
import argparse, json, sys
sys.argv = ["pretrain_gpt.py", "--device", "cpu"]
import mindspeed_mem.megatron_adaptor
from megatron.training.arguments import add_megatron_arguments
print(json.dumps(list(add_megatron_arguments(argparse.ArgumentParser())._option_string_actions)))
"""


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_every_option_named_exists(option):
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert option.origin in ("megatron-core", "megatron-lm", "mindspeed", "mindspeed_mem")
    if option.origin == "mindspeed_mem":
        assert option.flag in {feature.flag for feature in FEATURES}
    elif option.origin == "megatron-core":
        assert option.dest in fields or option.flag in LATER_MEGATRON
    else:
        of_megatron_lm = MEGATRON_LM | LATER_MEGATRON_LM | EARLIER_MEGATRON_LM
        of_mindspeed = MINDSPEED | EARLIER_MINDSPEED | LATER_MINDSPEED | MINDSPEED_LLM
        assert option.flag in (of_megatron_lm if option.origin == "megatron-lm" else of_mindspeed)
        assert option.dest not in fields


@pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM names no checkout of Megatron-LM")
def test_the_list_of_megatron_lm_is_true_and_its_parser_knows_our_flags():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ["MEGATRON_LM"]])}
    command = [sys.executable, "-W", "ignore", "-c", OPTIONS_OF_MEGATRON_LM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    known = set(json.loads(done.stdout.splitlines()[-1]))
    assert known >= MEGATRON_LM
    # Fields without a flag are barred for the sake of scripts that build their own TransformerConfig.
    assert {o.flag for o in OPTIONS if o.origin == "megatron-core"} - known - LATER_MEGATRON == {
        "--cpu-offloading",
        "--num-microbatches-with-partial-activation-checkpoints",
        "--variable-seq-lengths",
    }
    assert known >= {feature.flag for feature in FEATURES}


@pytest.mark.parametrize(
    "variable, package, flags",
    [("MINDSPEED", "mindspeed", MINDSPEED), ("MINDSPEED_LLM", "mindspeed_llm", MINDSPEED_LLM)],
)
def test_the_list_of_mindspeed_is_true(variable, package, flags):
    if variable not in os.environ:
        pytest.skip(f"{variable} names no checkout")
    sources = [p.read_text() for p in Path(os.environ[variable], package, "features_manager").rglob("*.py")]
    for flag in flags:
        assert any(f'"{flag}"' in source or f"'{flag}'" in source for source in sources), flag


@pytest.mark.parametrize(
    "line, refused",
    [
        ("--survive-oom --swap-layer-input", "--swap-layer-input: both decide about the same activations"),
        ("--survive-oom --compress-activation 1-3", "--compress-activation: both decide about the same activations"),
        ("--recompute-layers all --layerwise-disaggregated-training", "--layerwise-disaggregated-training: its"),
        ("--adaptive-memory-optimization --mla-zero-memory", "--mla-zero-memory: both decide"),
        ("--max-inflight-microbatches 1 --dist-train", "--dist-train: its models run on other stages"),
        ("--pipeline-stages 1,3 --num-layers 4 --pipeline-num-transformer-layers [[1],[3]]", "both say which layers"),
        ("--chunk-zero-stage 3 --use-distributed-optimizer --quant-states fp8", "--quant-states: it keeps optimizer"),
        ("--optimizer-parallel sharding --o2-optimizer", "--o2-optimizer: it keeps optimizer states or gradients"),
        ("--optimizer-parallel sharding --compress-optimizer", "both decide where optimizer states lie"),
    ],
)
def test_what_only_some_versions_of_mindspeed_have_is_refused_too(line, refused):
    with pytest.raises(FeatureError, match=f"cannot be combined with .*{refused}.*Leave one of them out"):
        check(scan([*line.split(), "--device", "cpu"]))


BESIDE_MINDSPEED = {
    "--memory-config": ["--virtual-optimizer all", "--recompute-norm", "--recompute-activation-function"],
    "--memory-config again": ["--noop-layers 0,3", "--moe-zero-memory disable", "--compress-dense disable"],
    "--chunk-zero-stage": ["--recompute-norm", "--noop-layers 0", "--compress-dense level0"],
    "--optimizer-parallel": ["--schedules-method dualpipev", "--compress-dense level1"],
    "--survive-oom": ["--virtual-optimizer 1 2", "--recompute-norm"],
}


@pytest.mark.parametrize("flag", BESIDE_MINDSPEED)
def test_what_works_beside_mindspeeds_options_is_not_refused(flag, tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text("swap_config: {swap: True}")
    given = {
        "--memory-config": plan,
        "--chunk-zero-stage": "3 --use-distributed-optimizer",
        "--optimizer-parallel": "sharding",
        "--survive-oom": "",
    }
    flag = flag.split()[0]
    for theirs in BESIDE_MINDSPEED[flag]:
        assert check(scan(f"{flag} {given[flag]} {theirs} --device cpu".split())).on


def test_live_generators_do_no_harm_where_nothing_is_drawn():
    line = "--recompute-layers all --device=cpu --te-rng-tracker --hidden-dropout 0 --attention-dropout 0.0"
    assert check(scan(line.split())).memory is not None
    check({"memory_config": {"swap_config": {"swap": True}}, "device": "cpu", "te_rng_tracker": True})
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    config.use_te_rng_tracker = True  # as a script of one's own has it
    for rate, count in ((0.1, 1), (None, 1), (0.0, 0)):
        config.hidden_dropout = config.attention_dropout = rate
        assert len(conflicts(config, ["--adaptive-memory-optimization"])) == count
    with pytest.raises(FeatureError, match="--recompute-layers cannot be combined with --te-rng-tracker"):
        check(scan([*line.split()[:-1], "0.1"]))


SWAPS = {"memory_config": {"swap_config": {"swap": True}}}
RECOMPUTES = {"recompute_layers": "all"}
PARTS = {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn", "moe_router"]}


@pytest.mark.parametrize(
    ("ours", "graphs", "refused"),
    [
        (SWAPS, PARTS, False),
        (SWAPS, {"external_cuda_graph": True, "cuda_graph_scope": "attn"}, False),
        (SWAPS, {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["moe_router"]}, False),
        (SWAPS, {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": "full"}, True),
        (SWAPS, {"cuda_graph_impl": "transformer_engine"}, True),
        (SWAPS, {**PARTS, "cuda_graph_impl": "local"}, True),
        (SWAPS, {"cuda_graph_impl": "full_iteration"}, True),
        (SWAPS, {**PARTS, "cuda_graph_impl": "none"}, False),
        (RECOMPUTES, PARTS, True),
        ({"survive_oom": True}, PARTS, True),
        ({"adaptive_memory_optimization": True}, PARTS, True),
        ({"chunk_zero_stage": 3, "use_distributed_optimizer": True}, PARTS, True),
    ],
)
def test_swap_goes_with_graphs_of_parts_of_layers_alone(ours, graphs, refused):
    given = {"device": "cpu", **ours, **graphs}
    if not refused:
        assert check(given).on
        return
    with pytest.raises(FeatureError) as error:
        check(given)
    assert [problem.count("with --cuda-graph-impl") for problem in error.value.problems] == [1]


def test_graphs_of_parts_are_seen_on_a_command_line_and_in_a_checked_config():
    line = "--memory-config x.yaml --cuda-graph-impl transformer_engine --cuda-graph-scope attn moe_router"
    assert conflicts(scan(line.split()), ["--memory-config"]) == []
    assert conflicts(scan(line.split()[:-3]), ["--memory-config"])
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, **PARTS | {"cuda_graph_scope": ["attn"]}
    )
    assert conflicts(config, ["--memory-config"]) == []


def test_layers_of_multi_token_prediction_count_on():
    """How many there are is known when the model is there."""
    beyond = {"device": "cpu", "num_layers": 2, "recompute_layers": "2"}
    assert check({**beyond, "mtp_num_layers": 1}).memory is not None
    line = "--recompute-layers 2 --device cpu --num-layers 2".split()
    assert check(scan([*line, "--mtp-num-layers", "1"])).memory is not None
    for without in (beyond, scan(line)):
        with pytest.raises(FeatureError, match="since the model has 2 layers"):
            check(without)


COLUMNS = (
    ("--memory-config",),
    ("--select-recompute", "--recompute-layers"),
    ("--survive-oom", "--adaptive-memory-optimization"),
    ("--pipeline-stages", "--max-inflight-microbatches"),
    ("--chunk-zero-stage",),
    ("--optimizer-parallel",),
)
"""Of the page about Megatron's options."""
OF_A_CELL = {"adaptive refused": 1, "cap refused": 1, "stages refused": 1, "refused": None}


@pytest.mark.parametrize(
    "option",
    [
        "--fine-grained-activation-offloading",
        "--moe-paged-stash",
        "--moe-shared-expert-overlap",
        "--overlap-moe-expert-parallel-comm",
        "--use-custom-fsdp",
        "--use-megatron-fsdp",
        "--use-precision-aware-optimizer",
        "--use-torch-fsdp2",
    ],
)
def test_what_the_page_calls_refused_is_refused_by_name(option):
    [row] = [line for line in PAGE.read_text().splitlines() if line.startswith("|") and f"`{option}`" in line]
    for cell, flags in zip(row.strip("|").split("|")[1:], COLUMNS, strict=True):
        said = {flag: conflicts(scan([option]), [flag]) for flag in flags}
        assert all(flag in why and option in why for flag, whys in said.items() for why in whys)
        refused = OF_A_CELL.get(cell.partition("(")[0].strip(), 0)
        assert sum(map(bool, said.values())) == (len(flags) if refused is None else refused), (cell, said)
