"""Recompute in the plan: which operators run again, how that meets swap, and what is said about it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_mem.plan import MemoryConfigError, Recompute, load_memory_config, resolve
from mindspeed_mem.plan.operators import nodes_of, selects, with_inline
from tests.operators import DENSE as LAYER

MODEL = {layer: LAYER for layer in range(4)}
OPERATORS = with_inline(LAYER)
EXPERTS = ("mlp", "mlp.router", "mlp.experts", "mlp.shared_experts", "mlp.shared_experts.linear_fc1")
EXPERTS += tuple(f"mlp.experts.local_experts.{i}.linear_fc{k}" for i in (0, 11) for k in (1, 2))


def plan_of(section, swap=None, model=MODEL, places=None):
    content = {"swap_config": {"swap": True, "op_swap": []} if swap is None else swap, "recompute_config": section}
    return resolve(load_memory_config(content), model, 4, places)


def again(plan, layer):
    return {op for op in ("", *OPERATORS) if plan.recompute(layer, op) is not None}


def problems_of(section, swap=None, **kwargs):
    with pytest.raises(MemoryConfigError) as caught:
        plan_of(section, swap, **kwargs)
    return list(caught.value.problems)


def below(*nodes):
    return {op for op in OPERATORS if any(op == n or op.startswith(f"{n}.") for n in nodes)}


def layer_swap(layers, k=2):
    return {"swap": True, "layer_swap": {"backward_prefetch": k, "layers": layers}}


def op_swap(*names, layers=True):
    return {"swap": True, "op_swap": [{"op_name": list(names), "backward_prefetch": 2, "layers": layers}]}


def test_whole_layers():
    plan = plan_of({"recompute": [1, 3]})
    assert again(plan, 1) == again(plan, 3) == {"", *OPERATORS} and again(plan, 0) == again(plan, 2) == set()
    assert plan.recompute(1, "mlp") == Recompute(entry="recompute_config.recompute", communication=False)
    assert plan.recompute(1, "met.later") is not None and plan.recompute(9, "") is None
    assert plan.log_lines() == ["Set full recompute at layer 1", "Set full recompute at layer 3"]
    assert plan.layers_touched() == {1, 3} and plan.recomputes and plan.notices == ()


def test_operators_and_what_is_in_them():
    plan = plan_of({"select_recompute": {"feed_forward": [0], r"attention\.flash_attention": [0, 1]}})
    assert again(plan, 0) == below("mlp", "self_attention.core_attention")
    assert again(plan, 1) == {"self_attention.core_attention"}
    assert plan.recompute(0, "mlp.met_later") is not None and plan.recompute(0, "cross_attention") is None
    assert plan.log_lines() == [
        "Set select recompute at layer 0: feed_forward, attention.flash_attention",
        "Set select recompute at layer 1: attention.flash_attention",
    ]


def test_communication_is_told_apart():
    plan = plan_of({"select_recompute": ["mlp"], "select_comm_recompute": True})
    norm = Recompute(entry="recompute_config.select_comm_recompute", communication=True)
    assert plan.recompute(2, "input_layernorm") == norm
    assert plan.recompute(2, "mlp").communication is False
    assert plan.log_lines()[:2] == [
        "Set select recompute at layer 0: mlp",
        "Set select comm recompute at layer 0: attention_norm.norm, ffn_norm.norm",
    ]


def test_nothing_is_listed_twice_or_below_what_is_listed():
    section = {"select_recompute": [r"feed_forward\.w1", "mlp", "feed_forward"], "select_comm_recompute": [r"mlp\..*"]}
    assert plan_of(section).log_lines() == [f"Set select recompute at layer {i}: mlp" for i in range(4)]


def test_a_container_of_something_excluded_does_not_run_again_as_a_whole():
    plan = plan_of({"select_recompute": ["mlp"], "select_recompute_exclude": {r"mlp\.linear_fc1": [0]}})
    assert again(plan, 0) == {"mlp.activation_func", "mlp.linear_fc2"} and again(plan, 1) == below("mlp")
    assert plan.recompute(0, "mlp.met_later") is not None
    assert plan.log_lines()[:2] == [
        "Set select recompute at layer 0: mlp (except mlp.linear_fc1)",
        "Set select recompute at layer 1: mlp",
    ]


def test_whole_layers_but_flash_attention():
    plan = plan_of({"recompute": [0, 1], "select_recompute_exclude": {r".*\.flash_attention": [0]}})
    assert again(plan, 0) == set(OPERATORS) - {"self_attention", "self_attention.core_attention"}
    assert "" in again(plan, 1)
    assert plan.log_lines() == [
        "Set full recompute at layer 0 (except attention.flash_attention)",
        "Set full recompute at layer 1",
    ]


def test_default_operators():
    plan = plan_of({"select_recompute": True}, model={0: LAYER, 1: EXPERTS})
    assert again(plan, 0) == {"mlp.activation_func"}
    operators = with_inline(EXPERTS)
    found = {op for op in operators if plan.recompute(1, op)}
    assert found == {op for op in operators if op.endswith(".activation_func")} and len(found) == 3
    assert plan.log_lines()[0] == "Set select recompute at layer 0: feed_forward.mul"


def test_defaults_that_match_nothing_are_no_mistake():
    plan = plan_of({"select_recompute": True, "select_comm_recompute": True}, model=dict.fromkeys(range(4), ("mixer",)))
    assert not plan.recomputes and plan.layers_touched() == set() and plan.log_lines() == []
    assert [line.partition(" has no effect: ")[0] for line in plan.notices] == [
        "recompute_config.select_recompute",
        "recompute_config.select_comm_recompute",
    ]


def test_recompute_goes_over_swap():
    plan = plan_of({"select_recompute": {"feed_forward": [0, 3]}}, op_swap("mlp", "attention"))
    assert plan.decision(0, "mlp.linear_fc1") is None and plan.decision(1, "mlp.linear_fc1") is not None
    assert plan.decision(0, "mlp.met_later") is None and plan.decision(0, "self_attention").distance == 2
    assert plan.log_lines()[:2] == [
        "Set select recompute at layer 0: feed_forward",
        "Set op_swap at layer 0: .attention, value=2",
    ]
    assert plan.notices == (
        "swap_config.op_swap[0] has no effect on mlp in layers 0, 3: "
        "recompute goes over swap (recompute_config.select_recompute.feed_forward)",
    )


def test_layer_swap_names_what_is_recomputed_of_it():
    plan = plan_of({"recompute": [1], "select_recompute": {"mlp": [0]}}, layer_swap([0, 1, 2]))
    assert plan.decision(1, "") is None and plan.decision(1, "mlp_bda") is None and plan.decision(0, "").distance == 2
    assert plan.log_lines() == [
        "Set select recompute at layer 0: mlp",
        "Set layer swap at layer 0 and value is: 2",
        "Set full recompute at layer 1",
        "Set layer swap at layer 2 and value is: 2",
    ]
    assert plan.notices == (
        "swap_config.layer_swap has no effect on mlp in layer 0: "
        "recompute goes over swap (recompute_config.select_recompute.mlp)",
        "swap_config.layer_swap has no effect in layer 1: the whole layer is recomputed (recompute_config.recompute)",
    )


def test_the_default_policy_yields_too():
    (notice,) = plan_of({"recompute": True}, {"swap": True}).notices
    assert notice.startswith(
        "swap_config (default policy) has no effect on self_attention.core_attention in layers 0-3"
    )


@pytest.mark.parametrize(
    ("section", "notice"),
    [
        ({"select_recompute": {"mlp": [0, 1]}, "select_recompute_exclude": {"mlp": [1]}}, "in layer 1: it is excluded"),
        ({"select_recompute": ["mlp"], "select_recompute_exclude": ["attention"]}, "nothing that it names would be"),
        ({"recompute": [0], "select_recompute_exclude": {"mlp": [2]}}, "nothing that it names would be recomputed"),
    ],
)
def test_what_has_no_effect_gives_one_notice(section, notice):
    (found,) = plan_of(section).notices
    assert notice in found


def test_primitives_that_no_operator_stands_for_give_one_notice():
    section = {
        "select_recompute": {r"feed_forward\.mul": True, r"feed_forward\.w1\.reshape": [0], r"mlp\.reshape": True}
    }
    plan = plan_of(section, op_swap("attention", r"attention\.wq\.reshape"))
    assert again(plan, 0) == {"mlp.activation_func"}
    (notice,) = plan.notices
    assert notice.startswith(
        r"swap_config.op_swap[0].op_name[1], recompute_config.select_recompute.feed_forward\.w1\.reshape, "
        r"recompute_config.select_recompute.mlp\.reshape: no effect, since no operator of this model stands for these "
    )
    far = plan_of(section, op_swap("attention", r"attention\.wq\.reshape"), model={9: LAYER})  # of other ranks
    assert far.fingerprint() == plan.fingerprint()


@pytest.mark.parametrize(
    ("pattern", "operators", "meant"),
    [
        (".*norm", ("output", "output.LayerNorm"), r"output\.LayerNorm"),
        (".*norm", ("layer.0.layer_norm", "layer.1.layer_norm"), r"layer\.0\.layer_norm or layer\.1\.layer_norm"),
    ],
)
def test_what_a_pattern_would_name_elsewhere_is_told(pattern, operators, meant):
    """A primitive of MindFormers fits the pattern, too: it is no error."""
    (notice,) = plan_of({"select_recompute": {pattern: True}}, model={0: operators}).notices
    assert f"did you mean {meant}? " in notice


def test_names_that_some_of_the_layers_lack():
    model = {0: LAYER, 1: EXPERTS}
    (notice,) = plan_of({"select_recompute": {r"mlp\.router": [0, 1]}}, model=model).notices
    assert notice.startswith(r"recompute_config.select_recompute.mlp\.router has no effect in layer 0: ")
    assert plan_of({"select_recompute": [r"mlp\.dispatch"]}, model=model).notices == ()


def test_all_problems_at_once():
    problems = problems_of(
        {
            "recompute": [4],
            "select_recompute": {"attention.flash_atention": [0], "mlp": [1, 5]},
            "select_recompute_exclude": {r"mlp\.router": True},
        },
        op_swap("zzz"),
    )
    assert [line.partition(": ")[0] for line in problems] == [
        "recompute_config.recompute",
        "recompute_config.select_recompute.mlp",
        "swap_config.op_swap[0].op_name",
        "recompute_config.select_recompute.attention.flash_atention",
        r"recompute_config.select_recompute_exclude.mlp\.router",
    ]
    assert r"did you mean attention\.flash_attention" in problems[3]


PLACES = {0: (0, 0), 1: (1, 0), 2: (0, 1), 3: (1, 1)}  # two stages, two virtual stages
TWO_STAGES = {0: (0, 0), 1: (0, 0), 2: (1, 0), 3: (1, 0)}
TWO_CHUNKS = {0: (0, 0), 1: (0, 0), 2: (0, 1), 3: (0, 1)}


@pytest.mark.parametrize(
    ("counts", "places", "expected"),
    [
        ([2], None, {0, 1}),
        ([1, 2], TWO_STAGES, {0, 2, 3}),
        ([1, 0], TWO_STAGES, {0}),
        ([1, 2, 0], TWO_STAGES, {0, 2, 3}),  # a last stage may hold only the loss
        ([1, 2], PLACES, {0, 1, 3}),
        ([2], TWO_CHUNKS, {0, 2}),  # not nested: from each virtual stage in turn
        ([3], TWO_CHUNKS, {0, 1, 2}),
        ([[0, 1], [1, 0]], PLACES, {1, 2}),  # nested: virtual stages outside
        ([[1, 1]], TWO_STAGES, {0, 2}),
        ([True, 1], TWO_STAGES, {0, 1, 2}),
        ([False, True], TWO_STAGES, {2, 3}),
        ([[True, 0], [0, 1]], PLACES, {0, 3}),
        ([True, [1, 0]], PLACES, {0, 1, 2}),  # a whole virtual stage
        ([[0, 1], False], PLACES, {1}),
    ],
)
def test_counts_per_stage(counts, places, expected):
    for section in ({"recompute": counts}, {"select_recompute": {"mlp": counts}}):
        plan = plan_of(section, {"swap": False}, places=places)
        assert plan.layers_touched() == expected


@pytest.mark.parametrize(
    ("counts", "places", "expected"),
    [
        ([0, 3, 1], TWO_STAGES, "recompute: got [0, 3, 1]; allowed: 2 counts"),
        ([[1, 1]], PLACES, "recompute: got 1 lists; allowed: 2, one for each virtual stage"),
        ([[1, 1], [1]], PLACES, "recompute[1]: got [1]; allowed: 2 counts"),
    ],
)
@pytest.mark.parametrize("key", ["recompute", "select_recompute"])
def test_counts_that_do_not_fit(key, counts, places, expected):
    (problem,) = problems_of({key: counts}, {"swap": False}, places=places)
    assert expected.replace("recompute", key, 1) in problem


@pytest.mark.parametrize(
    ("counts", "places", "expected", "notice"),
    [
        ([5], None, {0, 1, 2, 3}, "[0]: got 5, but pipeline stage 0 has layers 0-3: these are all that count"),
        ([1], TWO_STAGES, {0}, ": got [1], no count for pipeline stage 1: nothing is recomputed there"),
        ([0, 3], TWO_STAGES, {2, 3}, "[1]: got 3, but pipeline stage 1 has layers 2-3: these are all that count"),
        ([[1, 2], [0, 1]], PLACES, {0, 1, 3}, "[0][1]: got 2, but pipeline stage 1, virtual stage 0 has layer 1: "),
    ],
)
@pytest.mark.parametrize("key", ["recompute", "select_recompute"])
def test_counts_that_fit_in_part(key, counts, places, expected, notice):
    plan = plan_of({key: counts}, {"swap": False}, places=places)
    assert plan.layers_touched() == expected
    (found,) = plan.notices
    assert found.startswith(f"recompute_config.{key}{notice}")


def test_fingerprints_tell_plans_apart():
    sections = ({}, {"recompute": True}, {"recompute": [0, 1]}, {"select_recompute": ["mlp"]}, {"recompute": [1, 2]})
    swaps = ({"swap": True}, layer_swap([0]), layer_swap([0], k=3), op_swap("mlp"))
    pairs = list(itertools.product(sections, swaps))
    prints = [plan_of(section, swap).fingerprint() for section, swap in pairs]
    assert len(set(prints)) == len(pairs)
    assert prints == [plan_of(section, swap, model={0: LAYER}).fingerprint() for section, swap in pairs]
    assert plan_of({"recompute": [1, 0]}).fingerprint() == plan_of({"recompute": [0, 1]}).fingerprint()
    kept, moved = ({"swap": True, "swap_recompute_inputs": inputs} for inputs in (False, True))
    assert plan_of({}, moved).swap_recompute_inputs and not plan_of({}, kept).swap_recompute_inputs
    assert plan_of({}, kept).fingerprint() != plan_of({}, moved).fingerprint()


def test_flags_alone_make_a_plan():
    config = load_memory_config(None, flags={"recompute": ("--recompute-layers", (2,))})
    plan = resolve(config, MODEL, 4)
    assert again(plan, 2) == {"", *OPERATORS} and plan.layers_touched() == {2}
    assert plan.recompute(2, "").entry == "--recompute-layers"


names = st.sampled_from(
    ["attention", "self_attention", "feed_forward", ".*", r".*\..*", r"mlp\.linear_fc1", r"feed_forward\.w2", ".*norm"]
)
layers = st.lists(st.integers(0, 3), max_size=4, unique=True)
by_name = st.dictionaries(names, layers, max_size=3)


@given(layers, by_name, by_name, by_name, layers)
def test_what_runs_again(whole, select, communication, excluded, swapped):
    section = {
        "recompute": whole,
        "select_recompute": select,
        "select_comm_recompute": communication,
        "select_comm_recompute_exclude": excluded,
    }
    swap = layer_swap(swapped)
    plan = plan_of(section, swap)
    wanted = [*select.items(), *communication.items()]
    for layer in range(4):
        out = {op for op in OPERATORS if any(layer in at and selects(p, op) for p, at in excluded.items())}
        for op in nodes_of(OPERATORS):
            asked = layer in whole or any(layer in at and selects(p, op) for p, at in wanted)
            holds = any(other == op or other.startswith(f"{op}.") for other in out)
            assert (plan.recompute(layer, op) is not None) == (asked and not holds)
        assert (plan.recompute(layer, "") is not None) == (layer in whole and not out)
        for op in ("", *OPERATORS):
            kept = plan.recompute(layer, op) is None
            assert (plan.decision(layer, op) is not None) == (kept and layer in swapped)
        lines = [line for line in plan.log_lines() if "recompute" in line and f" at layer {layer}" in line]
        assert bool(lines) == bool(again(plan, layer))
    assert plan.recomputes == any(again(plan, layer) for layer in range(4))
    same = plan_of(section, swap)
    assert same.fingerprint() == plan.fingerprint() and same.log_lines() == plan.log_lines()


@given(layers, by_name, by_name)
def test_leaves_met_while_running_are_decided_alike(whole, select, excluded):
    section = {"recompute": whole, "select_recompute": select, "select_recompute_exclude": excluded}
    early, late = plan_of(section), plan_of(section, model={})
    for layer, op in itertools.product(range(4), OPERATORS):
        if op not in ("self_attention", "mlp"):
            assert (early.recompute(layer, op) is None) == (late.recompute(layer, op) is None)
