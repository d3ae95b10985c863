"""`plan` knows real models: by a config.json of Hugging Face, by a command line of Megatron, by its own options."""

import json
import os
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from mindspeed_mem.__main__ import main
from mindspeed_mem.adaptive.problem import profile_file

LLAMA2_7B = {
    **{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000, "tie_word_embeddings": False},
    **{"torch_dtype": "float16", "hidden_act": "silu", "max_position_embeddings": 4096},
}
QWEN2_7B = {
    **{"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28},
    **{"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
    **{"use_sliding_window": False, "sliding_window": 131072},
}
QWEN3_30B = {
    **{"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48},
    **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936},
    **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1},
    **{"mlp_only_layers": [], "tie_word_embeddings": False},
}
MIXTRAL = {
    **{"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "sliding_window": None},
    **{"num_local_experts": 8, "num_experts_per_tok": 2},
}
DEEPSEEK_V3 = {
    **{"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61},
    **{"num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "tie_word_embeddings": False},
    **{"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1},
    **{"first_k_dense_replace": 3, "moe_layer_freq": 1, "q_lora_rank": 1536, "kv_lora_rank": 512},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_nextn_predict_layers": 0},
    **{"quantization_config": {"quant_method": "fp8"}, "n_group": 8},
}
GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_inner": None}
BATCH = "--seq-length 64 --micro-batch-size 1 --global-batch-size 1 --device-memory-gib 100000 --reserve-gib 0 "


@pytest.fixture
def planned(capsys, tmp_path):
    """Runs the command with these words; returns its status, the profile that it planned from, and what it printed."""

    def run(words):
        trace = tmp_path / "profile.json"
        trace.unlink(missing_ok=True)
        status = main(["plan", *words, "--write-trace", str(trace)])
        printed = "".join(capsys.readouterr())
        return status, profile_file.read(trace) if trace.exists() else None, printed

    return run


@pytest.fixture
def config(tmp_path):
    def write(content):
        (tmp_path / "config.json").write_text(json.dumps(content))
        return str(tmp_path)

    return write


@pytest.mark.parametrize(
    "content, parameters",
    [
        (LLAMA2_7B, 6_738_415_616),
        (QWEN2_7B, 7_615_616_512),
        (QWEN3_30B, 30_532_122_624),
        (MIXTRAL, 46_702_792_704),
        (DEEPSEEK_V3, 671_026_419_200),
        (GPT2, 124_439_808),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_a_config_of_hugging_face_has_the_parameters_of_the_model(planned, config, content, parameters):
    status, profile, _ = planned([*BATCH.split(), "--hf-config", config(content)])
    assert status == 0
    # Of position embeddings, biases of queries and keys and the router's corrections nobody takes note.
    assert profile.problem.stages[0].static_bytes == pytest.approx(18 * parameters, rel=0.007)


@pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM names no checkout of Megatron-LM")
@pytest.mark.parametrize("content", [LLAMA2_7B, MIXTRAL, DEEPSEEK_V3, {**DEEPSEEK_V3, "num_nextn_predict_layers": 1}])
def test_static_memory_is_that_of_megatrons_own_formula(planned, config, content):
    file = Path(os.environ["MEGATRON_LM"]) / "megatron/training/theoretical_memory_usage.py"
    theory = {"print_rank_0": print}
    exec(file.read_text().replace("from .utils import print_rank_0", ""), theory)
    status, profile, _ = planned([*BATCH.split(), "--hf-config", config(content)])
    assert status == 0
    shape = profile.model
    arguments = dict(shape) | {
        "group_query_attention": shape["num_query_groups"] != shape["num_attention_heads"],
        "num_experts": shape["num_experts"] or None,
        "moe_shared_expert_intermediate_size": shape["shared_expert_size"] or None,
        "moe_layer_freq": [int(one) for one in shape["with_experts"]] or 1,
        "mtp_num_layers": shape["mtp_num_layers"] or None,
        "multi_latent_attention": bool(shape["kv_lora_rank"]),
        "q_lora_rank": shape["q_lora_rank"] or None,
        "padded_vocab_size": shape["vocab_size"],
        "untie_embeddings_and_output_weights": shape["untied"],
        "use_distributed_optimizer": False,
        **{"pipeline_model_parallel_size": 1, "tensor_model_parallel_size": 1, "data_parallel_size": 1},
    }
    expected = theory["compute_weight_and_optimizer_memory"](SimpleNamespace(**arguments))
    assert profile.problem.stages[0].static_bytes == pytest.approx(expected, rel=1e-3)  # without routers, MTP's own


def test_a_config_says_more_than_sizes(planned, config):
    _, profile, _ = planned([*BATCH.split(), "--hf-config", config({**DEEPSEEK_V3, "num_nextn_predict_layers": 1})])
    names = profile.problem.stages[0].parts[0].layers
    assert names[:5] == ("layer", "layer", "layer", "layer with experts", "layer with experts") and len(names) == 62
    assert names[-1] == "layer with experts of multi-token prediction"
    _, profile, _ = planned([*BATCH.split(), "--hf-config", config({**LLAMA2_7B, "tie_word_embeddings": True})])
    assert not profile.model["untied"] and not profile.model["hidden_dropout"]
    windows = {"model_type": "mistral", "sliding_window": 32}
    _, profile, _ = planned([*BATCH.split(), "--hf-config", config({**LLAMA2_7B, **windows})])
    assert profile.model["window"] == 32
    some = windows | {"layer_types": ["sliding_attention", "full_attention"]}
    assert planned([*BATCH.split(), "--hf-config", config({**LLAMA2_7B, **some})])[1].model["window"] == 0
    _, _, printed = planned([*BATCH.split(), "--hf-config", config(LLAMA2_7B), "--num-layers", "4"])
    assert "\n4 layers, " in printed  # what is said counts


@pytest.mark.parametrize(
    "content, reason",
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not known; known are llama, mistral, qwen2, "),
        ({**LLAMA2_7B, "cross_attention_layers": [3]}, "cross_attention_layers [3] stands for what is not known"),
        ({**DEEPSEEK_V3, "index_topk": 2048}, "index_topk 2048 stands for what is not known"),
        ({**LLAMA2_7B, "layer_types": ["linear_attention"]}, "layer_types: 'linear_attention' is not known"),
        ({**LLAMA2_7B, "hidden_size": None}, "hidden_size: missing"),
        ({**LLAMA2_7B, "hidden_size": [1]}, "hidden_size: got [1]; allowed: a whole number from 1 to 2147483647"),
        ({**LLAMA2_7B, "hidden_size": 10**30}, f"hidden_size: got {10**30}; allowed: a whole number from 1 to"),
        ({**LLAMA2_7B, "hidden_size": True}, "hidden_size: got True; allowed: a whole number from 1 to"),
        ({**LLAMA2_7B, "num_hidden_layers": 10**9}, "num_hidden_layers: got 1000000000; allowed: a whole number from"),
        ({**LLAMA2_7B, "num_key_value_heads": 0}, "num_key_value_heads: got 0; allowed: a whole number from 1 to"),
        ({**LLAMA2_7B, "sliding_window": "a"}, "sliding_window: got 'a'; allowed: a whole number from 0 to"),
        ({**LLAMA2_7B, "attention_dropout": 1}, "attention_dropout: got 1; allowed: a number of at least 0, below 1"),
        ({**LLAMA2_7B, "layer_types": 3}, "layer_types: got 3; allowed: a list of texts"),
        ({**DEEPSEEK_V3, "moe_layer_freq": 0}, "moe_layer_freq: got 0; allowed: a whole number from 1 to"),
        ({**DEEPSEEK_V3, "first_k_dense_replace": "a"}, "first_k_dense_replace: got 'a'; allowed: a whole number"),
        ({"model_type": ["llama"]}, "model_type ['llama'] is not known"),
        ([], "model_type None is not known"),
    ],
)
def test_a_config_that_is_not_known_is_refused_by_name(planned, config, content, reason):
    status, _, printed = planned([*BATCH.split(), "--hf-config", config(content)])
    assert status == 2 and reason in printed
    assert planned([*BATCH.split(), "--hf-config", "no/such.json"])[0] == 2


LINE = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 8 --seq-length 64 --micro-batch-size 1 --vocab-size 32000 "
    "--global-batch-size 8 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
    "--swiglu --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512 --moe-layer-freq ([0]*2+[1]*6) "
    "--expert-model-parallel-size 2 --attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights "
    "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear --use-distributed-optimizer "
)


def test_a_command_line_of_megatron_describes_the_model(planned):
    ours = ["--data-parallel-size", "2", "--device-memory-gib", "1000"]
    others = "pretrain_gpt.py --train-iters 10 --lr 1e-4 --recompute-granularity full --attention-backend auto "
    status, from_line, _ = planned([*ours, "--megatron", f"{others} {LINE} --bf16"])
    assert status == 0
    _, spelt, _ = planned([*ours, *LINE.split(), "--transformer-impl", "transformer_engine"])
    assert from_line == spelt
    _, local, _ = planned([*ours, "--megatron", f"{LINE} --bf16 --transformer-impl local"])
    assert "pre_mlp_layernorm" in {group.name for group in local.problem.classes[0].groups}
    _, virtual, _ = planned([*ours, "--megatron", f"{LINE} --bf16 --num-virtual-stages-per-pipeline-rank 2"])
    assert virtual.problem.virtual_stages == 2
    _, uneven, _ = planned([*ours, "--megatron", f"{LINE} --bf16 --decoder-first-pipeline-num-layers 3"])
    assert [len(stage.parts[0].layers) for stage in uneven.problem.stages] == [3, 5]
    assert uneven == planned([*ours, "--pipeline-stages", "3,5", "--megatron", f"{LINE} --bf16"])[1]
    counted = f"{LINE.replace('--num-layers 8', '--num-layers 7').replace('([0]*2+[1]*6)', '1')} --bf16"
    for words, stages in (
        ("--account-for-loss-in-pipeline-split", [[4], [3]]),
        ("--account-for-embedding-in-pipeline-split --num-layers-per-virtual-pipeline-stage 2", [[1, 2], [2, 2]]),
        ("--decoder-last-pipeline-num-layers 2", [[5], [2]]),
    ):
        _, uneven, _ = planned([*ours, "--megatron", f"{counted} {words}"])
        assert [[len(part.layers) for part in stage.parts] for stage in uneven.problem.stages] == stages
    status, _, printed = planned([*ours, "--megatron", f"{LINE} --bf16 --account-for-loss-in-pipeline-split"])
    assert status == 2 and "--megatron --account-for-loss-in-pipeline-split: 8 layers on 2 pipeline stages" in printed
    for words in (
        "--account-for-loss-in-pipeline-split --num-layers-per-virtual-pipeline-stage 3",  # of four on a stage
        "--decoder-first-pipeline-num-layers 3 --num-virtual-stages-per-pipeline-rank 2",
        "--decoder-first-pipeline-num-layers 0",
    ):
        status, _, printed = planned([*ours, "--megatron", f"{counted} {words}"])
        assert status == 2 and f"--megatron {words.split()[0]}" in printed
    elsewhere = counted.replace("--num-layers 7", "")
    status, _, printed = planned(
        [*ours, "--num-layers", "7", "--megatron", f"{elsewhere} --account-for-loss-in-pipeline-split"]
    )
    assert status == 2 and "--account-for-loss-in-pipeline-split: needs --num-layers on the same line" in printed
    status, _, printed = planned([*ours, "--megatron", f"{LINE} --optimizer-cpu-offload --optimizer muon"])
    assert status == 2 and "--megatron --optimizer-cpu-offload: what that changes in memory is not known" in printed
    assert "--megatron --optimizer muon: only the states of adam are known" in printed
    for more, groups in (("", 8), ("--group-query-attention ", 2)):
        _, grouped, _ = planned([*ours, "--megatron", f"{LINE} --bf16 {more}--num-query-groups 2"])
        assert grouped.model["num_query_groups"] == groups
    _, half, _ = planned([*ours, "--megatron", f"{LINE} --fp16"])
    assert half.shapes["grad_bytes"] == 2
    status, _, printed = planned([*ours, "--megatron", LINE.replace("--vocab-size 32000", "")])
    assert status == 2 and "it trains in fp32" in printed and "--vocab-size: missing" in printed
    assert planned([*ours, "--megatron", "'"])[0] == 2


def static(planned, words):
    status, profile, printed = planned(
        [*"--model gpt2 --micro-batch-size 1 --global-batch-size 4 --data-parallel-size 4".split(), *words.split()]
    )
    assert status == 0, printed
    return profile.problem.stages[0].static_bytes


def test_states_take_what_their_types_and_chunks_say(planned):
    words = "--device-memory-gib 100 "
    parameters = static(planned, words) / 18
    for more, each in {
        "--use-distributed-optimizer": 6 + 12 / 4,
        "--grad-reduce-in-bf16": 4 + 12,
        "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8 --main-params-dtype fp16": 6 + 5,
        "--use-distributed-optimizer --chunk-zero-stage 1": 6 + 12 / 4,
        "--use-distributed-optimizer --chunk-zero-stage 2": 2 + 16 / 4,
        "--use-distributed-optimizer --chunk-zero-stage 3": 18 / 4,
        "--use-distributed-optimizer --chunk-zero-stage 3 --placement-policy static:0.5": 18 / 8,
        "--use-distributed-optimizer --chunk-zero-stage 3 --placement-policy host:2GiB": 0,
        # Gradients are whole until the last of several micro-batches.
        "--use-distributed-optimizer --chunk-zero-stage 3 --global-batch-size 8": 4 + 14 / 4,
        "--use-distributed-optimizer --chunk-zero-stage 3 --global-batch-size 8 --chunk-reduce-each-microbatch": 18 / 4,
    }.items():
        assert static(planned, words + more) == pytest.approx(each * parameters, rel=1e-6, abs=1), more


def test_gradients_of_16_bits_are_copied_for_the_step(planned):
    """Bytes of a parameter in the optimizer's step, by Megatron's docs/user-guide/features/dist_optimizer.md."""
    size = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --vocab-size 50304 --seq-length 1024"
    line = f"{size} --max-position-embeddings 1024 --global-batch-size 4 --micro-batch-size 1"
    ours = ["--device-memory-gib", "100", "--data-parallel-size", "4"]

    def step(more):
        status, profile, printed = planned([*ours, "--megatron", f"{line} {more}"])
        assert status == 0, printed
        (stage,) = profile.problem.stages
        return stage.in_step_bytes

    parameters = step("--bf16") / 18
    split = " --use-distributed-optimizer"
    documented = {"--fp16": 20, "--bf16 --grad-reduce-in-bf16": 20, "--fp16" + split: 4 + 16 / 4}
    assert {more: step(more) / parameters for more in documented} == pytest.approx(documented, rel=1e-6)
    aware = " --use-precision-aware-optimizer --main-grads-dtype bf16"
    assert step("--bf16" + split + aware) == pytest.approx(
        parameters * (4 + 12 / 4), rel=1e-6
    )  # takes them as they are


def test_a_step_that_does_not_fit_is_refused(planned):
    words = "--model gpt2 --micro-batch-size 1 --global-batch-size 1 --data-parallel-size 1 --grad-reduce-in-bf16"
    words += " --reserve-gib 0 --device-memory-gib"
    assert planned([*words.split(), "2.4"])[0] == 0
    status, _, printed = planned([*words.split(), "2.2"])
    assert status == 1
    assert "held there, the largest first: parameters, gradients and optimizer states 1887.4 MiB" in printed
    assert "32-bit copies of gradients in the optimizer's step 471.8 MiB" in printed


@pytest.mark.parametrize(
    "words, reason",
    [
        ("--moe-router-topk 2", "--moe-router-topk: no layer has experts without --num-experts"),
        ("--kv-lora-rank 8", "--kv-lora-rank: nothing is latent without --multi-latent-attention"),
        ("--num-experts 4 --moe-router-topk 5", "--moe-router-topk 5 is more than --num-experts 4"),
        ("--num-experts 4 --expert-model-parallel-size 3", "--num-experts 4 is no multiple of --expert-model-parallel"),
        ("--num-experts 4 --expert-model-parallel-size 4", "1 tensor, data and context parallel ranks are no multiple"),
        ("--num-experts 4 --moe-layer-freq [1]", "--moe-layer-freq [1] is about 1 layers, and --num-layers 12"),
        ("--num-experts 4 --moe-layer-freq 0", "--moe-layer-freq takes a number of at least 1, or a list of at most"),
        ("--num-experts 4 --moe-layer-freq [1]*100000000000", "not '[1]*100000000000'"),
        ("--num-experts 4 --moe-layer-freq " + "1+" * 5000 + "1", "--moe-layer-freq takes a number of at least 1, or"),
        ("--num-experts 4 --expert-imbalance 0.5", "--expert-imbalance takes a number of at least 1"),
        ("--exp-avg-dtype bf16", "--exp-avg-dtype: no effect without --use-precision-aware-optimizer"),
        ("--chunk-zero-stage 4", "--chunk-zero-stage takes 1, 2, 3, not 4"),
        ("--chunk-zero-stage 3", "--chunk-zero-stage needs --use-distributed-optimizer"),
        ("--placement-policy host", "--placement-policy needs --chunk-zero-stage"),
        ("--chunk-zero-stage 1 --placement-policy auto", "--placement-policy auto is decided in the job"),
        ("--chunk-zero-stage 1 --placement-policy disk", "--placement-policy takes device, host or auto"),
        ("--fp8-format hybrid", "--fp8-format needs --transformer-impl transformer_engine"),
        ("--pipeline-stages 4,4", "--pipeline-stages: got 4,4 for 12 layers on 1 pipeline stage"),
        ("--pipeline-stages ,", "--pipeline-stages takes the layers of each stage, such as 3,5,5,3, not ','"),
        ("--pipeline-stages 6,²", "--pipeline-stages takes the layers of each stage, such as 3,5,5,3, not '6,²'"),
        ("--megatron '--bf16 --num-layers ² --decoder-last-pipeline-num-layers 3'", "whole numbers from 1 to 100000"),
        ("--pipeline-model-parallel-size 3 --pipeline-stages 8,0,4", "a stage without layers cannot be planned"),
        ("--fp8-param-gather", "--fp8-param-gather needs --fp8-format"),
        ("--window-size wide", "--window-size takes two numbers such as 4096,0, not 'wide'"),
        ("--window-size=--5,0", "--window-size takes two numbers such as 4096,0, not '--5,0'"),
        ("--window-size=²", "--window-size takes two numbers such as 4096,0, not '²'"),
        ("--multi-latent-attention --attention-backend unfused", "with --attention-backend unfused is not known"),
    ],
)
def test_what_does_not_go_together_is_refused(planned, words, reason):
    status, _, printed = planned([*f"{BATCH} --model gpt2".split(), *shlex.split(words)])
    assert status == 2 and reason in printed


def test_more_tokens_for_one_rank_and_smaller_windows_count(planned):
    words = [*BATCH.split(), *"--num-layers 4 --hidden-size 64 --num-attention-heads 4 --num-experts 4".split()]

    def of(more=""):
        _, profile, _ = planned([*words, *more.split()])
        return profile.problem.classes[0]

    even, uneven = of(), of("--expert-imbalance 1.5")
    sizes = [{group.name: group.bytes for group in one.groups} for one in (even, uneven)]
    grown = {name: sizes[1][name] / sizes[0][name] for name in sizes[0] if sizes[0][name] != sizes[1][name]}
    assert grown == {"mlp.dispatch.postprocess": 1.5, "expert_fc1": 1.5, "moe_act": 1.5}
    near = of("--window-size 7,0")
    times = [{one.name: one.forward_seconds for one in kind.operators} for kind in (even, near)]
    assert [name for name in times[0] if times[0][name] != times[1][name]] == ["self_attention.core_attention"]
    assert near.forward_seconds < even.forward_seconds and even.groups == of("--window-size 4096,0").groups


def test_norms_of_transformer_engine_are_part_of_the_linears_after_them(planned):
    words = [*BATCH.split(), *"--model gpt2".split()]
    _, local, _ = planned(words)
    _, fused, _ = planned([*words, "--transformer-impl", "transformer_engine"])
    _, small, _ = planned([*words, "--transformer-impl", "transformer_engine", "--fp8-format", "hybrid"])
    sizes = [{group.name: group.bytes for group in one.problem.classes[0].groups} for one in (local, fused, small)]
    assert sizes[1]["self_attention.linear_qkv"] == (
        sizes[0]["self_attention.linear_qkv"] + sizes[0]["input_layernorm"]
    )
    assert "input_layernorm" not in sizes[1] and sum(sizes[1].values()) == sum(sizes[0].values())
    assert sum(sizes[2].values()) < sum(sizes[1].values())
    _, only, _ = planned(
        [*words, *"--transformer-impl transformer_engine --fp8-format hybrid --fp8-param-gather".split()]
    )
    assert only.problem.stages[0].static_bytes == fused.problem.stages[0].static_bytes
    assert small.problem.stages[0].static_bytes == fused.problem.stages[0].static_bytes * 20 / 18
