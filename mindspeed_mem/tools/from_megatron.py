"""A Megatron command line's recompute and offload flags as a memory plan: what they do, said in our words.

Megatron's offload moves what a module saves for its backward: ``activations: saved`` here. Its names of modules are
names of ours (`MEGATRON_MODULES`), but for those of experts, which it tells from a dense layer's ``mlp``.
"""

from __future__ import annotations

import argparse
from typing import Any

from mindspeed_mem.command_line import LAYERS, flag, number, whole
from mindspeed_mem.plan.operators import MEGATRON_MODULES
from mindspeed_mem.tools.megatron_line import Parser, with_experts

_RECOMPUTED = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out")
_OFFLOADED = (
    *("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act", "fused_group_mlp"),
)
_WITHOUT_EQUAL = {
    "mla_up_proj": "the rotated queries and keys are not made again; --select-recompute mla_up_proj frees the rest",
    "gdn_norm_out": "a gated delta net has no names here",
}
_INPUTS = {"core_attn": {"core_attn"}, "moe_act": {"moe_act"}, "layernorm": {"attn_norm", "mlp_norm"}}
"""What recomputed modules start from, by the names of what is offloaded."""
_SWITCHES = {
    "recompute_activations": None,
    "moe_layer_recompute": None,
    "fine_grained_activation_offloading": None,
    "distribute_saved_activations": "what is kept is not split over ranks; --sequence-parallel does that",
    "delay_offload_until_cuda_graph": "nothing is moved out of a CUDA graph",
}
_SIZES = (
    *("num_layers", "pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"),
    *("num_virtual_stages_per_pipeline_rank", "recompute_num_layers", "cpu_offloading_num_layers", "num_experts"),
)
_TEXTS = ("recompute_granularity", "recompute_method", "moe_layer_freq")
_AMOUNTS = {"min_offloaded_tensor_size": 2.0**20, "activation_offload_fraction": 1.0}
_AMOUNTS["delta_offload_bytes_across_pp_ranks"] = 0.0
_MOST_BYTES = 2.0**60
_LAYOUTS = (
    *("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)


def read(text: str, wrong: list[str]) -> dict[str, dict[str, Any]]:
    """The sections of the file for ``--memory-config`` that is equal to these flags of Megatron.

    Args:
        text: a Megatron command line, or a part of one; what is about neither layers nor activations is skipped.
        wrong: gets a line for each flag that no plan is equal to, or that cannot be read.
    """
    parser = Parser()
    for name in (*_SIZES, *_TEXTS, *_AMOUNTS):
        parser.add_argument(flag(name))
    for name in _SWITCHES:
        parser.add_argument(flag(name), action="store_true")
    for name in _LAYOUTS:
        parser.add_argument(flag(name), nargs="?", const=True)
    for name in ("recompute_modules", "offload_modules"):
        parser.add_argument(flag(name), nargs="*")
    try:
        given = parser.read(text)
    except ValueError as error:
        wrong.append(str(error))
        return {}
    wrong += [f"{flag(name)}: {why}" for name, why in _SWITCHES.items() if why and getattr(given, name)]
    sizes = {name: whole(flag(name), getattr(given, name), wrong, most=LAYERS) for name in _SIZES}
    recompute, recomputed = _recompute(given, sizes, wrong)
    swap = _swap(given, sizes, recomputed, wrong)
    if not (recompute or swap or wrong):
        wrong.append("nothing in it recomputes or offloads activations")
    return {"swap_config": {"swap": True, "op_swap": []} | swap} | (
        {"recompute_config": recompute} if recompute else {}
    )


def _recompute(
    given: argparse.Namespace, sizes: dict[str, int | None], wrong: list[str]
) -> tuple[dict[str, Any], set[str]]:
    """The section, and the modules that it is about, in Megatron's names."""
    granularity = "selective" if given.recompute_activations else given.recompute_granularity
    modules = list(dict.fromkeys(given.recompute_modules or (["core_attn"] if granularity else [])))
    if given.moe_layer_recompute:
        granularity, modules = "selective", [*modules, "moe"]
    if granularity == "full":
        return {"recompute": _whole_layers(given, sizes, wrong)}, set()
    if granularity != "selective":
        if granularity is not None:
            wrong.append(f"--recompute-granularity takes full or selective, not {granularity!r}")
        elif given.recompute_modules or given.recompute_method:
            wrong.append("nothing is recomputed without --recompute-granularity")
        return {}, set()
    modules = _known("--recompute-modules", modules, _RECOMPUTED, wrong)
    return {"select_recompute": _patterns(modules, given, sizes, wrong)}, set(modules)


def _whole_layers(given: argparse.Namespace, sizes: dict[str, int | None], wrong: list[str]) -> bool | list[int]:
    """True for all of them, or their numbers."""
    count = sizes["recompute_num_layers"]
    if given.recompute_method == "uniform":
        if (count or 1) > 1:
            wrong.append(
                f"--recompute-num-layers {count} keeps one input for {count} layers, and a plan that of each layer: 1"
            )
        return True
    if given.recompute_method != "block" or count is None:
        wrong.append(
            "--recompute-granularity full needs --recompute-method uniform, or block and --recompute-num-layers"
        )
        return True
    stages, layers = sizes["pipeline_model_parallel_size"] or 1, sizes["num_layers"]
    virtual, each = sizes["num_virtual_stages_per_pipeline_rank"] or 1, sizes["num_layers_per_virtual_pipeline_stage"]
    if layers is None or (stages > 1 and any(getattr(given, name) for name in _LAYOUTS)):
        wrong.append("--recompute-method block counts layers of each stage: that needs --num-layers, and equal stages")
        return True
    each = each or layers // (stages * virtual)
    if not each:
        wrong.append(
            f"--num-layers {layers} leaves parts without layers: {stages * virtual} stages, virtual ones counted"
        )
        return True
    return [layer for layer in range(layers) if layer % each < count]


def _patterns(
    modules: list[str], given: argparse.Namespace, sizes: dict[str, int | None], wrong: list[str]
) -> dict[str, bool | list[int]]:
    """Which layers' operators: Megatron's ``mlp`` is that of dense layers, ``moe`` that of layers with experts."""
    found: dict[str, bool | list[int]] = {module: True for module in modules if module not in ("mlp", "moe")}
    asked = [module == "moe" for module in modules if module in ("mlp", "moe")]
    if not asked:
        return found
    with_experts = _with_experts(given, sizes, wrong)
    absent = [experts for experts in asked if experts not in with_experts]
    wrong += [f"--recompute-modules {'moe' if one else 'mlp'}: no layer has one" for one in absent]
    those = [layer for layer, experts in enumerate(with_experts) if experts in asked]
    return found | {"mlp": True if len(those) == len(with_experts) else those}


def _with_experts(given: argparse.Namespace, sizes: dict[str, int | None], wrong: list[str]) -> list[bool]:
    """For each layer whether it has experts; for one layer where all are alike."""
    if sizes["num_experts"] is None:
        return [False]
    return with_experts(given.moe_layer_freq, sizes["num_layers"], wrong)


def _swap(
    given: argparse.Namespace, sizes: dict[str, int | None], recomputed: set[str], wrong: list[str]
) -> dict[str, Any]:
    """What the section says beyond ``swap: True``."""
    every = {"backward_prefetch": "Auto", "activations": "saved"}
    if sizes["cpu_offloading_num_layers"]:
        layers = list(range(sizes["cpu_offloading_num_layers"]))
        return {"layer_swap": [every | {"layers": layers}]}
    if not given.fine_grained_activation_offloading:
        if given.offload_modules:
            wrong.append("nothing is offloaded without --fine-grained-activation-offloading")
        return {}
    amounts = {name: number(flag(name), getattr(given, name), wrong, least=0, most=_MOST_BYTES) for name in _AMOUNTS}
    for name in ("activation_offload_fraction", "delta_offload_bytes_across_pp_ranks"):
        if amounts[name] not in (None, _AMOUNTS[name]):
            wrong.append(f"{flag(name)}: a plan names what moves, and no share of it; name fewer modules or layers")
    modules = _known("--offload-modules", given.offload_modules or [], _OFFLOADED, wrong)
    smallest = amounts["min_offloaded_tensor_size"]
    swap: dict[str, Any] = {
        "smallest_bytes": int(_AMOUNTS["min_offloaded_tensor_size"] if smallest is None else smallest)
    }
    inputs = {module: _INPUTS.get(module, set()) for module in recomputed}
    of_recomputed = {one for some in inputs.values() for one in some} & {*modules}
    if of_recomputed:
        if any(not some or not some <= of_recomputed for some in inputs.values()):
            wrong.append(
                f"--offload-modules {' '.join(sorted(of_recomputed))}: a plan moves the inputs of all that runs again "
                f"({', '.join(sorted(recomputed))}) or of none"
            )
        swap |= {"swap_recompute_inputs": True}
    left = [module for module in modules if module not in of_recomputed]
    swap["op_swap"] = [{"op_name": left} | every | {"layers": True}] if left else []
    return swap


def _known(option: str, modules: list[str], known: tuple[str, ...], wrong: list[str]) -> list[str]:
    for module in modules:
        if module not in known:
            wrong.append(f"{option} takes {', '.join(known)}, not {module!r}")
        elif module in _WITHOUT_EQUAL:
            wrong.append(f"{option} {module}: {_WITHOUT_EQUAL[module]}")
    return [module for module in modules if module in MEGATRON_MODULES or module == "mlp"]
