"""Estimates from a model's shape: how bytes and seconds follow from sizes and layouts."""

import dataclasses

import pytest

from mindspeed_mem.adaptive.problem import from_shape
from mindspeed_mem.adaptive.problem.checks import problems_of
from mindspeed_mem.adaptive.problem.definition import GIB
from mindspeed_mem.adaptive.problem.layer_bytes import layer_bytes
from mindspeed_mem.adaptive.problem.shape import Degrees, Machine, Shape
from mindspeed_mem.adaptive.search.baselines import full_recompute, keep_all
from mindspeed_mem.plan.operators import ATTENTION_ADD, CORE, FC1, INPUT, INPUT_NORM, QKV

GPT = Shape(
    num_layers=16,
    hidden_size=4096,
    num_attention_heads=32,
    seq_length=4096,
    micro_batch_size=1,
    ffn_hidden_size=16384,
    num_query_groups=32,
    kv_channels=128,
)
LLAMA = dataclasses.replace(GPT, swiglu=True, normalization="RMSNorm", rope=True, bias=False, num_query_groups=8)
MACHINE = Machine(memory_bytes=80 * GIB)


@pytest.mark.parametrize("shape", [GPT, LLAMA, dataclasses.replace(GPT, flash=False, fused=False)])
@pytest.mark.parametrize(
    "layout", [Degrees(micro_batches=4), Degrees(tensor=4, pipeline=4, virtual=2, micro_batches=8)]
)
def test_a_problem_is_sound_and_full_recompute_costs_about_a_forward(shape, layout):
    problem = from_shape.problem(shape, layout, MACHINE)
    assert problems_of(problem) == [] and problem.num_layers == 16
    kept, full = keep_all(problem), full_recompute(problem)
    assert 1.2 < full.seconds / kept.seconds < 1.36
    assert max(full.peaks) < max(kept.peaks)


def test_tensor_parallel_ranks_divide_what_they_compute_and_sequence_parallelism_the_rest():
    whole, split, both = (
        layer_bytes(GPT, layout) for layout in (Degrees(), Degrees(tensor=4), Degrees(tensor=4, sequence_parallel=True))
    )
    for name in (QKV, CORE, FC1):
        assert whole[name] == 4 * split[name] == 4 * both[name]
    for name in (INPUT, INPUT_NORM, ATTENTION_ADD):
        assert whole[name] == split[name] == 4 * both[name]


def test_a_layer_keeps_17_sbh_with_flash_attention():
    unit = GPT.tokens * GPT.hidden_size * 2
    sizes = layer_bytes(GPT, Degrees())
    assert sum(sizes.values()) / unit == pytest.approx(16, abs=0.1)  # 2 sbh bf16 each, statistics aside


@pytest.mark.parametrize("dropout, expected", [(True, 34 + 5 * 96 * 2048 / 12288), (False, 32 + 2 * 96 * 2048 / 12288)])
def test_activations_of_gpt_175b_are_those_of_megatrons_own_formula(dropout, expected):
    """Bytes of a layer for each token and hidden unit of a tensor-parallel rank (arXiv 2205.05198, table 2)."""
    whole = Shape(
        num_layers=96,
        hidden_size=12288,
        num_attention_heads=96,
        seq_length=2048,
        micro_batch_size=1,
        ffn_hidden_size=4 * 12288,
        num_query_groups=96,
        kv_channels=128,
        flash=False,
        attention_dropout=dropout,
        hidden_dropout=dropout,
    )
    layout = Degrees(tensor=8, sequence_parallel=True)
    sizes = layer_bytes(whole, layout)
    assert sum(sizes.values()) == pytest.approx(whole.tokens * 12288 / 8 * expected, rel=1e-3)


def test_flash_attention_keeps_no_mask_of_its_scores_but_the_residual_stream_does():
    plain, dropped = (
        layer_bytes(dataclasses.replace(GPT, attention_dropout=on, hidden_dropout=on), Degrees())
        for on in (False, True)
    )
    mask = GPT.tokens * GPT.hidden_size
    assert {name: dropped[name] - plain[name] for name in plain if dropped[name] != plain[name]} == {
        INPUT: mask,
        ATTENTION_ADD: mask,
    }
    problems = [
        from_shape.problem(
            dataclasses.replace(GPT, hidden_dropout=on), Degrees(pipeline=2, virtual=2, micro_batches=4), MACHINE
        )
        for on in (False, True)
    ]
    # One mask for each half of a layer, and one of the embedding; all counted once.
    ends = [[part.before.bytes + part.after.bytes for stage in one.stages for part in stage.parts] for one in problems]
    assert [b - a for a, b in zip(*ends, strict=True)] == [2 * mask, mask, mask, mask]


def test_context_parallel_ranks_split_the_tokens_and_the_states():
    machine = dataclasses.replace(MACHINE, tensor_gbps=1e4)  # so that the ring is hidden
    alone = from_shape.problem(GPT, Degrees(), machine)
    split = dataclasses.replace(GPT, context=4)
    four = from_shape.problem(split, Degrees(context=4, distributed_optimizer=True), machine)
    for one, other in zip(alone.classes[0].groups, four.classes[0].groups, strict=True):
        assert one.bytes == 4 * other.bytes
    assert alone.stages[0].static_bytes == 2 * four.stages[0].static_bytes
    assert alone.classes[0].forward_seconds == pytest.approx(4 * four.classes[0].forward_seconds, rel=0.03)
    assert problems_of(four) == []


def test_static_memory_is_18_bytes_a_parameter_or_less_with_a_distributed_optimizer():
    alone = from_shape.problem(GPT, Degrees(), MACHINE).stages[0].static_bytes
    shared = from_shape.problem(GPT, Degrees(data=4, distributed_optimizer=True), MACHINE).stages[0].static_bytes
    parameters = 16 * GPT.parameters(Degrees())[0] + GPT.embedding_parameters + 2 * GPT.hidden_size
    assert (alone, shared) == (18 * parameters, 9 * parameters)


@pytest.mark.parametrize("parallel", [False, True])
def test_transformer_engines_layers_hold_as_much_as_megatrons_but_gathered_inputs_whole(parallel):
    layout = Degrees(tensor=4, sequence_parallel=parallel)
    own, theirs = (
        from_shape.layer_class(dataclasses.replace(LLAMA, te=te), layout, MACHINE).weight_bytes for te in (False, True)
    )
    stream = LLAMA.tokens * LLAMA.hidden_size * 2
    assert theirs - own == 2 * (stream - stream // 4) * parallel


def test_twice_the_speed_is_half_the_time():
    slow, fast = (
        from_shape.problem(GPT, Degrees(micro_batches=2), dataclasses.replace(MACHINE, tflops=t, memory_gbps=m))
        for t, m in ((200, 1000), (400, 2000))
    )
    assert keep_all(slow).seconds == pytest.approx(2 * keep_all(fast).seconds)
