"""Names and patterns of operators."""

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_mem.activation.regions import inline_path
from mindspeed_mem.plan.operators import (
    INPUT,
    Operator,
    llama_names,
    match,
    names_a_primitive,
    near_patterns,
    pattern_error,
    with_inline,
)
from mindspeed_mem.plan.operators import OPERATORS as OPERATOR_TABLE
from tests.operators import DENSE

ROOT = Path(__file__).parents[2]

ATTENTION = {op for op in with_inline(DENSE) if op.startswith("self_attention")}
MLP = {op for op in with_inline(DENSE) if op == "mlp" or op.startswith("mlp.")}
MOE = (
    "mlp",
    "mlp.router",
    "mlp.experts",
    "mlp.experts.local_experts.0.linear_fc1",
    "mlp.experts.local_experts.0.linear_fc2",
    "mlp.experts.local_experts.1.linear_fc1",
    "mlp.shared_experts",
    "mlp.shared_experts.linear_fc1",
)


OPERATORS = with_inline(DENSE)


def selected(pattern, operators=OPERATORS):
    return set().union(*(hit.operators for hit in match(pattern, operators)))


def shown(pattern, operators=OPERATORS):
    return [hit.shown for hit in match(pattern, operators)]


@pytest.mark.parametrize(
    ("pattern", "operators"),
    [
        ("attention", ATTENTION),
        ("self_attention", ATTENTION),
        ("feed_forward", MLP),
        ("mlp", MLP),
        (r".*\.flash_attention", {"self_attention.core_attention"}),
        (r"attention\.flash_attention", {"self_attention.core_attention"}),
        (r"self_attention\.core_attention", {"self_attention.core_attention"}),
        (r"self_attention\.core_attention\.flash_attention", {"self_attention.core_attention"}),
        (r"attention\.wq", {"self_attention.linear_qkv"}),
        (r"attention\.wk", {"self_attention.linear_qkv"}),
        (r"attention\.wv", {"self_attention.linear_qkv"}),
        (r"attention\.w_qkv", {"self_attention.linear_qkv"}),
        (r"attention\.wo", {"self_attention.linear_proj"}),
        (r"attention\.w.", {"self_attention.linear_qkv", "self_attention.linear_proj"}),
        (r"attention\.apply_rotary_emb", {"self_attention.rotary_pos_emb"}),
        (r"feed_forward\.w1", {"mlp.linear_fc1"}),
        (r"feed_forward\.w3", {"mlp.linear_fc1"}),
        (r"feed_forward\.w_gate_hidden", {"mlp.linear_fc1"}),
        (r"feed_forward\.w2", {"mlp.linear_fc2"}),
        (r"feed_forward\.w2\.matmul", {"mlp.linear_fc2"}),
        (r"feed_forward\.mul", {"mlp.activation_func"}),
        (r"feed_forward\.w1\.activation", {"mlp.activation_func"}),
        (r"feed_forward\.w1\.activation\.silu", {"mlp.activation_func"}),
        (r"feed_forward\.activate\.silu", {"mlp.activation_func"}),
        (r"mlp\.mul", {"mlp.activation_func"}),
        (r"mlp\.activation_func\.silu", {"mlp.activation_func"}),
        (r"mlp\.activation_func\.silu\.silu", {"mlp.activation_func"}),
        (r"mlp\.activation_func\.mul", {"mlp.activation_func"}),
        (r"mlp\.dense_left", {"mlp.linear_fc1"}),
        (r"mlp\.dense_4h_to_h", {"mlp.linear_fc2"}),
        (r"self_attention\.query_key_value", {"self_attention.linear_qkv"}),
        (r"self_attention\.flash_attention", {"self_attention.core_attention"}),
        (r"attention\.softmax", {"self_attention.core_attention"}),
        (r"attention\.apply_rotary_emb\.mul", {"self_attention.rotary_pos_emb"}),
        (r"self_attention\.split_qkv", {"self_attention.qkv"}),
        (r"input_layernorm\.cast", {"input_layernorm"}),
        (r"post_attention_layernorm\.cast", {"pre_mlp_layernorm"}),
        (r"input_layernorm\.norm", {"input_layernorm"}),
        ("add", {"self_attn_bda", "mlp_bda"}),
        (r"feed_forward\.w1\.reshape", set()),  # not worth a product of matrices
        (r"attention\.transpose", set()),
        ("attention_norm", {"input_layernorm"}),
        ("ffn_norm", {"pre_mlp_layernorm"}),
        (r"ffn_norm\.norm", {"pre_mlp_layernorm"}),
        (r".*\.norm", {"input_layernorm", "pre_mlp_layernorm"}),
        (".*norm", {"input_layernorm", "pre_mlp_layernorm"}),
        ("attention|mlp", ATTENTION | MLP),
        (".*", set(with_inline(DENSE))),
        (r".*\..*", (ATTENTION | MLP) - {"self_attention", "mlp"}),
        ("attentio", set()),  # in full, not a prefix
        ("attention.flash_attention", set()),  # a plain dot is the regex dot inside one part
        (r"core_attention", set()),  # from the layer on
        (r"\d", set()),
    ],
)
def test_pattern_selects_node_and_everything_below(pattern, operators):
    assert selected(pattern) == operators


def test_plain_dot_is_any_character_within_a_part():
    assert selected("self.attention") == ATTENTION
    assert selected(r"mlp\.linear.fc.") == {"mlp.linear_fc1", "mlp.linear_fc2"}


def test_names_are_shown_in_the_vocabulary_that_matched():
    assert shown("attention") == ["attention"]
    assert shown("self_attention") == ["self_attention"]
    assert shown(r".*\.flash_attention") == ["attention.flash_attention"]
    assert shown(r"attention\.w[kv]") == ["attention.wk"]  # one operator, one line


def test_megatron_names_are_shown_if_both_match():
    assert shown(".*attention") == ["self_attention"]
    assert shown(r".*\.(core|flash)_attention") == ["self_attention.core_attention"]
    assert shown("attention|mlp") == ["attention", "mlp"]


def test_experts_are_ordinary_children():
    first = "mlp.experts.local_experts.0.linear_fc1"
    assert selected(r"mlp\.experts\.local_experts\.0\.linear_fc1", MOE) == {first}
    second = "mlp.experts.local_experts.1.linear_fc1"
    assert selected(r"mlp\.dispatch", with_inline(MOE)) == {
        f"mlp.dispatch.{step}" for step in ("preprocess", "communicate", "postprocess")
    }
    assert selected(r"feed_forward\.experts\.local_experts\.\d\.w1", MOE) == {first, second}
    assert selected(r"mlp\.experts\.local_experts\.1", MOE) == {second}


def test_inline_operators_are_known_where_their_container_is():
    assert {"self_attn_bda", "mlp_bda", "mlp.activation_func", "self_attention.rotary_pos_emb"} <= set(
        with_inline(DENSE)
    )
    inside_moe = set(with_inline(MOE)) - set(MOE)
    assert inside_moe == {
        "mlp_bda",
        "mlp.dispatch.preprocess",
        "mlp.dispatch.communicate",
        "mlp.dispatch.postprocess",
        "mlp.shared_experts.activation_func",
        "mlp.experts.local_experts.0.activation_func",
        "mlp.experts.local_experts.1.activation_func",
    }
    latent = with_inline(("self_attention", "self_attention.linear_kv_down_proj"))
    assert "self_attention.rotary_pos_emb" not in latent
    assert with_inline(()) == ()


def test_llama_names():
    assert llama_names("self_attention.core_attention") == ("attention.flash_attention",)
    assert llama_names("mlp.activation_func") == ("feed_forward.mul", "feed_forward.w1.activation")
    assert llama_names("mlp.linear_fc1")[:2] == ("feed_forward.w1", "feed_forward.w3")
    assert llama_names("self_attn_bda") == ()


@pytest.mark.parametrize("operator", with_inline(DENSE + MOE))
def test_every_name_selects_its_own_operator(operator):
    for name in (operator, *llama_names(operator)):
        hits = match(name.replace(".", r"\."), with_inline(DENSE + MOE))
        assert [hit.node for hit in hits] == [operator]


@pytest.mark.parametrize(
    "pattern",
    [
        r"feed_forward\.w1\.reshape",
        r".*\.w_qkv\.reshape",
        r"feed_forward\.reshape",
        r"mlp\.dense_left\.reshape",
        r"mlp\.shared_experts\.mul",
        r"mlp\.shared_experts\.activation_func\.silu",
        r"attention\.merger_head_transpose",
        r"attention\.cast_attn",
        r"attention\.(reshape|transpose)",
        "cast",
    ],
)
def test_primitives_of_mindformers_are_told_from_typos(pattern):
    assert names_a_primitive(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        r"feed_forwad\.reshape",
        r"feed_forward\.w4\.reshape",
        r"feed_forward\.reshap",
        r"attention\.flash_attention",
        "atention_norm",
        r"attention\..*",
        ".*",
        "mlp",
    ],
)
def test_what_is_no_primitive(pattern):
    assert not names_a_primitive(pattern)


@pytest.mark.parametrize("pattern", ["", r"attention\.", r"\.attention", "a(", r"attention\.[", "*"])
def test_what_is_no_pattern(pattern):
    assert pattern_error(pattern) is not None


@pytest.mark.parametrize("pattern", [".*", r"attention\.flash_attention", r"(self_)?attention\.w[qkv]"])
def test_what_is_a_pattern(pattern):
    assert pattern_error(pattern) is None


def test_near_patterns_can_be_pasted():
    near = near_patterns("attention.flash_atention", DENSE)
    assert near[0] == r"attention\.flash_attention"
    assert all(selected(pattern) for pattern in near)
    assert near_patterns("zzzzzz", DENSE) == []
    assert near_patterns("fc[12]", ("mlp", "mlp.fc1", "mlp.fc2")) == [r"mlp\.fc1", r"mlp\.fc2"]


@given(st.lists(st.sampled_from(with_inline(DENSE + MOE)), unique=True, min_size=1))
def test_selecting_the_whole_layer_selects_each_operator(operators):
    assert selected(".*", operators) == set(operators)
    assert selected(".*", set(operators)) == set(operators)


def test_one_table_has_all_that_is_known_of_an_operator():
    """Who adds an operator adds a row: nothing else lists their names."""
    named = [one.name for one in OPERATOR_TABLE if one != Operator(one.path)]
    names = {name for name in (*named, *(one.path for one in OPERATOR_TABLE)) if "_" in name or "." in name}
    rooms = [ROOT / "mindspeed_mem" / room for room in ("plan", "activation", "adaptive", "report")]
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for room in rooms
        for path in sorted(room.rglob("*.py"))
        if path.relative_to(ROOT).as_posix() != "mindspeed_mem/plan/operators.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("one", OPERATOR_TABLE, ids=lambda one: one.path)
def test_every_row_is_reached_by_all_its_names(one):
    inside = [f"{cell}.{name}" for cell in one.cells for name in one.inside]
    parents = one.path.removesuffix(one.name)
    for name in (one.name, *one.llama, *one.elsewhere, *one.primitives, *inside):
        assert [hit.node for hit in match((parents + name).replace(".", r"\."), (one.path,))][-1:] == [one.path]
    if one.marker is not None:
        assert inline_path("x", one.marker) == f"x.{one.name}"
    for where in one.beside:
        node = where.replace("*", "x").removesuffix("/")
        path = f"x.{one.name}" if "*" in where else one.path
        assert path in with_inline((node,)) and path not in with_inline((node + "s",))
        assert one.unless is None or path not in with_inline((node, one.unless))
    known = {row.path for row in OPERATOR_TABLE} | {INPUT}
    assert known.issuperset({*one.used_by, *one.starts_from, *one.with_it} | {one.unless} - {None})
