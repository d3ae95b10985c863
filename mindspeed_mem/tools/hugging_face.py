"""A model's config.json on Hugging Face as Megatron's options; read as plain JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mindspeed_mem.command_line import LARGEST, LAYERS, shortened

_LLAMA = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "vocab_size": "vocab_size",
    "attention_dropout": "attention_dropout",
}
"""Megatron's options with the fields that say them."""
_STYLE: dict[str, object] = {
    **{"swiglu": True, "disable_bias_linear": True, "normalization": "RMSNorm", "position_embedding_type": "rope"},
    **{"attention_dropout": "0", "hidden_dropout": "0"},
}
_ROUTED = {"moe_router_topk": "num_experts_per_tok"}
_QWEN = {**_ROUTED, "num_experts": "num_experts", "moe_ffn_hidden_size": "moe_intermediate_size"}
_QWEN["moe_shared_expert_intermediate_size"] = "shared_expert_intermediate_size"
_DEEPSEEK = {
    **_ROUTED,
    "num_experts": "n_routed_experts",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "mtp_num_layers": "num_nextn_predict_layers",
}
_GPT2 = {
    "num_layers": "n_layer",
    "hidden_size": "n_embd",
    "ffn_hidden_size": "n_inner",
    "num_attention_heads": "n_head",
    "vocab_size": "vocab_size",
    "attention_dropout": "attn_pdrop",
    "hidden_dropout": "resid_pdrop",
}
_MIXTRAL = {**_ROUTED, "num_experts": "num_local_experts", "moe_ffn_hidden_size": "intermediate_size"}
FAMILIES: dict[str, Mapping[str, str]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "mixtral": _LLAMA | _MIXTRAL,
    "qwen2_moe": _LLAMA | _QWEN,
    "qwen3_moe": _LLAMA | _QWEN,
    "deepseek_v2": _LLAMA | _DEEPSEEK,
    "deepseek_v3": _LLAMA | _DEEPSEEK,
    "gpt2": _GPT2,
}
"""Each model_type with where its sizes stand."""
_NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
_UNCOUNTED = (
    *("index_topk", "cross_attention_layers", "add_cross_attention", "num_kv_shared_layers", "mlp_layer_types"),
    *(
        "moe_latent_size",
        "text_config",
        "vision_config",
        "attn_output_gate",
        "linear_num_value_heads",
        "is_encoder_decoder",
    ),
)
"""Fields that stand for parts which are not known here, wherever they are set."""
_KNOWN_LAYERS = ("full_attention", "sliding_attention")
_SHARES = ("attention_dropout", "hidden_dropout")
_OR_NONE = (
    *("num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    *("q_lora_rank", "mtp_num_layers"),
)
"""Options of which 0 says that there are none."""
_BESIDE = {
    **{"sliding_window": 0, "n_shared_experts": 0, "moe_intermediate_size": 0, "first_k_dense_replace": 0},
    **{"decoder_sparse_step": 1, "moe_layer_freq": 1},
}
"""Whole numbers that no option says as they are, with the least they may be."""
_LISTS: dict[str, tuple[type, str]] = {"layer_types": (str, "texts"), "mlp_only_layers": (int, "whole numbers")}


def in_folder(path: str) -> Path:
    """The file that is read for `path`, the file or its folder."""
    return Path(path) / "config.json" if Path(path).is_dir() else Path(path)


def options(path: str, wrong: list[str]) -> dict[str, object]:
    """Megatron's options for it; `path` is the file or its folder. What is not known is named in `wrong`."""
    file = in_folder(path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        wrong.append(f"--hf-config {file}: cannot be read ({error.strerror})")
        return {}
    except (ValueError, RecursionError) as error:
        wrong.append(f"--hf-config {file}: is not JSON ({error})")
        return {}
    family = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(family, str) or family not in FAMILIES:
        wrong.append(f"--hf-config {file}: model_type {family!r} is not known; known are {', '.join(FAMILIES)}")
        return {}
    problems = [f"{name} {config[name]!r} stands for what is not known" for name in _UNCOUNTED if config.get(name)]
    said = {name: config[field] for name, field in FAMILIES[family].items() if config.get(field) is not None}
    problems += [f"{FAMILIES[family][name]}: missing" for name in _NEEDED if name not in said]
    problems += _unusable(config, family, said)
    found: dict[str, object] = ({} if family == "gpt2" else dict(_STYLE)) | said
    wrong += [f"--hf-config {file}: {text}" for text in problems]
    if problems:
        return {}
    found["untie_embeddings_and_output_weights"] = not config.get("tie_word_embeddings", family == "gpt2")
    if family == "qwen3" or family == "qwen3_moe":
        found["qk_layernorm"] = True
    window, kinds = config.get("sliding_window"), config.get("layer_types") or ["sliding_attention"]
    if window and config.get("use_sliding_window", True) and set(kinds) == {"sliding_attention"}:
        found["window_size"] = f"{window - 1},0"
    if family.startswith("deepseek"):
        found |= _of_deepseek(config)
    return {name: value for name, value in (found | _of_experts(config, found)).items() if value or name in _STYLE}


def _unusable(config: Mapping[str, Any], family: str, said: Mapping[str, object]) -> Iterator[str]:
    """What is wrong with fields that are read. `said`: those of options."""
    for name, value in said.items():
        if name in _SHARES:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
                yield _got(FAMILIES[family][name], value, "a number of at least 0, below 1")
        else:
            least, most = int(name not in _OR_NONE), LAYERS if name == "num_layers" else LARGEST
            yield from _outside(FAMILIES[family][name], value, least, most)
    for field, least in _BESIDE.items():
        value = config.get(field)
        if value is not None and value is not False and field not in FAMILIES[family].values():
            yield from _outside(field, value, least, LARGEST)
    for field, (kind, what) in _LISTS.items():
        value = config.get(field)
        if value and not (isinstance(value, list) and all(type(one) is kind for one in value)):
            yield _got(field, value, f"a list of {what}")
        elif value and field == "layer_types":
            yield from (f"layer_types: {name!r} is not known" for name in sorted({*value}.difference(_KNOWN_LAYERS)))


def _outside(field: str, value: object, least: int, most: int) -> Iterator[str]:
    if type(value) is not int or not least <= value <= most:
        yield _got(field, value, f"a whole number from {least} to {most}")


def _got(field: str, value: object, allowed: str) -> str:
    return f"{field}: got {shortened(repr(value))}; allowed: {allowed}"


def _of_deepseek(config: Mapping[str, Any]) -> dict[str, object]:
    shared = (config.get("n_shared_experts") or 0) * (config.get("moe_intermediate_size") or 0)
    return {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "num_query_groups": None,
        "kv_channels": None,
        "moe_shared_expert_intermediate_size": shared,
    }


def _of_experts(config: Mapping[str, Any], found: Mapping[str, object]) -> dict[str, object]:
    """Which layers have experts."""
    if not found.get("num_experts"):
        return {}
    layers = int(str(found["num_layers"]))
    each = config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1
    dense = set(config.get("mlp_only_layers") or ()) | set(range(min(layers, config.get("first_k_dense_replace") or 0)))
    # Qwen counts from 1, DeepSeek from 0.
    first = 1 if "decoder_sparse_step" in config else 0
    which = [int(layer not in dense and (layer + first) % each == 0) for layer in range(layers)]
    return {"moe_layer_freq": str(which)}
