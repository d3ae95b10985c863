"""MindFormers' own recompute and swap sections select here what they select there."""

import itertools
from pathlib import Path

import pytest
import yaml

from mindspeed_mem.plan import MemoryConfigError, load_memory_config, resolve
from mindspeed_mem.plan.operators import with_inline
from tests.operators import DENSE

SECTIONS = yaml.safe_load(Path(__file__).with_name("mindformers_sections.yaml").read_text())
OPERATORS = with_inline(DENSE)
NORMS = ("input_layernorm", "pre_mlp_layernorm")


def ranges(text):
    ends = (part.split("-") for part in (text or "").split(",") if part)
    return {layer for first, *last in ends for layer in range(int(first), int((last or [first])[0]) + 1)}


def plan_of(sections, stages=((4,),)):
    """The plan of a training file, for a model with so many layers on each stage, by virtual stage."""
    places = [(stage, part) for part, row in enumerate(stages) for stage, count in enumerate(row) for _ in range(count)]
    model = dict.fromkeys(range(len(places)), DENSE)
    config = load_memory_config({"trainer": {}, "parallel_config": {}, **sections})
    return resolve(config, model, len(places), dict(enumerate(places)))


def whole(plan, count):
    return {layer for layer in range(count) if plan.recompute(layer, "") is not None}


def in_part(plan, count):
    """Operators that are recomputed in layers that are not so as a whole, each with these."""
    found = {}
    for layer, op in itertools.product(sorted(set(range(count)) - whole(plan, count)), OPERATORS):
        if plan.recompute(layer, op) is not None:
            found.setdefault(op, set()).add(layer)
    return found


@pytest.mark.parametrize("case", SECTIONS, ids=range(len(SECTIONS)))
def test_recompute_sections_of_its_files(case):
    section, selects = case["recompute"], case["selects"]
    count = sum(map(sum, case["stages"]))
    plan = plan_of({"recompute_config": section}, case["stages"])
    full = ranges(selects.get("full"))
    expected = {op: ranges(selects.get("norms")) - full for op in NORMS}
    expected["mlp.activation_func"] = ranges(selects.get("activation")) - full
    assert whole(plan, count) == full
    assert in_part(plan, count) == {op: layers for op, layers in expected.items() if layers}
    named = [p for key in ("select_recompute", "select_comm_recompute") for p in _patterns(section.get(key))]
    ignored = [pattern for pattern in named if pattern.endswith("reshape")]
    said = [notice for notice in plan.notices if "no operator of this model stands for" in notice]
    assert len(said) == bool(ignored) and all(pattern in said[0] for pattern in ignored)
    assert not plan.layers_touched() - full - set().union(*expected.values())


def _patterns(value):
    return [pattern for pattern in value if isinstance(pattern, str)] if isinstance(value, list | dict) else []


def test_there_are_as_many_sections_as_said():
    assert len(SECTIONS) == 50 and len({repr(sorted(case["recompute"].items(), key=repr)) for case in SECTIONS}) == 50


def test_swap_of_all_layers_beside_recompute_of_all():
    swap = {"cpu_offloading": True, "cpu_offloading_num_layers": [{"layers": True, "backward_prefetch": "Auto"}]}
    plan = plan_of({"swap_config": swap, "recompute_config": {"recompute": True, "select_recompute": {}}})
    assert whole(plan, 4) == {0, 1, 2, 3}
    (notice,) = plan.notices
    assert notice.startswith("swap_config.cpu_offloading_num_layers[0] has no effect in layers 0-3: the whole layer")


def test_swap_of_a_layer_beside_recompute_of_some():
    swap = {"cpu_offloading": True, "cpu_offloading_num_layers": [{"layers": [1, 2], "backward_prefetch": 2}]}
    plan = plan_of({"swap_config": swap, "recompute_config": {"recompute": [0, 1], "select_recompute": {}}})
    assert whole(plan, 4) == {0, 1}
    assert "Set layer swap at layer 2 and value is: 2" in plan.log_lines()
    assert plan.decision(2, "mlp").distance == 2 and plan.decision(1, "mlp") is None


def test_swap_of_an_operator_beside_select_recompute():
    swap = {
        "cpu_offloading": True,
        "cpu_offloading_num_layers": [],
        "op_swap": [{"op_name": r"mlp", "layers": [0], "backward_prefetch": "Auto"}],
    }
    recompute = {"recompute": False, "select_recompute": {"mlp": [1], "self_attention": [0]}}
    plan = plan_of({"swap_config": swap, "recompute_config": recompute})
    assert plan.log_lines() == [
        "Set select recompute at layer 0: self_attention",
        "Set op_swap at layer 0: .mlp, value=Auto",
        "Set select recompute at layer 1: mlp",
    ]
    assert plan.decision(0, "mlp.linear_fc1").distance == "Auto" and plan.decision(1, "mlp.linear_fc1") is None


def test_distances_that_differ_from_that_of_all_layers():
    entries = [{"backward_prefetch": 1, "layers": [2]}, {"backward_prefetch": "Auto", "layers": True}]
    with pytest.raises(MemoryConfigError, match=r"layer_swap\[0\].backward_prefetch: got 1; allowed: Auto"):
        plan_of({"swap_config": {"swap": True, "layer_swap": entries}})


def test_excludes_by_counts():
    recompute = {
        "recompute": False,
        "select_recompute": {r"feed_forward\.w1": True, r"feed_forward\.mul": True, r"feed_forward\.w2\.reshape": True},
        "parallel_optimizer_comm_recompute": True,
        "mp_comm_recompute": True,
        "recompute_slice_activation": True,
        "select_recompute_exclude": {r"feed_forward\.w1\.activation\.silu": [1]},
        "select_comm_recompute_exclude": {r"feed_forward\.mul": [1]},
    }
    plan = plan_of({"recompute_config": recompute}, [[2, 2]])
    assert in_part(plan, 4) == {"mlp.linear_fc1": {0, 1, 2, 3}, "mlp.activation_func": {1, 2, 3}}


@pytest.mark.parametrize(
    ("value", "stages", "expected"),
    [
        ([True, 2], [[3, 3]], "0-4"),
        ([False, 2], [[3, 3]], "3-4"),
        ([3], [[2, 2]], "0-1"),
        ([9, 9], [[2, 2]], "0-3"),
        ([5], [[4], [4]], "0-2,4-5"),  # the next layer from each virtual stage in turn
        ([5], [[1], [6]], "0-4"),  # as long as it has any
        ([3, 0], [[2, 2], [2, 2]], "0-1,4"),
        ([[True, 0], [1, False]], [[2, 2], [2, 2]], "0-1,4"),
        ([True, False], [[2, 2], [2, 2]], "0-1,4-5"),
        ([[0, 1], True], [[2, 2], [2, 2]], "2,4-7"),
    ],
)
@pytest.mark.parametrize("key", ["recompute", "select_recompute", "select_comm_recompute"])
def test_counts(key, value, stages, expected):
    count, layers = sum(map(sum, stages)), ranges(expected)
    plan = plan_of({"recompute_config": {key: value}}, stages)
    if key == "recompute":
        assert whole(plan, count) == layers
    else:
        ops = NORMS if key == "select_comm_recompute" else ("mlp.activation_func",)
        assert in_part(plan, count) == dict.fromkeys(ops, layers)


def test_one_name_of_two_operators_is_logged_once():
    swap = {"swap": True, "op_swap": {"op_name": "add", "backward_prefetch": 2, "layers": [1]}}
    plan = plan_of({"swap_config": swap, "recompute_config": {"select_recompute": {"add": [0]}}})
    assert plan.log_lines() == ["Set select recompute at layer 0: add", "Set op_swap at layer 1: .add, value=2"]
    assert in_part(plan, 4) == {"self_attn_bda": {0}, "mlp_bda": {0}}


def test_numbers_name_layers_beside_swap():
    sections = {"swap_config": {"swap": True, "op_swap": []}, "recompute_config": {"select_recompute": [0, 3]}}
    assert in_part(plan_of(sections), 4) == {"mlp.activation_func": {0, 3}}


@pytest.mark.parametrize("pattern", [r"mlp\.mul", r"mlp\.activation_func\.silu"])
def test_defaults_of_models_built_like_megatrons(pattern):
    shared = {rf"mlp\.shared_experts\.{name}": True for name in ("mul", r"activation_func\.silu")}
    plan = plan_of({"recompute_config": {"select_recompute": {pattern: True, **shared}}})
    assert in_part(plan, 4) == {"mlp.activation_func": {0, 1, 2, 3}}
    (notice,) = plan.notices
    assert all(f"select_recompute.{name}" in notice for name in shared)


def test_a_typo_beside_primitives_stays_an_error():
    with pytest.raises(MemoryConfigError) as caught:
        plan_of(
            {"recompute_config": {"select_recompute": [r"feed_forward\.w1\.reshape", r"feed_forward\.w1\.activatoin"]}}
        )
    (problem,) = caught.value.problems
    assert r"did you mean feed_forward\.w1\.activation" in problem
