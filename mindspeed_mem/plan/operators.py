r"""Names of the operators in a transformer layer, and the patterns that select them.

An operator is a path below its layer, in Megatron's names (``self_attention.linear_qkv``). The nodes of a layer are
its operators and everything that contains one. MindFormers' names are other names for the same nodes: the tree is
always Megatron's, so ``feed_forward\.w1\.activation`` is ``mlp.activation_func`` and not a part of ``mlp.linear_fc1``.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import NamedTuple

_NORM = ("norm", "layer_norm", "rms_norm", "square", "mean", "rsqrt", "mul2", "cast", "rcast")
_ROTARY = ("mul", "mul_inc", "add", "neg", "bmm_swap", "slice", "concat", "cast", "reshape", "transpose")
_ACTIVATION = ("silu", "gelu", "relu", "sigmoid", "mul", "cast")

INPUT = "input"
"""What a layer is given by the one before: no operator, but what its operators use and start from."""
INPUT_NORM, ATTENTION, SPLIT = "input_layernorm", "self_attention", "self_attention.qkv"
QKV, ROTARY, CORE = "self_attention.linear_qkv", "self_attention.rotary_pos_emb", "self_attention.core_attention"
PROJ = "self_attention.linear_proj"
ATTENTION_ADD, MLP_NORM, MLP, FC1 = "self_attn_bda", "pre_mlp_layernorm", "mlp", "mlp.linear_fc1"
ACTIVATION, FC2, MLP_ADD = "mlp.activation_func", "mlp.linear_fc2", "mlp_bda"
LATENT, Q_LATENT = "self_attention.linear_kv_down_proj", "self_attention.linear_q_down_proj"
Q_NORM, K_NORM, LATENT_NORM = (f"self_attention.{name}_layernorm" for name in ("q", "k", "kv"))
ROUTER, DISPATCH, ROUTED, SHARED = "mlp.router", "mlp.dispatch.postprocess", "mlp.experts", "mlp.shared_experts"
SHARED_FC1, SHARED_ACTIVATION, SHARED_FC2 = (f"{SHARED}.{one.rpartition('.')[2]}" for one in (FC1, ACTIVATION, FC2))
EXPERT_FC1, EXPERT_ACTIVATION = "expert_fc1", "moe_act"
"""These two in Megatron's names for such modules: of all experts, whichever way they are computed."""


class Operator(NamedTuple):
    """All that is known of one operator: adding one is adding a row below.

    MindFormers goes one step further down than Megatron, to primitives; here they are further names of the operator
    around them, where running that again costs no more than the primitive is worth: not a whole product of matrices for
    a reshape behind it.
    """

    path: str
    """Where it is found in a layer; elsewhere (in experts, in a second attention) its name means the same."""
    llama: tuple[str, ...] = ()
    """What MindFormers' Llama layer calls it, the usual name first."""
    elsewhere: tuple[str, ...] = ()
    """What MindFormers' other models call it: GLM, TeleChat, DeepSeek."""
    primitives: tuple[str, ...] = ()
    """MindFormers' primitives that stand for it."""
    cells: tuple[str, ...] = ()
    """Cells of MindFormers that are one operator here,"""
    inside: tuple[str, ...] = ()
    """and the primitives in each of them."""
    beside: tuple[str, ...] = ()
    """Where it runs without being a module: where there is such a node; ``x/``: one with nothing in it; ``*.x``: beside
    each node of that name."""
    unless: str | None = None
    """It does not where there is this node."""
    marker: str | None = None
    """What Megatron's range marker calls it, if not by its name."""
    used_by: tuple[str, ...] = ()
    """In a dense layer: whose backward reads what it produces. Empty: nobody's, as backward keeps nothing of it."""
    starts_from: tuple[str, ...] = ()
    """Whose products its second run reads,"""
    with_it: tuple[str, ...] = ()
    """and what has to run again before it, since nothing keeps what it is given."""
    fused_into: tuple[str, ...] = ()
    """Where it is no node, as in TransformerEngine's layer specs: the linears that it is then part of."""

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


DENSE = (
    Operator(
        INPUT_NORM,
        llama=("attention_norm",),
        cells=("attention_norm", "input_layernorm"),
        inside=_NORM,
        used_by=(INPUT_NORM, QKV),
        starts_from=(INPUT,),
        fused_into=(QKV,),
    ),
    Operator(ATTENTION, llama=("attention",)),
    Operator(SPLIT, primitives=("split_qkv",), beside=(ATTENTION,), unless=LATENT),
    Operator(
        QKV,
        llama=("wq", "wk", "wv", "w_qkv", "w"),  # w_qkv, w: one matrix for all three (qkv_concat)
        elsewhere=("query_key_value", "wk_v"),
        primitives=("wq.matmul", "wk.matmul", "wv.matmul", "w_qkv.matmul", "linear_qkv.matmul"),
        used_by=(CORE,),
        starts_from=(INPUT_NORM,),
    ),
    Operator("self_attention.adjust_key_value"),
    Operator(
        ROTARY,
        llama=("apply_rotary_emb",),
        elsewhere=("apply_rotary_pos_emb",),
        cells=("apply_rotary_emb", "apply_rotary_pos_emb"),
        inside=_ROTARY,
        beside=(ATTENTION,),
        unless=LATENT,
        used_by=(ROTARY, CORE),
        starts_from=(QKV,),
        with_it=(SPLIT,),
    ),
    Operator(
        CORE,
        llama=("flash_attention",),
        primitives=(
            "flash_attention.flash_attention",
            "core_attention.flash_attention",
            *(f"{cell}{name}" for cell in ("", "core_attention.") for name in ("softmax", "batch_matmul_q_k")),
        ),
        used_by=(CORE, PROJ),
        starts_from=(QKV, ROTARY),
    ),
    Operator(f"{CORE}.scale_mask_softmax"),  # these two where attention is not fused
    Operator(f"{CORE}.attention_dropout"),
    Operator(PROJ, llama=("wo",), elsewhere=("dense",), primitives=("wo.matmul", "linear_proj.matmul")),
    Operator(
        ATTENTION_ADD,
        primitives=("add",),
        beside=(ATTENTION,),
        used_by=(ATTENTION_ADD, MLP_NORM),
        starts_from=(INPUT, CORE),
        with_it=(PROJ,),
    ),
    Operator(
        MLP_NORM,
        llama=("ffn_norm",),
        elsewhere=("post_attention_layernorm",),
        cells=("ffn_norm", "pre_mlp_layernorm", "post_attention_layernorm"),
        inside=_NORM,
        used_by=(MLP_NORM, FC1),
        starts_from=(ATTENTION_ADD,),
        fused_into=(FC1,),
    ),
    Operator(MLP, llama=("feed_forward",)),
    Operator(
        FC1,
        llama=("w1", "w3", "w_gate_hidden"),  # w_gate_hidden: one matrix for both (ffn_concat)
        elsewhere=("dense_left", "dense_right", "dense_h_to_4h"),
        primitives=("w1.matmul", "w3.matmul", "w_gate_hidden.matmul", "linear_fc1.matmul"),
        used_by=(ACTIVATION,),
        starts_from=(MLP_NORM,),
    ),
    Operator(
        ACTIVATION,
        llama=("mul", "w1.activation"),
        primitives=("mul", "swiglu", "split"),
        cells=("w1.activation", "activate", "activation_func", "activation_func.silu"),
        inside=_ACTIVATION,
        beside=("mlp/", "*.linear_fc1"),
        marker="activation",
        used_by=(ACTIVATION, FC2),
        starts_from=(FC1,),
    ),
    Operator(FC2, llama=("w2",), elsewhere=("dense_4h_to_h",), primitives=("w2.matmul", "linear_fc2.matmul")),
    Operator(MLP_ADD, primitives=("add",), beside=(MLP,)),
)
"""The operators of a dense layer in the order in which they start."""
EXPERTS = (
    Operator(ROUTER),
    Operator("mlp.dispatch"),  # the token dispatcher, which is no module, and its steps
    Operator("mlp.dispatch.preprocess", beside=(ROUTER,)),
    Operator("mlp.dispatch.communicate", beside=(ROUTER,)),
    Operator("mlp.dispatch.postprocess", beside=(ROUTER,)),
    Operator("mlp.experts"),
    Operator("mlp.experts.local_experts"),
)
"""Those of a layer with experts, where sizes depend on how tokens are routed."""
OPERATORS = (
    *DENSE,
    *EXPERTS,
    Operator(f"{CORE}.flash_attention"),  # TransformerEngine's, of which one runs
    Operator(f"{CORE}.fused_attention"),
    Operator(f"{CORE}.unfused_attention"),
    Operator("self_attention.output_gate", beside=(ATTENTION,), unless=LATENT),
    Operator("self_attention.k_layernorm", cells=("k_layernorm",), inside=_NORM),
    Operator("self_attention.linear_q_down_proj", elsewhere=("q2l_proj",)),
    Operator(
        "self_attention.q_layernorm",
        elsewhere=("lq_norm",),
        cells=("lq_norm", "q_layernorm"),
        inside=_NORM,
        fused_into=("self_attention.linear_q_up_proj",),
    ),
    Operator("self_attention.linear_q_up_proj", elsewhere=("l2q_nope_proj", "l2q_pe_proj")),
    Operator(LATENT, elsewhere=("kv2l_k_pe", "kv2l_latent_kv")),
    Operator(
        "self_attention.kv_layernorm",
        elsewhere=("lkv_norm",),
        cells=("lkv_norm", "kv_layernorm"),
        inside=_NORM,
        fused_into=("self_attention.linear_kv_up_proj",),
    ),
    Operator("self_attention.linear_kv_up_proj", elsewhere=("lkv2kv_k_nope", "lkv2kv_v")),
)
"""All that have a name. Others are reached by Megatron's names, too: those of their modules."""
_BY_NAME = {one.name: one for one in OPERATORS}
MARKERS = {one.marker: one.name for one in OPERATORS if one.marker is not None}
"""Megatron's range markers that stand for an operator of another name."""

_ATTENTION, _EXPERTS = r".*attention\.", (r"mlp\.experts\.", r"mlp\.experts\.local_experts\.\d+\.")
MEGATRON_MODULES: dict[str, tuple[str, ...]] = {
    "core_attn": (rf"{_ATTENTION}core_attention",),
    "attn_proj": (rf"{_ATTENTION}linear_proj",),
    "qkv_linear": (rf"{_ATTENTION}(linear_(q|kv|qkv|q_proj|(q|kv)_(down|up)_proj)|(q|k|kv)_layernorm)",),
    "mla_up_proj": (r"self_attention\.linear_(q|q_up|kv_up)_proj",),
    "attn_norm": (INPUT_NORM,),
    "mlp_norm": (MLP_NORM,),
    "layernorm": (INPUT_NORM, MLP_NORM),
    "moe": (r"mlp\.(router|dispatch|experts|shared_experts|fc[12]_latent_proj)",),
    "shared_experts": (r"mlp\.shared_experts",),
    "fused_group_mlp": (r"mlp\.experts",),
    "expert_fc1": tuple(f"{experts}linear_fc1" for experts in _EXPERTS),
    "moe_act": tuple(f"{experts}activation_func" for experts in _EXPERTS),
}
"""Names in Megatron's ``--recompute-modules`` and ``--offload-modules``, and the patterns that each stands for; ``mlp``
is a node here as well. They are names, not to be matched by regular expressions: ``.*norm`` means what it says."""

_KNOWN_PRIMITIVES = frozenset(
    "swiglu matmul batch_matmul batch_matmul_q_k softmax dropout bias_add sub div reshape transpose "
    "split tile expand_dims gather".split()
).union(_NORM, _ROTARY, _ACTIVATION)
_ONE_OF_SEVERAL = re.compile(r"(\w+_)?(reshape|transpose|cast|tile|split|slice|concat|add|mul)(_\w+|\d)?")
_CELLS_WITHOUT_OPERATOR = ("activation", "experts", "shared_experts", "routed_experts", "ffn", "cross_attention")
_KNOWN_CELLS = frozenset(
    part
    for path in itertools.chain(
        *((one.name, *one.llama, *one.elsewhere) for one in OPERATORS if one.llama or one.elsewhere),
        *(one.cells for one in OPERATORS),
        _CELLS_WITHOUT_OPERATOR,
    )
    for part in path.split(".")
)


class Match(NamedTuple):
    """A node that a pattern matched."""

    shown: str
    """Its name in the vocabulary the pattern matched; Megatron's if it matched in both."""
    operators: frozenset[str]
    """The operators selected: this node and all below it, in Megatron's names."""
    node: str
    """Its name in Megatron's vocabulary."""


def split_pattern(pattern: str) -> list[str]:
    r"""The parts of a pattern, which ``\.`` joins; a plain ``.`` stays what it is in regular expressions."""
    return pattern.split(r"\.")


def pattern_error(pattern: str) -> str | None:
    """Why a pattern cannot be used, or None."""
    for part in split_pattern(pattern):
        if not part:
            return "a part is empty"
        try:
            re.compile(part)
        except re.error as error:
            return f"{part!r} is not a regular expression: {error}"
    return None


def within(op: str, around: str) -> bool:
    """Whether an operator is below another one; all but itself are below ``""``, the layer."""
    return op != around and (not around or op.startswith(around + "."))


def _in_any_vocabulary(parts: Sequence[str], last: Sequence[str]) -> list[str]:
    """Every path whose parents carry any of their names, and whose end is one of `last`."""
    known = (_BY_NAME.get(part, Operator(part)) for part in parts)
    parents = ((one.name, *one.llama, *one.elsewhere) for one in known)
    return [".".join(path) for path in itertools.product(*parents, last)]


def _in_llama(parts: Sequence[str], last: Sequence[str]) -> list[str]:
    """The same with Llama names for those parents that have any."""
    parents = (_BY_NAME.get(part, Operator(part)).llama or (part,) for part in parts)
    return [".".join(path) for path in itertools.product(*parents, last)]


@lru_cache(maxsize=4096)
def llama_names(node: str) -> tuple[str, ...]:
    """A node's Llama names, if it has others than Megatron's; parts without one keep that, so experts have names."""
    *parents, last = node.split(".")
    own = _BY_NAME[last].llama if last in _BY_NAME else ()
    return tuple(name for name in dict.fromkeys(_in_llama(parents, own or (last,))) if name != node)


@lru_cache(maxsize=4096)
def module_names(node: str) -> tuple[str, ...]:
    """A node's Megatron name, then its Llama names, then those of MindFormers' other models."""
    *parents, last = node.split(".")
    one = _BY_NAME.get(last, Operator(last))
    others = (last, *one.llama, *one.elsewhere)
    return tuple(dict.fromkeys([node, *llama_names(node), *_in_any_vocabulary(parents, others)]))


@lru_cache(maxsize=4096)
def primitive_names(node: str) -> tuple[str, ...]:
    """What MindFormers calls the primitives in a node."""
    *parents, last = node.split(".")
    one = _BY_NAME.get(last, Operator(last))
    found = (*one.primitives, *(f"{cell}.{name}" for cell in one.cells for name in one.inside))
    return tuple(dict.fromkeys([*_in_llama(parents, found), *_in_any_vocabulary(parents, found)]))


def names_a_primitive(pattern: str) -> bool:
    """Whether MindFormers may have such a primitive in some model: not a typo, even if no operator here contains it."""
    *cells, last = split_pattern(pattern)
    known = _ONE_OF_SEVERAL.fullmatch(last) or any(re.fullmatch(last, name) for name in _KNOWN_PRIMITIVES)
    return bool(
        known
        and not re.fullmatch(last, "_")
        and all(any(re.fullmatch(cell, name) for name in _KNOWN_CELLS) for cell in cells)
    )


def nodes_of(operators: Collection[str]) -> dict[str, frozenset[str]]:
    """Each node of a layer with the operators at and below it; in the order given, or sorted if that has no order."""
    below: dict[str, set[str]] = {}
    for operator in operators if isinstance(operators, Sequence | dict) else sorted(operators):
        parts = operator.split(".") if operator else []
        for depth in range(1, len(parts) + 1):
            below.setdefault(".".join(parts[:depth]), set()).add(operator)
    return {node: frozenset(found) for node, found in below.items()}


def _fits(parts: Sequence[str], name: str) -> bool:
    children = name.split(".")
    return len(parts) == len(children) and all(map(re.fullmatch, parts, children))


def match(pattern: str, operators: Collection[str]) -> list[Match]:
    """The nodes among `operators` (one layer's, in Megatron's names) that `pattern` matches in any vocabulary.

    Whether an operator is selected does not depend on the others.

    Raises:
        re.error: a part of the pattern is no regular expression; `pattern_error` says so beforehand.
    """
    patterns = [split_pattern(one) for one in MEGATRON_MODULES.get(pattern, (pattern,))]
    # Primitives have to be named: a wildcard for modules must not reach norms or linears one level too deep.
    by_primitive = re.fullmatch(patterns[0][-1], "_") is None
    found = []
    for node, selected in nodes_of(operators).items():
        names = (*module_names(node), *(primitive_names(node) if by_primitive else ()))
        shown = next((name for name in names if any(_fits(parts, name) for parts in patterns)), None)
        if shown is not None:
            found.append(Match(shown, selected, node))
    return found


def fused(pattern: str, operators: Collection[str]) -> list[str]:
    """The nodes among `operators` that contain what `pattern` names, and that is no node of its own there."""
    nodes = nodes_of(operators)
    inside = {one.path: one.fused_into for one in OPERATORS if one.fused_into and one.path not in nodes}
    named = (one.node for one in match(pattern, tuple(inside)))
    return [node for path in named for node in inside.get(path, ()) if node in nodes]


def selects(pattern: str, operator: str) -> bool:
    """Whether `pattern` matches the operator or anything that contains it."""
    return bool(match(pattern, (operator,)))


def with_inline(operators: Collection[str]) -> tuple[str, ...]:
    """The operators of a layer (its modules), and those known to run inside them without being modules."""
    nodes = nodes_of(operators)
    inline: list[str] = []
    for one in OPERATORS:
        for where in one.beside if one.unless not in nodes else ():
            if where.startswith("*"):
                beside = where[1:]
                inline += [f"{node.removesuffix(beside)}.{one.name}" for node in nodes if node.endswith(beside)]
            elif where.removesuffix("/") in nodes:
                module = where.removesuffix("/")
                if module == where or not any(within(node, module) for node in nodes):
                    inline.append(one.path)
    ordered = operators if isinstance(operators, Sequence | dict) else sorted(operators)
    return tuple(dict.fromkeys([*ordered, *inline]))


def elsewhere(pattern: str, operators: Collection[str], count: int = 3) -> list[str]:
    r"""Where `pattern` would match in other parents or, without regard to case, as patterns (with ``\.``)."""
    parts = split_pattern(pattern)[::-1]
    found = []
    for node in nodes_of(operators):
        ends = node.split(".")[::-1][: len(parts)]
        if len(ends) == len(parts) and all(
            re.fullmatch(*pair, re.IGNORECASE) for pair in zip(parts, ends, strict=True)
        ):
            found.append(node.replace(".", r"\."))
    return found[:count]


def near_patterns(pattern: str, operators: Collection[str], count: int = 3) -> list[str]:
    r"""Names that `pattern` may have been meant to be, as patterns (with ``\.``), the likeliest first."""
    known: dict[str, None] = {}
    for node in nodes_of(operators):
        known.update(dict.fromkeys(module_names(node)))
    plain = ".".join(split_pattern(pattern))
    near = difflib.get_close_matches(plain, known, n=count, cutoff=0.5)
    return [name.replace(".", r"\.") for name in near] or elsewhere(pattern, operators, count)
