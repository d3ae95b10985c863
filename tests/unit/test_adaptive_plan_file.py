"""A plan is written as a file that the library reads like any other, and drawn as a grid of letters."""

import dataclasses

import yaml

from mindspeed_mem.adaptive import Plan, StagePlan
from mindspeed_mem.adaptive.problem import from_shape
from mindspeed_mem.adaptive.problem.shape import Degrees, Machine, Shape
from mindspeed_mem.adaptive.search.decisions import Count, in_order, key, lay_out, whole_layers_swapped
from mindspeed_mem.adaptive.search.plan_file import as_yaml, memory_config, sections
from mindspeed_mem.adaptive.search.plan_table import LEGEND, grid
from mindspeed_mem.plan import load_memory_config, resolve
from tests.operators import DENSE
from tests.planning import LAYER, small_problem

GPT = Shape(
    num_layers=4,
    hidden_size=64,
    num_attention_heads=4,
    seq_length=32,
    micro_batch_size=1,
    ffn_hidden_size=256,
    num_query_groups=4,
    kv_channels=16,
    rope=True,
)


def gpt(**layout):
    return from_shape.problem(GPT, Degrees(**layout), Machine(memory_bytes=1))


def letters(**changes):
    """A layer of GPT: K but for these groups, by the last part of their name."""
    kind = gpt().classes[0]
    return "".join(changes.get(group.name.rpartition(".")[2], "K") for group in kind.groups)


def test_every_decision_is_in_the_resolved_plan(tmp_path):
    problem = gpt(pipeline=2, micro_batches=2)
    moved = letters(linear_qkv="S", input_layernorm="S", activation_func="R", rotary_pos_emb="R")
    first = StagePlan(parts=((moved.replace("K", "-", 1), letters(input="S", self_attn_bda="R")),), distance=5)
    second = StagePlan(parts=((letters().replace("K", "-", 1), letters(core_attention="S")),), distance=2)
    config = memory_config(problem, Plan(stages=(first, second)))
    path = tmp_path / "plan.yaml"
    path.write_text(as_yaml(config, ["a remark"]))
    assert path.read_text().startswith("# a remark\n") and yaml.safe_load(path.read_text()) == sections(config)
    loaded = load_memory_config(path, num_layers=4)
    assert loaded == dataclasses.replace(config, source=str(path)) and loaded.swap.pp_aware is False
    plan = resolve(loaded, dict.fromkeys(range(4), DENSE), 4)
    swapped = {(layer, op): plan.decision(layer, op) for layer in range(4) for op in (*DENSE, "mlp_bda")}
    assert {place: swap.distance for place, swap in swapped.items() if swap is not None} == {
        (0, "self_attention.linear_qkv"): 5,
        (0, "input_layernorm"): 5,
        (0, "mlp_bda"): 5,  # the input of layer 1
        (3, "self_attention.core_attention"): 2,
    }
    inline = ("mlp.activation_func", "self_attention.rotary_pos_emb", "self_attention.qkv", "self_attn_bda")
    again = {(layer, op) for layer in range(4) for op in (*DENSE, *inline) if plan.recompute(layer, op) is not None}
    assert again == {
        (0, "mlp.activation_func"),
        (0, "self_attention.rotary_pos_emb"),
        (0, "self_attention.qkv"),
        (1, "self_attn_bda"),
        (1, "self_attention.linear_proj"),
    }
    assert plan.notices == ()


def test_inputs_of_recomputation_move_where_the_plan_says_so():
    problem = gpt()
    row = letters(input_layernorm="R", input="S")
    stage = StagePlan(parts=((row.replace("S", "-"), row, row, row),), distance=7)
    flags = ("inputs_move", "idle_prefetch", "output_gradients")
    for move in (False, True):
        config = memory_config(problem, Plan(stages=(stage,), **dict.fromkeys(flags, move)))
        loaded = load_memory_config(sections(config), num_layers=4)
        assert loaded == config
        assert loaded.swap.swap_recompute_inputs is move
        assert loaded.swap.idle_prefetch is loaded.swap.output_gradients is move
        assert loaded.swap.default_prefetch == (7 if move else 1)


def test_what_operators_do_not_reach_is_swapped_with_its_layer():
    problem = gpt()
    [kind] = problem.classes
    groups = tuple(dataclasses.replace(one, swappable=one.name != "input") for one in kind.groups)
    problem = dataclasses.replace(problem, classes=(dataclasses.replace(kind, groups=groups),))
    plan = Plan(stages=(StagePlan(parts=((letters(input="-"), *[letters()] * 3),), distance=3),))
    config = memory_config(problem, whole_layers_swapped(problem, plan, 2))
    loaded = load_memory_config(sections(config), num_layers=4)
    assert loaded == config and loaded.swap.op_swap == ()
    [entry] = loaded.swap.layer_swap
    assert (entry.layers, entry.backward_prefetch) == ((0, 1), 3)


def test_a_plan_that_changes_nothing_swaps_nothing():
    problem = gpt()
    stage = StagePlan(parts=((letters(),) * 4,))
    config = memory_config(problem, Plan(stages=(stage,)))
    loaded = load_memory_config(sections(config))
    assert loaded.swap == config.swap and loaded.swap.op_swap == () and not loaded.recompute.active


def test_the_grid_has_a_row_for_each_group_and_a_column_for_each_layer():
    problem = small_problem(stages=2, layers=6, micro_batches=2)
    first, second = ("-KKKKK", *["SRKKKR"] * 5), ("-KKKKK", *["KKKKKK"] * 5)
    plan = Plan(stages=(StagePlan(parts=(first,)), StagePlan(parts=(second,))))
    assert grid(problem, plan) == [
        "layer       |    11",
        "      012345|678901",
        "input -SSSSS|-KKKKK",
        "norm  KRRRRR|KKKKKK",
        "qkv   KKKKKK|KKKKKK",
        "core  KKKKKK|KKKKKK",
        "up    KKKKKK|KKKKKK",
        "act   KRRRRR|KKKKKK",
        "",
        LEGEND,
    ]
    narrow = grid(problem, plan, width=16)
    assert max(map(len, narrow[:-1])) <= 16 and sum("norm" in line for line in narrow) == 2


def test_a_group_that_a_class_lacks_is_a_dot():
    other = dataclasses.replace(LAYER, name="other", groups=LAYER.groups[:2])
    problem = small_problem(layers=2)
    part = dataclasses.replace(problem.stages[0].parts[0], layers=("layer", "other"))
    stage = dataclasses.replace(problem.stages[0], parts=(part,))
    problem = dataclasses.replace(problem, classes=(LAYER, other), stages=(stage,))
    plan = Plan(stages=(StagePlan(parts=(("-KKKKK", "SK"),)),))
    assert "qkv   K." in grid(problem, plan)


def test_swaps_come_first_and_what_is_kept_last():
    problem = small_problem(layers=6)
    [block] = problem.blocks
    counts = {key(block): tuple(Count(2, 1) if g.name == "core" else Count() for g in LAYER.groups)}
    rows = lay_out(problem, counts, "first", False)[0][0]
    assert [row[3] for row in rows] == list("SSRKKK")
    rows = lay_out(problem, counts, "spread", False)[0][0]
    assert sorted(row[3] for row in rows) == sorted("SSRKKK") and rows[-1][3] == "K"
    assert in_order(range(9), "spread") == [0, 4, 2, 6, 1, 5, 3, 7, 8]
