"""The plan: a configuration joined with a model's operators."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_mem.plan import MemoryConfigError, Swap, load_memory_config, resolve
from mindspeed_mem.plan.operators import match, with_inline
from tests.operators import DENSE as LAYER

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
MODEL = {layer: LAYER for layer in range(4)}
OPERATORS = with_inline(LAYER)


def plan_of(model=MODEL, num_layers=4, **swap):
    return resolve(load_memory_config({"swap_config": {"swap": True} | swap}), model, num_layers)


def entry(op_name, backward_prefetch, layers, **more):
    return {"op_name": op_name, "backward_prefetch": backward_prefetch, "layers": layers} | more


def distances(plan, layer):
    decisions = {operator: plan.decision(layer, operator) for operator in OPERATORS}
    return {operator: swap.distance for operator, swap in decisions.items() if swap is not None}


def below(*nodes):
    return {operator for operator in OPERATORS if any(operator == n or operator.startswith(f"{n}.") for n in nodes)}


def from_file(name):
    return resolve(load_memory_config(CONFIGS / name, num_layers=4), MODEL, 4)


def test_case_a_default_policy():
    plan = from_file("swap_default.yaml")
    assert plan.log_lines() == [
        "Set op_swap at layer 0: attention.flash_attention, value=10",
        "Set op_swap at layer 1: attention.flash_attention, value=10",
        "Set op_swap at layer 2: attention.flash_attention, value=10",
        "Set op_swap at layer 3: attention.flash_attention, value=10",
    ]
    for layer in range(4):
        assert distances(plan, layer) == {"self_attention.core_attention": 10}
    assert plan.notices == ()


def test_case_b_whole_layers():
    plan = from_file("swap_layers.yaml")
    assert plan.log_lines() == [
        "Set layer swap at layer 0 and value is: 20",
        "Set layer swap at layer 3 and value is: 20",
    ]
    assert distances(plan, 0) == distances(plan, 3) == dict.fromkeys(OPERATORS, 20)
    assert distances(plan, 1) == distances(plan, 2) == {}
    assert plan.layers_touched() == {0, 3}


def test_case_c_operators():
    plan = from_file("swap_operators.yaml")
    assert plan.log_lines() == [
        "Set op_swap at layer 0: .attention, value=20",
        "Set op_swap at layer 1: .attention, value=20, .feed_forward, value=15",
        "Set op_swap at layer 2: .attention, value=20, .feed_forward, value=15",
        "Set op_swap at layer 3: .attention, value=10",
    ]
    attention, both = dict.fromkeys(below("self_attention"), 20), dict.fromkeys(below("mlp"), 15)
    assert distances(plan, 0) == attention
    assert distances(plan, 1) == distances(plan, 2) == attention | both
    assert distances(plan, 3) == dict.fromkeys(below("self_attention"), 10)


def test_case_d_operators_beside_recompute():
    plan, without = from_file("swap_and_recompute.yaml"), from_file("swap_operators.yaml")
    assert plan.log_lines() == [
        "Set select recompute at layer 0: feed_forward",
        "Set op_swap at layer 0: .attention, value=20",
        "Set op_swap at layer 1: .attention, value=20, .feed_forward, value=15",
        "Set op_swap at layer 2: .attention, value=20, .feed_forward, value=15",
        "Set select recompute at layer 3: feed_forward",
        "Set op_swap at layer 3: .attention, value=10",
    ]
    for layer in range(4):
        assert distances(plan, layer) == distances(without, layer)
        again = {operator for operator in OPERATORS if plan.recompute(layer, operator) is not None}
        assert again == (below("mlp") if layer in (0, 3) else set())
    assert plan.notices == () and plan.recomputes and not without.recomputes


def test_mindformers_training_file_is_used_as_it_is():
    config = load_memory_config(CONFIGS / "mindformers_llama.yaml", num_layers=4)
    assert len(config.notices) == 2  # the other sections, and mp_comm_recompute
    plan = resolve(config, MODEL, 4)
    attention = "attention.flash_attention, value=6, attention.wq, value=6"
    activation = ", feed_forward.w1.activation, value=4"
    assert plan.log_lines() == [
        f"Set op_swap at layer 0: {attention}{activation}",
        f"Set op_swap at layer 1: {attention}{activation}",
        f"Set op_swap at layer 2: {attention}{activation}",
        f"Set op_swap at layer 3: {attention}",
    ]


def test_off_means_empty():
    for content in ({}, {"swap_config": {"swap": False, "op_swap": [entry("attention", 1, True)]}}):
        plan = resolve(load_memory_config(content), MODEL, 4)
        assert plan.log_lines() == [] and plan.layers_touched() == set()
        assert plan.decision(0, "self_attention") is None
    assert plan_of(op_swap=[]).layers_touched() == set()


def test_decision_says_who_asked_and_what_moves():
    plan = plan_of(op_swap=[entry("mlp", 1, [0]), entry("attention", 3, [0], activations="both")])
    assert plan.decision(0, "self_attention.linear_qkv") == Swap(
        distance=3, activations="both", entry="swap_config.op_swap[1]"
    )
    assert plan.decision(0, "mlp").activations == "produced"
    assert plan.decision(1, "mlp") is None
    assert plan.decision(9, "mlp") is None
    assert plan_of(activations="saved").decision(2, "self_attention.core_attention").activations == "saved"


def test_first_of_two_entries_wins():
    swap = [
        entry(r"attention\.wo", 5, [0]),
        entry("attention", 9, [0, 1]),
        entry(r"attention\.flash_attention", 3, [1]),
    ]
    plan = plan_of(op_swap=swap)
    assert distances(plan, 0) == dict.fromkeys(below("self_attention"), 9) | {"self_attention.linear_proj": 5}
    assert distances(plan, 1) == dict.fromkeys(below("self_attention"), 9)
    assert plan.log_lines() == [
        "Set op_swap at layer 0: attention.wo, value=5, .attention, value=9",
        "Set op_swap at layer 1: .attention, value=9",
    ]
    assert plan.notices == (
        "swap_config.op_swap[2].op_name has no effect in layer 1: "
        "swap_config.op_swap[1] names self_attention.core_attention first",
    )


def test_op_swap_goes_over_layer_swap():
    plan = plan_of(layer_swap={"backward_prefetch": 8, "layers": True}, op_swap=[entry("mlp", 2, [1])])
    assert distances(plan, 0) == dict.fromkeys(OPERATORS, 8)
    assert distances(plan, 1) == dict.fromkeys(OPERATORS, 8) | dict.fromkeys(below("mlp"), 2)
    assert plan.log_lines()[1:3] == [
        "Set layer swap at layer 1 and value is: 8",
        "Set op_swap at layer 1: .mlp, value=2",
    ]


def test_first_layer_swap_wins():
    layers = [{"backward_prefetch": 8, "layers": [0]}, {"backward_prefetch": 4, "layers": [0, 1]}]
    plan = plan_of(layer_swap=layers)
    assert plan.log_lines() == [
        "Set layer swap at layer 0 and value is: 8",
        "Set layer swap at layer 1 and value is: 4",
    ]
    assert plan.notices == (
        "swap_config.layer_swap[1] has no effect in layer 0: swap_config.layer_swap[0] names the layer first",
    )


@pytest.mark.parametrize("names", [["attention", r"attention\.wo"], [r"attention\.wo", "attention", "self_attention"]])
def test_nothing_is_listed_twice_at_one_value(names):
    plan = plan_of(op_swap=[entry(names, 7, [0])])
    assert plan.log_lines() == ["Set op_swap at layer 0: .attention, value=7"]
    assert plan.notices == ()


def test_patterns_are_listed_in_the_order_of_their_first_entry():
    plan = plan_of(op_swap=[entry("attention", 1, [0]), entry("feed_forward", 2, [0, 1]), entry("attention", 3, [1])])
    assert plan.log_lines()[1] == "Set op_swap at layer 1: .attention, value=3, .feed_forward, value=2"


def test_operators_met_while_running_follow_the_same_patterns():
    plan = plan_of(layer_swap={"backward_prefetch": 9, "layers": [3]}, op_swap=[entry("attention", 4, True)])
    assert plan.decision(0, "self_attention.adjust_key_value").distance == 4
    assert plan.decision(0, "cross_attn_bda") is None
    assert plan.decision(3, "cross_attn_bda").distance == 9
    assert plan.decision(3, "").distance == 9
    assert plan.decision(0, "") is None
    assert plan.decision(0, "self_attention.adjust_key_value") is plan.decision(0, "self_attention.adjust_key_value")


def test_layers_of_other_ranks_may_be_unknown():
    plan = plan_of(model={0: LAYER}, op_swap=[entry("attention", 4, [0, 2])])
    assert plan.decision(2, "self_attention.linear_qkv").distance == 4
    assert plan.decision(2, "mlp") is None
    assert plan.layers_touched() == {0, 2}
    assert plan_of(model={0: LAYER}, op_swap=[entry("nonsense", 4, [1])]).decision(1, "mlp") is None


def test_layers_beyond_the_model_are_reached_if_they_exist():
    model = MODEL | {4: LAYER}  # multi-token prediction
    assert plan_of(model=model).layers_touched() == {0, 1, 2, 3, 4}
    assert plan_of(model=model, op_swap=[entry("mlp", 1, [4])]).layers_touched() == {4}


def test_layers_of_different_kinds():
    experts = ("mlp", "mlp.router", "mlp.experts", "mlp.experts.local_experts.0.linear_fc1")
    model = {0: LAYER, 1: experts}
    plan = plan_of(model=model, num_layers=2, op_swap=[entry(r"mlp\.experts", 3, [0, 1]), entry(r"mlp\..*", 2, [0])])
    assert plan.decision(1, "mlp.experts.local_experts.0.linear_fc1").distance == 3
    assert plan.decision(1, "mlp.experts.local_experts.0.activation_func").distance == 3
    assert plan.notices == (
        r"swap_config.op_swap[0].op_name has no effect in layer 0: 'mlp\\.experts' matches no operator there",
    )
    everywhere = plan_of(model=model, num_layers=2, op_swap=[entry(r"mlp\.experts", 3, True)])
    assert everywhere.notices == ()  # "all layers" means all that have it


def test_all_problems_at_once():
    with pytest.raises(MemoryConfigError) as caught:
        plan_of(
            layer_swap={"backward_prefetch": 1, "layers": [0, 4]},
            op_swap=[
                entry(["attention", "attention.flash_atention"], 1, [1, 2]),
                entry(r"mlp\.activation_func", 1, True),
                entry("zzz", 1, [0, 17]),
            ],
        )
    problems = caught.value.problems
    assert [line.partition(": ")[0] for line in problems] == [
        "swap_config.layer_swap.layers",
        "swap_config.op_swap[2].layers",
        "swap_config.op_swap[0].op_name[1]",
        "swap_config.op_swap[2].op_name",
    ]
    assert "matches no operator in layers 1-2;" in problems[2]
    with pytest.raises(MemoryConfigError, match="matches no operator in layer 1;"):
        plan_of(op_swap=[entry("zzz", 1, [1])])
    assert r"did you mean attention\.flash_attention or " in problems[2]
    assert all("python -m mindspeed_mem ops" in line for line in problems[2:])


def test_default_policy_needs_its_operator():
    with pytest.raises(MemoryConfigError, match=r"swap_config \(default policy\): got .* matches no operator"):
        plan_of(model={0: ("mixer", "mixer.in_proj")}, num_layers=1)


patterns = st.sampled_from(
    ["attention", "self_attention", "feed_forward", ".*", r".*\..*", r"mlp\.linear_fc1", r"feed_forward\.w3", ".*norm"]
)
layer_lists = st.lists(st.integers(0, 3), max_size=4)
op_entries = st.lists(st.builds(entry, patterns, st.integers(1, 5), layer_lists), max_size=5)
layer_entries = st.lists(
    st.builds(lambda k, n: {"backward_prefetch": k, "layers": n}, st.integers(1, 5), layer_lists), max_size=3
)


@given(op_entries, layer_entries)
def test_decisions_are_those_of_the_first_entry_that_selects_the_operator(by_name, by_layer):
    plan = plan_of(op_swap=by_name, layer_swap=by_layer)
    for layer in range(4):
        for operator in OPERATORS:
            expected = [
                item["backward_prefetch"]
                for item in by_name
                if layer in item["layers"]
                and any(operator in hit.operators for hit in match(item["op_name"], OPERATORS))
            ] + [item["backward_prefetch"] for item in by_layer if layer in item["layers"]]
            swap = plan.decision(layer, operator)
            assert (swap and swap.distance) == (expected[0] if expected else None)
    assert bool(plan.layers_touched()) == bool(plan.log_lines())


@given(op_entries, layer_entries)
def test_what_is_known_early_or_late_makes_no_difference(by_name, by_layer):
    early = plan_of(op_swap=by_name, layer_swap=by_layer)
    late = plan_of(model={}, op_swap=by_name, layer_swap=by_layer)
    for layer in range(4):
        for operator in OPERATORS:
            assert early.decision(layer, operator) == late.decision(layer, operator)
    assert early.layers_touched() == late.layers_touched()


PLACES = {0: (0, 0), 1: (0, 0), 2: (1, 0), 3: (1, 0)}


def staged(places=PLACES, **swap):
    return resolve(load_memory_config({"swap_config": {"swap": True} | swap}), MODEL, 4, places)


def test_entries_of_one_stage():
    plan = staged(op_swap=[entry("mlp", 3, True, stages=[0]), entry("mlp", 5, [1, 2], stages=[1])])
    assert [set(distances(plan, layer).values()) for layer in range(4)] == [{3}, {3}, {5}, set()]
    plan = staged(layer_swap=[{"backward_prefetch": 2, "layers": True, "stages": 1}])
    assert plan.layers_touched() == {2, 3}
    everywhere = staged(layer_swap=[{"backward_prefetch": 2, "layers": [2, 3]}])
    assert plan.fingerprint() == everywhere.fingerprint()


def test_stages_that_do_not_fit():
    with pytest.raises(MemoryConfigError) as caught:
        staged(op_swap=[entry("mlp", 3, True, stages=[1, 2]), entry("mlp", 3, [0], stages=[1])])
    assert caught.value.problems == (
        "swap_config.op_swap[0].stages: got stage 2; allowed: 0 to 1, the pipeline stages with layers, counted from 0",
        "swap_config.op_swap[1].stages: got 1, where none of its layers is; of all layers 2-3 are there",
    )
    for wrong in ("first", [], [-1], [True], 1.0):
        with pytest.raises(MemoryConfigError, match="a list of stages counted from 0"):
            staged(op_swap=[entry("mlp", 3, True, stages=wrong)])
    staged({0: (0, 0), 1: (0, 0)}, op_swap=[entry("mlp", 3, True, stages=[1])])  # other ranks know the rest


def test_pp_aware_is_on_unless_it_is_switched_off():
    assert load_memory_config({"swap_config": {"swap": True}}).swap.pp_aware
    assert not load_memory_config({"swap_config": {"swap": True, "pp_aware": False}}).swap.pp_aware


def calls_to_resolve(config, count):
    """How many functions Python calls to join it with a model of so many layers."""
    loaded = load_memory_config(config, num_layers=count)
    calls = 0

    def see(_, event, __):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(see)
    try:
        resolve(loaded, {layer: LAYER for layer in range(count)}, count)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("key", ["layer_swap", "op_swap"])
@pytest.mark.parametrize("more", [{}, {"stages": [0]}])
def test_an_entry_for_each_layer_costs_what_it_is(key, more):
    """The third hundred of layers with an entry each costs what the second one did."""

    def of_each_layer(count):
        name = {"op_name": r"mlp\.linear_fc1"} if key == "op_swap" else {}
        entries = [{"backward_prefetch": 1, "layers": [layer]} | name | more for layer in range(count)]
        return {"swap_config": {"swap": True, key: entries}}

    calls_to_resolve(of_each_layer(1), 1)  # what is looked up once
    first, second, third = (calls_to_resolve(of_each_layer(count), count) for count in (100, 200, 300))
    assert abs((third - second) - (second - first)) < 100
