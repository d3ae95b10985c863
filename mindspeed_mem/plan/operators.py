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
# MindFormers goes one step further down, to primitives; here they are further names of the operator around them.
_LLAMA_PRIMITIVES: dict[str, tuple[str, ...]] = {
    "input_layernorm": ("attention_norm.norm",),
    "linear_qkv": ("wq.matmul", "wk.matmul", "wv.matmul"),
    "core_attention": ("flash_attention.flash_attention",),
    "linear_proj": ("wo.matmul",),
    "pre_mlp_layernorm": ("ffn_norm.norm",),
    "linear_fc1": ("w1.matmul", "w3.matmul"),
    "activation_func": ("w1.activation.silu",),
    "linear_fc2": ("w2.matmul",),
}
# MindFormers' newer models take Megatron's module names, but keep their own for the primitives.
_MEGATRON_LIKE_PRIMITIVES: dict[str, tuple[str, ...]] = {
    "core_attention": ("core_attention.flash_attention",),
    "activation_func": ("mul", "activation_func.silu"),
}

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


def _renamed(parts: Sequence[str], last: Sequence[str]) -> list[str]:
    """Every path whose parents carry a Llama name, where they have one, and whose end is one of `last`."""
    parents = (_LLAMA.get(part, (part,)) for part in parts)
    return [".".join(path) for path in itertools.product(*parents, last)]


@lru_cache(maxsize=4096)
def module_names(node: str) -> tuple[str, ...]:
    """A node's Megatron name, then its Llama names; parts without one keep Megatron's, so experts have names too."""
    *parents, last = node.split(".")
    return tuple(dict.fromkeys([node, *_renamed(parents, _LLAMA.get(last, (last,)))]))


@lru_cache(maxsize=4096)
def primitive_names(node: str) -> tuple[str, ...]:
    """What MindFormers calls the primitives in a node, in its Llama and in its Megatron-like models."""
    *parents, last = node.split(".")
    own = [".".join([*parents, name]) for name in _MEGATRON_LIKE_PRIMITIVES.get(last, ())]
    return (*_renamed(parents, _LLAMA_PRIMITIVES.get(last, ())), *own)


def both_names(operator: str) -> tuple[str, tuple[str, ...]]:
    """An operator's Megatron name, and the names of MindFormers' Llama modules for it (none if it has no other)."""
    return operator, module_names(operator)[1:]


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
