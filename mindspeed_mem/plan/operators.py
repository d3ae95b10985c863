r"""Names of the operators in a transformer layer, and the patterns that select them.

An operator is a path below its layer, in Megatron's names (``self_attention.linear_qkv``). The nodes of a layer are
its operators and everything that contains one. MindFormers' names are other names for the same nodes: the tree is
always Megatron's, so ``feed_forward\.w1\.activation`` is ``mlp.activation_func`` and not a part of ``mlp.linear_fc1``.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

# What MindFormers' Llama layer calls the modules that Megatron calls by the key. The first names are the usual ones.
_LLAMA: dict[str, tuple[str, ...]] = {
    "input_layernorm": ("attention_norm",),
    "self_attention": ("attention",),
    "linear_qkv": ("wq", "wk", "wv", "w_qkv", "w"),  # w_qkv, w: one matrix for all three (qkv_concat)
    "rotary_pos_emb": ("apply_rotary_emb",),
    "core_attention": ("flash_attention",),
    "linear_proj": ("wo",),
    "pre_mlp_layernorm": ("ffn_norm",),
    "mlp": ("feed_forward",),
    "linear_fc1": ("w1", "w3", "w_gate_hidden"),  # w_gate_hidden: one matrix for both (ffn_concat)
    "activation_func": ("mul", "w1.activation"),
    "linear_fc2": ("w2",),
}
# The same in MindFormers' other models: GLM, TeleChat, DeepSeek.
_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "linear_qkv": ("query_key_value", "wk_v"),
    "rotary_pos_emb": ("apply_rotary_pos_emb",),
    "linear_proj": ("dense",),
    "pre_mlp_layernorm": ("post_attention_layernorm",),
    "linear_fc1": ("dense_left", "dense_right", "dense_h_to_4h"),
    "linear_fc2": ("dense_4h_to_h",),
    "linear_q_down_proj": ("q2l_proj",),
    "q_layernorm": ("lq_norm",),
    "linear_q_up_proj": ("l2q_nope_proj", "l2q_pe_proj"),
    "linear_kv_down_proj": ("kv2l_k_pe", "kv2l_latent_kv"),
    "kv_layernorm": ("lkv_norm",),
    "linear_kv_up_proj": ("lkv2kv_k_nope", "lkv2kv_v"),
}
# MindFormers goes one step further down, to primitives; here they are further names of the operator around them, where
# running that again costs no more than the primitive is worth: not a whole product of matrices for a reshape behind it.
_PRIMITIVES: dict[str, tuple[str, ...]] = {
    "linear_qkv": ("wq.matmul", "wk.matmul", "wv.matmul", "w_qkv.matmul", "linear_qkv.matmul"),
    "qkv": ("split_qkv",),
    "core_attention": (
        "flash_attention.flash_attention",
        "core_attention.flash_attention",
        *(f"{cell}{name}" for cell in ("", "core_attention.") for name in ("softmax", "batch_matmul_q_k")),
    ),
    "linear_proj": ("wo.matmul", "linear_proj.matmul"),
    "self_attn_bda": ("add",),
    "linear_fc1": ("w1.matmul", "w3.matmul", "w_gate_hidden.matmul", "linear_fc1.matmul"),
    "activation_func": ("mul", "swiglu", "split"),
    "linear_fc2": ("w2.matmul", "linear_fc2.matmul"),
    "mlp_bda": ("add",),
}
_NORM = ("norm", "layer_norm", "rms_norm", "square", "mean", "rsqrt", "mul2", "cast", "rcast")
_ROTARY = ("mul", "mul_inc", "add", "neg", "bmm_swap", "slice", "concat", "cast", "reshape", "transpose")
_ACTIVATION = ("silu", "gelu", "relu", "sigmoid", "mul", "cast")
# Cells of MindFormers that are one operator here, and their primitives.
_CELLS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "input_layernorm": (("attention_norm", "input_layernorm"), _NORM),
    "rotary_pos_emb": (("apply_rotary_emb", "apply_rotary_pos_emb"), _ROTARY),
    "q_layernorm": (("lq_norm", "q_layernorm"), _NORM),
    "k_layernorm": (("k_layernorm",), _NORM),
    "kv_layernorm": (("lkv_norm", "kv_layernorm"), _NORM),
    "pre_mlp_layernorm": (("ffn_norm", "pre_mlp_layernorm", "post_attention_layernorm"), _NORM),
    "activation_func": (("w1.activation", "activate", "activation_func", "activation_func.silu"), _ACTIVATION),
}
_KNOWN_PRIMITIVES = frozenset(
    "swiglu matmul batch_matmul batch_matmul_q_k softmax dropout bias_add sub div reshape transpose "
    "split tile expand_dims gather".split()
).union(_NORM, _ROTARY, _ACTIVATION)
_ONE_OF_SEVERAL = re.compile(r"(\w+_)?(reshape|transpose|cast|tile|split|slice|concat|add|mul)(_\w+|\d)?")
_CELLS_WITHOUT_OPERATOR = ("activation", "experts", "shared_experts", "routed_experts", "ffn", "cross_attention")

_ATTENTION_INLINE = ("qkv", "rotary_pos_emb", "output_gate")
_DISPATCH_INLINE = ("preprocess", "communicate", "postprocess")


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


def _renamed(parts: Sequence[str], last: Sequence[str], *names: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Every path whose parents carry a name out of ``names``, where they have one, and whose end is one of `last`."""
    parents = (sum((more.get(part, ()) for more in names), ()) or (part,) for part in parts)
    return [".".join(path) for path in itertools.product(*parents, last)]


def _in_any_vocabulary(parts: Sequence[str], last: Sequence[str]) -> list[str]:
    return _renamed(parts, last, {part: (part,) for part in parts}, _LLAMA, _ELSEWHERE)


@lru_cache(maxsize=4096)
def llama_names(node: str) -> tuple[str, ...]:
    """A node's Llama names, if it has others than Megatron's; parts without one keep that, so experts have names."""
    *parents, last = node.split(".")
    names = _renamed(parents, _LLAMA.get(last, (last,)), _LLAMA)
    return tuple(name for name in dict.fromkeys(names) if name != node)


@lru_cache(maxsize=4096)
def module_names(node: str) -> tuple[str, ...]:
    """A node's Megatron name, then its Llama names, then those of MindFormers' other models."""
    *parents, last = node.split(".")
    others = (last, *_LLAMA.get(last, ()), *_ELSEWHERE.get(last, ()))
    return tuple(dict.fromkeys([node, *llama_names(node), *_in_any_vocabulary(parents, others)]))


@lru_cache(maxsize=4096)
def primitive_names(node: str) -> tuple[str, ...]:
    """What MindFormers calls the primitives in a node."""
    *parents, last = node.split(".")
    cells, inside = _CELLS.get(last, ((), ()))
    found = (*_PRIMITIVES.get(last, ()), *(f"{cell}.{name}" for cell in cells for name in inside))
    return tuple(dict.fromkeys([*_renamed(parents, found, _LLAMA), *_in_any_vocabulary(parents, found)]))


_KNOWN_CELLS = frozenset(
    part
    for path in itertools.chain(
        *((name, *others) for table in (_LLAMA, _ELSEWHERE) for name, others in table.items()),
        *(cells for cells, _ in _CELLS.values()),
        _CELLS_WITHOUT_OPERATOR,
    )
    for part in path.split(".")
)


def names_a_primitive(pattern: str) -> bool:
    """Whether MindFormers may have such a primitive in some model: not a typo, even if no operator here contains it."""
    *cells, last = split_pattern(pattern)
    known = _ONE_OF_SEVERAL.fullmatch(last) or any(re.fullmatch(last, name) for name in _KNOWN_PRIMITIVES)
    return bool(
        known
        and not re.fullmatch(last, "_")
        and all(any(re.fullmatch(cell, name) for name in _KNOWN_CELLS) for cell in cells)
    )


def both_names(operator: str) -> tuple[str, tuple[str, ...]]:
    """An operator's Megatron name, and the names of MindFormers' Llama modules for it (none if it has no other)."""
    return operator, llama_names(operator)


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
    """The nodes among `operators` (one layer's, in Megatron's names) that `pattern` matches in either vocabulary.

    Whether an operator is selected does not depend on the others.

    Raises:
        re.error: a part of the pattern is no regular expression; `pattern_error` says so beforehand.
    """
    parts = split_pattern(pattern)
    # Primitives have to be named: a wildcard for modules must not reach norms or linears one level too deep.
    by_primitive = re.fullmatch(parts[-1], "_") is None
    found = []
    for node, selected in nodes_of(operators).items():
        names = (*module_names(node), *(primitive_names(node) if by_primitive else ()))
        shown = next((name for name in names if _fits(parts, name)), None)
        if shown is not None:
            found.append(Match(shown, selected, node))
    return found


def selects(pattern: str, operator: str) -> bool:
    """Whether `pattern` matches the operator or anything that contains it."""
    return bool(match(pattern, (operator,)))


def with_inline(operators: Collection[str]) -> tuple[str, ...]:
    """The operators of a layer (its modules), and those known to run inside them without being modules."""
    nodes = nodes_of(operators)
    inline: list[str] = []
    if "self_attention" in nodes:
        inline.append("self_attn_bda")
        if "self_attention.linear_kv_down_proj" not in nodes:  # MLA's forward has no such ranges
            inline += [f"self_attention.{name}" for name in _ATTENTION_INLINE]
    if "mlp" in nodes:
        inline.append("mlp_bda")
        if not any(node.startswith("mlp.") for node in nodes):
            inline.append("mlp.activation_func")
    if "mlp.router" in nodes:  # the steps of the token dispatcher, which is no module
        inline += [f"mlp.dispatch.{name}" for name in _DISPATCH_INLINE]
    inline += [f"{node[: -len('.linear_fc1')]}.activation_func" for node in nodes if node.endswith(".linear_fc1")]
    ordered = operators if isinstance(operators, Sequence | dict) else sorted(operators)
    return tuple(dict.fromkeys([*ordered, *inline]))


def near_patterns(pattern: str, operators: Collection[str], count: int = 3) -> list[str]:
    r"""Names that `pattern` may have been meant to be, as patterns (with ``\.``), the likeliest first."""
    known: dict[str, None] = {}
    for node in nodes_of(operators):
        known.update(dict.fromkeys(module_names(node)))
    plain = ".".join(split_pattern(pattern))
    near = difflib.get_close_matches(plain, known, n=count, cutoff=0.5)
    return [name.replace(".", r"\.") for name in near]
