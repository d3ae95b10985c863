"""A Megatron command line, or a part of one: its options by name, as text."""

from __future__ import annotations

import argparse
import ast
import shlex
from collections.abc import Mapping
from typing import Any, NoReturn

from mindspeed_mem.adaptive.layout import ends
from mindspeed_mem.command_line import LAYERS, digits, flag, quoted

_UNCOUNTED = (
    *("moe_latent_size", "moe_expert_capacity_factor", "heterogeneous_layers_config_path", "hybrid_override_pattern"),
    *("experimental_attention_variant", "fp4_format", "optimizer_cpu_offload", "squared_relu"),
    *("pipeline_model_parallel_layout", "use_megatron_fsdp", "use_torch_fsdp2", "attention_output_gate"),
)
"""Options that change what a rank holds in ways that nobody here has counted."""
_VALUES = {
    "attention_backend": {"auto": "flash", "fused": "flash", "local": "unfused"},
    "position_embedding_type": {"yarn": "rope"},
}
"""Values that mean for memory what others do."""
_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_VIRTUAL = "num_virtual_stages_per_pipeline_rank"


class Parser(argparse.ArgumentParser):
    """One whose errors are ValueErrors."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def read(self, text: str) -> argparse.Namespace:
        """What of a command line is known; raises ValueError where it cannot be read."""
        return self.parse_known_args(shlex.split(text))[0]


def options(
    text: str,
    tables: tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]],
    wrong: list[str],
) -> dict[str, object]:
    """Those of `plan`'s own options that stand in it, with Megatron's default where that is another than ours.

    Args:
        text: the command line; what is about no memory, or about recomputing and offloading, is skipped.
        tables: `plan`'s options that are numbers, switches, choices and texts.
        wrong: gets a line for each option that changes memory in a way that is not known.
    """
    numbers, switches, choices, texts = tables
    parser = Parser()
    parser.add_argument("--optimizer")
    for name in (*_ENDS, _VIRTUAL):
        parser.add_argument(flag(name))
    for name in (*numbers, *choices, *texts):
        parser.add_argument(flag(name))
    for name in (*switches, *_COUNTED, "bf16", "fp16"):
        parser.add_argument(flag(name), action="store_true", default=None)
    for name in _UNCOUNTED:
        parser.add_argument(flag(name), nargs="?", const=True)
    try:
        given = vars(parser.read(text))
    except ValueError as error:
        wrong.append(f"--megatron: {error}")
        return {}
    found = {name: value for name, value in given.items() if value is not None}
    uncounted = [flag(name) for name in _UNCOUNTED if found.pop(name, None) is not None]
    wrong += [f"--megatron {name}: what that changes in memory is not known here" for name in uncounted]
    if not found.get("group_query_attention"):
        found.pop("num_query_groups", None)  # Megatron does not hear it either
    types = [name for name in ("bf16", "fp16") if found.pop(name, None)]
    if not types:
        wrong.append("--megatron: without --bf16 or --fp16 it trains in fp32, and figures here are for 2 bytes")
    elif types == ["fp16"]:
        found["grad_reduce_in_bf16"] = True  # as small as those
    if found.pop("optimizer", "adam") != "adam":
        wrong.append(f"--megatron --optimizer {given['optimizer']}: only the states of adam are known")
    for name, values in _VALUES.items():
        if name in found:
            found[name] = values.get(found[name], found[name])
    stages = _stages(found, wrong)
    return {"transformer_impl": "transformer_engine", **found, **stages}


def _stages(found: dict[str, Any], wrong: list[str]) -> dict[str, object]:
    """How layers are split over stages in `plan`'s words; what Megatron says it in is taken out of `found`."""
    asked = {name: found.pop(name, None) for name in (*_ENDS, *_COUNTED, _VIRTUAL)}
    first, last, embedding, loss, virtual = asked.values()
    said = " ".join(flag(name) for name, value in asked.items() if value)
    each = found.get("num_layers_per_virtual_pipeline_stage")
    sizes = [found.get("num_layers"), found.get("pipeline_model_parallel_size", "1")]
    texts = [text for text in (virtual, first, last, each, *sizes) if text is not None]
    if None in sizes or not all(0 < (digits(text) or 0) <= LAYERS for text in texts):
        if said:
            what = f"whole numbers from 1 to {LAYERS}"
            wrong.append(f"--megatron {said}: needs --num-layers on the same line, and {what}")
        return {}  # others are said where they are read
    layers, pipeline = map(int, sizes)
    embedding, loss = (bool(one) and pipeline > 1 for one in (embedding, loss))  # they change nothing on one stage
    if not (first or last or embedding or loss):
        return {} if virtual is None else {"num_layers_per_virtual_pipeline_stage": layers // (pipeline * int(virtual))}
    parts, left = int(virtual or 1), 0
    if each is not None:
        of_stage, left = divmod(layers + embedding + loss, pipeline)
        parts, more = divmod(of_stage, int(found.pop("num_layers_per_virtual_pipeline_stage")))
        left += more
    counts: tuple[int, ...] = ()
    if (first or last) and not (embedding or loss) and each is None:
        counts = _between(layers, pipeline, parts, first and int(first), last and int(last))
    elif not (first or last) and parts and not left:
        counts = ends.counted(layers, pipeline, parts, embedding, loss)
    if not counts:
        wrong.append(
            f"--megatron {said}: {layers} layers on {pipeline} pipeline stages of {parts} parts cannot be split so "
            "that each part has a layer; change the number of layers, stages, or virtual stages"
        )
        return {}
    return {"pipeline_stages": ",".join(map(str, counts))}


def _between(layers: int, stages: int, parts: int, first: int | None, last: int | None) -> tuple[int, ...]:
    """Layers of each part, where the first stage or the last has its own number of them; empty: that cannot be."""
    inner, rest = stages - (first is not None) - (last is not None), layers - (first or 0) - (last or 0)
    if inner == 0 and parts > 1:
        return ()  # megatron-core fails on both with virtual stages
    each, left = divmod(rest, max(inner, 1))
    return () if left else ends.by_stage(layers, stages, parts, ends.Ends(first or each, last or each))


def with_experts(text: str | None, layers: int | None, wrong: list[str]) -> list[bool]:
    """For each layer whether ``--moe-layer-freq`` gives it experts; for one layer where all are alike."""
    try:
        pattern = _value(ast.parse(text or "1", mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        pattern = None
    if pattern is None or pattern == 0:
        what = f"a number of at least 1, or a list of at most {LAYERS} layers such as '[0]*3+[1]*5'"
        wrong.append(f"--moe-layer-freq takes {what}, not {quoted(text or '')}")
        return [True, False]
    if isinstance(pattern, list):
        if layers is not None and len(pattern) != layers:
            wrong.append(f"--moe-layer-freq {text} is about {len(pattern)} layers, and --num-layers {layers}")
        return [bool(experts) for experts in pattern]
    if pattern > 1 and layers is None:
        wrong.append("--num-layers: missing; which layers have experts depends on it")
    return [layer % pattern == 0 for layer in range((layers or 2) if pattern > 1 else 1)]


def _value(node: ast.expr) -> Any:
    """What an expression of numbers and lists is, as in ``([1]*3+[0])*2``."""
    match node:
        case ast.Constant(value=int(value)) if value <= LAYERS:
            return value
        case ast.List(elts=items):
            return [_value(item) for item in items]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            one, other = _value(left), _value(right)
            if _size(one) + _size(other) <= LAYERS:
                return one + other
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            one, other = _value(left), _value(right)
            if _size(one) * _size(other) <= LAYERS:
                return one * other
    raise TypeError(node)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, list) else value
