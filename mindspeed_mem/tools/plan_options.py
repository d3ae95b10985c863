"""The model, its layout and the machine that the options of `plan` describe, or names, files and command lines do."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from mindspeed_mem.adaptive.problem import devices
from mindspeed_mem.adaptive.problem.definition import GIB, SCHEDULES, Pipeline
from mindspeed_mem.adaptive.problem.shape import Degrees, Machine, Shape
from mindspeed_mem.command_line import LARGEST, check_layers, digits, flag, number, quoted, whole
from mindspeed_mem.model_sizes import (
    MODEL_CHOICES,
    MODEL_NUMBERS,
    MODEL_SWITCHES,
    PUBLISHED,
    add_options,
    model_sizes,
    read_options,
)
from mindspeed_mem.schedule import ScheduleError, stages
from mindspeed_mem.schedule import problems as schedule_problems
from mindspeed_mem.schedule.checks import too_many
from mindspeed_mem.tools import hugging_face, megatron_line

_NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "global_batch_size")
_EXPERTS = {
    "num_experts": "experts of each layer that has any",
    "moe_router_topk": "experts that each token goes to (2)",
    "moe_ffn_hidden_size": "feed-forward width of each expert (--ffn-hidden-size)",
    "moe_shared_expert_intermediate_size": "total feed-forward width of the shared experts",
    "expert_model_parallel_size": "ranks over which experts are spread (1)",
    "expert_tensor_parallel_size": "ranks that split each expert (--tensor-model-parallel-size)",
}
_LATENT = {
    "q_lora_rank": "rank of latent queries (queries are not latent)",
    "kv_lora_rank": "rank of latent keys and values (32)",
    "qk_head_dim": "width of a query or key head, without positions (128)",
    "qk_pos_emb_head_dim": "width of its part with positions (64)",
    "v_head_dim": "width of a value head (128)",
}
NUMBERS = (
    MODEL_NUMBERS
    | {
        "seq_length": "tokens of a sequence",
        "micro_batch_size": "sequences of a micro-batch",
        "global_batch_size": "sequences of a step, over all ranks",
        "tensor_model_parallel_size": "ranks that split each layer (1)",
        "context_parallel_size": "ranks that split each sequence (1)",
        "pipeline_model_parallel_size": "pipeline stages (1)",
        "num_layers_per_virtual_pipeline_stage": "layers of a virtual stage (no virtual stages)",
        "data_parallel_size": "ranks that share the global batch (1); Megatron computes it instead",
    }
    | _EXPERTS
    | _LATENT
    | {
        "mtp_num_layers": "extra layers that predict further tokens (0)",
        "chunk_zero_stage": "what chunk ZeRO splits: 1 optimizer states, 2 gradients too, 3 parameters too",
    }
)
SWITCHES = MODEL_SWITCHES | {
    "sequence_parallel": "split norms and dropout over tensor-parallel ranks, too",
    "use_distributed_optimizer": "split optimizer states over data-parallel ranks",
    "no_bias_gelu_fusion": "compute bias and GELU separately",
    "no_bias_swiglu_fusion": "compute bias and SwiGLU separately",
    "multi_latent_attention": "keys and values from latents, as in DeepSeek's models",
    "qk_layernorm": "norms of queries and keys, or of latents",
    "grad_reduce_in_bf16": "gradients of 2 bytes per element",
    "fp8_param_gather": "keep and gather weights in fp8 only",
    "use_precision_aware_optimizer": "make the four options that end in -dtype count",
    "chunk_reduce_each_microbatch": "reduce gradients in every micro-batch, which saves memory",
}
_PRECISIONS = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
CHOICES = MODEL_CHOICES | {
    "attention_backend": ("flash", "unfused"),
    "transformer_impl": ("local", "transformer_engine"),
    "fp8_format": ("none", "hybrid", "e4m3"),
    "main_grads_dtype": ("fp32", "bf16"),
    "main_params_dtype": ("fp32", "fp16"),
    "exp_avg_dtype": ("fp32", "fp16", "bf16", "fp8"),
    "exp_avg_sq_dtype": ("fp32", "fp16", "bf16", "fp8"),
}
TEXTS = {
    "pipeline_stages": "layers of each stage, or of each virtual stage, such as 3,5,5,3 (equal); not Megatron's",
    "moe_layer_freq": "which layers have experts: N for every N-th, or a list such as [0]*3+[1]*58 (1)",
    "window_size": "tokens before and after it to which each token attends, such as 4096,0 (all before)",
    "placement_policy": "where chunks rest: device, host, static:0.5 (device)",
    "attention_dropout": "dropout of attention scores; only unfused attention keeps masks (0.1)",
    "hidden_dropout": "dropout before the residual stream, and of embeddings (0.1)",
    "expert_imbalance": "tokens of the fullest expert-parallel rank, relative to the average (1); not Megatron's",
}
_WINDOW = re.compile(r"\(?\s*(-?[0-9]{1,10})\s*(,\s*-?[0-9]{1,10}\s*)?\)?")
_ELEMENTS = 2.0**54
"""Of one tensor of each layer, together; bytes of all tensors are whole numbers of 64 bits."""
_DROPOUTS = ("attention_dropout", "hidden_dropout")
_DROPOUT = 0.1  # Megatron's default of both
SPEEDS = {
    "link_gbps": (Machine.link_gbps, "copies to and from the host, GB/s each way while computing"),
    "tflops": (Machine.tflops, "TFLOP/s that matrix products reach"),
    "memory_gbps": (Machine.memory_gbps, "GB/s that device memory reaches"),
    "tensor_gbps": (Machine.tensor_gbps, "GB/s of collectives between tensor-parallel ranks"),
}
_RANKS = (
    *("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size", "data_parallel_size"),
)
"""With any of these above 1, other devices of the node copy as well."""
SCHEDULE_CHOICES = {"pipeline_schedule": SCHEDULES}
SCHEDULE_NUMBERS = {
    "max_inflight_microbatches": "cap on micro-batches of a stage (none; with zb and v: that of 1f1b's first stage)"
}
SCHEDULE_SWITCHES = {"split_backward": "compute weight gradients after the backward of their pass, as zb and v do"}
_OF_SCHEDULE = (*SCHEDULE_CHOICES, *SCHEDULE_NUMBERS, *SCHEDULE_SWITCHES)
_NAMED = ("model", "hf_config", "megatron", "device_name", "devices")
OF_A_SHAPE = (*_NAMED, *NUMBERS, *SWITCHES, *CHOICES, *TEXTS, *SPEEDS, *_OF_SCHEDULE)


class Described(NamedTuple):
    """What is to be planned."""

    shape: Shape
    split: Degrees
    machine: Machine


class Limits(NamedTuple):
    """Bytes that a rank may take; None: nobody said so."""

    device: int | None
    reserve: int | None
    host: int | None


def add_arguments(
    model: argparse._ArgumentGroup,
    machine: argparse._ArgumentGroup,
    table: str = "--devices",
    speeds: Mapping[str, tuple[float, str]] = SPEEDS,
) -> None:
    """The options, in a group each.

    Args:
        model: group of those of the model and its layout.
        machine: group of those of the device.
        table: the option that names a file of more devices.
        speeds: options of the device's speeds, with their default and help.
    """
    what = f"a published model; other options overrule it: {', '.join(PUBLISHED)}"
    model.add_argument("--model", metavar="NAME", help=what)
    what = f"the same from a config.json on Hugging Face: {', '.join(hugging_face.FAMILIES)}"
    model.add_argument("--hf-config", metavar="FILE", help=what)
    what = "the same from a Megatron command line, as one argument; options that do not matter for memory are skipped"
    model.add_argument("--megatron", metavar="FLAGS", help=what)
    add_options(model, NUMBERS, SWITCHES, CHOICES, TEXTS)
    what = f"memory and speeds of a known device; other options overrule it: {', '.join(devices.table())}"
    machine.add_argument("--device-name", metavar="NAME", help=what)
    what = "more devices: JSON or YAML as --measure prints it and docs/planner.md describes it"
    machine.add_argument(table, dest="devices", metavar="FILE", help=what)
    for name, (default, text) in speeds.items():
        machine.add_argument(flag(name), metavar="X", help=f"{text} ({default:g})")


def add_schedule(model: argparse._ArgumentGroup) -> None:
    """The options of the order of passes, as in training. A command that chooses among them has none."""
    add_options(model, SCHEDULE_NUMBERS, SCHEDULE_SWITCHES, SCHEDULE_CHOICES, {})


def add_limits(machine: argparse._ArgumentGroup, otherwise: str = "") -> None:
    """The options of memory. `otherwise`: what holds where the device's is not said."""
    machine.add_argument("--device-memory-gib", metavar="GIB", help=f"device memory of a rank{otherwise}")
    what = (
        "what of it to leave unplanned: for contexts (1, at most a 16th of the device), communicators (0.67 for each "
        "of tensor, pipeline, data, context and expert parallel groups, at most a 64th) and fragmentation (2 %%)"
    )
    machine.add_argument("--reserve-gib", metavar="GIB", help=what)
    machine.add_argument("--swap-host-memory-gib", metavar="GIB", help="host memory that a rank may fill (no limit)")


def inputs(given: argparse.Namespace, table: str = "--devices") -> dict[str, str | None]:
    """The files that describe the model and the devices, by their options; `table` as in `add_arguments`."""
    config = None if given.hf_config is None else str(hugging_face.in_folder(given.hf_config))
    return {"--hf-config": config, table: given.devices}


def limits(given: argparse.Namespace, wrong: list[str]) -> Limits:
    """What they say."""
    device = number("--device-memory-gib", given.device_memory_gib, wrong)
    kept = number("--reserve-gib", given.reserve_gib, wrong, least=0)
    if kept is not None and given.device_memory_gib is None:
        wrong.append("--reserve-gib is taken from --device-memory-gib, which is not given")
    elif kept is not None and device is not None and kept >= device:
        wrong.append(f"--reserve-gib {kept:g} leaves nothing of --device-memory-gib {device:g}")
    host = number("--swap-host-memory-gib", given.swap_host_memory_gib, wrong, least=0)
    return Limits(*(None if one is None else round(one * GIB) for one in (device, kept, host)))


def by_name(
    given: argparse.Namespace,
    wrong: list[str],
    table: str = "--devices",
    speeds: Mapping[str, tuple[float, str]] = SPEEDS,
    alone: bool | None = None,
) -> str | None:
    """Fill in what names of a model and of a device, a file or a command line stand for, where nothing else is said;
    returns what is taken for the device, and what is assumed of it.

    Args:
        given: the options.
        wrong: gets a line for each reason why they cannot be meant.
        table: as in `add_arguments`.
        speeds: as in `add_arguments`.
        alone: whether nobody else uses links; None: if there is one rank.
    """
    try:
        known = devices.table(given.devices)
    except devices.DeviceFileError as error:
        wrong += [f"{table} {line}" for line in error.problems]
        known = devices.table()
    for option, name, names in (("--model", given.model, PUBLISHED), ("--device-name", given.device_name, known)):
        if name is not None and name not in names:
            wrong.append(f"{option} takes {', '.join(names)}, not {name!r}")
    if given.megatron is not None:
        tables: tuple[Any, Any, Any, Any] = NUMBERS, SWITCHES, CHOICES, TEXTS
        if hasattr(given, "pipeline_schedule"):
            tables = NUMBERS | SCHEDULE_NUMBERS, SWITCHES | SCHEDULE_SWITCHES, CHOICES | SCHEDULE_CHOICES, TEXTS
        _fill(given, megatron_line.options(given.megatron, tables, wrong))
    if given.model is not None and given.hf_config is not None:
        wrong.append("--model and --hf-config name two models; give either")
    elif given.hf_config is not None:
        _fill(given, hugging_face.options(given.hf_config, wrong))
    elif given.model in PUBLISHED:
        _fill(given, PUBLISHED[given.model].options())
    if given.megatron is not None and given.vocab_size is None:
        wrong.append("--vocab-size: missing; where --megatron's line does not say it, Megatron asks the tokenizer")
    if alone is None:
        alone = all(getattr(given, name) in (None, "1") for name in _RANKS)
    assumed = []
    if given.device_name in known:
        said = {name: getattr(given, name) for name in speeds}
        device = devices.device(given.device_name, known[given.device_name], alone, said)
        assumed += [device.said] if device.said else []
        _fill(given, {"device_memory_gib": device.memory_gib, **device.speeds})
    silent = [name for name in speeds if getattr(given, name) is None and not (alone and name == "tensor_gbps")]
    if silent:
        taken = ", ".join(f"{flag(name)} {speeds[name][0]:g}" for name in silent)
        known_by = "--device-name knows some devices" + ", --measure measures yours" * hasattr(given, "measure")
        assumed.append(f"No device is named: assumed {taken} ({known_by}).")
    return " ".join(assumed) or None


def _fill(given: argparse.Namespace, values: Mapping[str, object]) -> None:
    for name, value in values.items():
        if getattr(given, name) in (None, False) and value is not None:
            setattr(given, name, value if isinstance(value, bool) else str(value))


def described(
    given: argparse.Namespace, device_bytes: int | None, host_bytes: int | None, wrong: list[str]
) -> Described | None:
    """Model, split and machine; None, and reasons in `wrong`, where too much is missing or wrong."""
    missing = [flag(name) for name in (*_NEEDED, "device_memory_gib") if getattr(given, name) is None]
    if missing:
        wrong.append(f"{', '.join(missing)}: missing{_instead_of(missing, measured=hasattr(given, 'trace'))}")
    read = read_options(given, NUMBERS, CHOICES, None, wrong)
    numbers = {name: size for name, size in read.items() if size is not None}
    for name in ("num_layers", "mtp_num_layers"):
        check_layers(flag(name), read[name], wrong)
    speeds = {
        name: default if getattr(given, name) is None else number(flag(name), getattr(given, name), wrong)
        for name, (default, _) in SPEEDS.items()
    }
    dropouts = {
        name: _DROPOUT if getattr(given, name) is None else number(flag(name), getattr(given, name), wrong, least=0)
        for name in _DROPOUTS
    }
    wrong += [
        f"{flag(name)} is a share below 1, not {share:g}" for name, share in dropouts.items() if (share or 0) >= 1
    ]
    if wrong or device_bytes is None:
        return None
    sizes = model_sizes(given, read, wrong)
    shape = Shape(
        **sizes._asdict(),
        seq_length=numbers["seq_length"],
        micro_batch_size=numbers["micro_batch_size"],
        normalization=given.normalization or "LayerNorm",
        rope=given.position_embedding_type == "rope",
        flash=given.attention_backend != "unfused",
        attention_dropout=bool(dropouts["attention_dropout"]),
        hidden_dropout=bool(dropouts["hidden_dropout"]),
        context=numbers.get("context_parallel_size", 1),
        fused=not (given.no_bias_swiglu_fusion if given.swiglu else given.no_bias_gelu_fusion),
        te=given.transformer_impl == "transformer_engine",
        fp8=given.fp8_format not in (None, "none"),
        fp8_params=given.fp8_param_gather,
        qk_layernorm=given.qk_layernorm,
        mtp_num_layers=numbers.get("mtp_num_layers", 0),
        window=_window(given.window_size, wrong),
    )
    shape = _latent(given, _experts(given, shape, numbers, wrong), numbers, wrong)
    split = _split(given, shape, numbers, wrong)
    if not shape.flash and shape.num_query_groups < shape.num_attention_heads:
        wrong.append("--attention-backend unfused copies keys and values for each head; --num-query-groups needs flash")
    if shape.context > 1 and not shape.flash:
        wrong.append("--attention-backend unfused is not split over --context-parallel-size ranks: that needs flash")
    if shape.seq_length % (2 * shape.context) and shape.context > 1:
        twice = f"twice --context-parallel-size {shape.context}"
        wrong.append(f"--seq-length {shape.seq_length} is no multiple of {twice}: each rank takes two pieces")
    if shape.fp8_params and not shape.fp8:
        wrong.append("--fp8-param-gather needs --fp8-format")
    if shape.fp8 and not shape.te:
        wrong.append("--fp8-format needs --transformer-impl transformer_engine")
    _check_bytes(shape, wrong)
    wrong += sizes.indivisible(split.tensor, {"--seq-length": shape.seq_length} if given.sequence_parallel else {})
    reached_speeds: dict[str, Any] = {name: speed for name, speed in speeds.items() if speed is not None}
    machine = Machine(memory_bytes=device_bytes, host_bytes=host_bytes, **reached_speeds)
    return Described(shape, split, machine)


def _instead_of(missing: list[str], *, measured: bool) -> str:
    """Which other options say what is missing; `measured`: --trace does, too."""
    shape = {"--num-layers", "--hidden-size", "--num-attention-heads"}.intersection(missing)
    ways = ["--model, --hf-config or --megatron say the model's shape"] if shape else []
    ways += ["--device-name says the device's memory"] if "--device-memory-gib" in missing else []
    ways += ["--trace says all of it"] if measured else []
    return f"; {', '.join(ways)}" if ways else ""


def _check_bytes(shape: Shape, wrong: list[str]) -> None:
    """Note in `wrong` sizes of which nobody can count what they take."""
    widths = (shape.hidden_size, shape.ffn_hidden_size, shape.vocab_size, shape.moe_ffn_hidden_size)
    heads = shape.num_attention_heads * max(shape.kv_channels, shape.qk_head_dim, shape.v_head_dim)
    widest = max(*widths, heads, shape.shared_expert_size, 0 if shape.flash else shape.seq_length)
    parameters = shape.hidden_size * widest * max(1, shape.num_experts)
    tokens = shape.micro_batch_size * shape.seq_length * max(1, shape.moe_router_topk) * shape.imbalance
    if (shape.num_layers + shape.mtp_num_layers) * (parameters + tokens * widest) > _ELEMENTS:
        sizes = "--num-layers, --hidden-size and other sizes of layers, --seq-length, --micro-batch-size"
        wrong.append(f"{sizes}: what they take together is more than can be counted; give smaller ones")


def _window(text: str | None, wrong: list[str]) -> int:
    """Tokens that each one sees, with itself; 0: all before it."""
    if text is None:
        return 0
    found = _WINDOW.fullmatch(text.strip())
    if found is not None and -1 <= int(found[1]) <= LARGEST:
        return int(found[1]) + 1
    wrong.append(f"--window-size takes two numbers such as 4096,0, not {quoted(text)}")
    return 0


def _experts(given: argparse.Namespace, shape: Shape, numbers: Mapping[str, int], wrong: list[str]) -> Shape:
    count = numbers.get("num_experts", 0)
    if not count:
        alone = [name for name in (*_EXPERTS, "moe_layer_freq", "expert_imbalance") if getattr(given, name) is not None]
        if alone:
            wrong.append(f"{', '.join(map(flag, alone))}: no layer has experts without --num-experts")
        return shape
    imbalance = number("--expert-imbalance", given.expert_imbalance, wrong, least=1)
    which = megatron_line.with_experts(given.moe_layer_freq, shape.num_layers, wrong)
    which = which * shape.num_layers if len(which) == 1 else which
    shape = dataclasses.replace(
        shape,
        num_experts=count,
        moe_router_topk=numbers.get("moe_router_topk", 2),
        moe_ffn_hidden_size=numbers.get("moe_ffn_hidden_size", shape.ffn_hidden_size),
        shared_expert_size=numbers.get("moe_shared_expert_intermediate_size", 0),
        imbalance=imbalance or 1.0,
        with_experts="".join("01"[experts] for experts in which),
    )
    ranks = numbers.get("expert_model_parallel_size", 1)
    if shape.moe_router_topk > count:
        wrong.append(f"--moe-router-topk {shape.moe_router_topk} is more than --num-experts {count}")
    if count % ranks:
        wrong.append(f"--num-experts {count} is no multiple of --expert-model-parallel-size {ranks}")
    if numbers.get("tensor_model_parallel_size", 1) > 1 and not given.sequence_parallel:
        wrong.append("--num-experts and --tensor-model-parallel-size need --sequence-parallel")
    return shape


def _latent(given: argparse.Namespace, shape: Shape, numbers: Mapping[str, int], wrong: list[str]) -> Shape:
    if not given.multi_latent_attention:
        alone = [flag(name) for name in _LATENT if name in numbers]
        if alone:
            wrong.append(f"{', '.join(alone)}: nothing is latent without --multi-latent-attention")
        return shape
    if not shape.flash:
        wrong.append("--multi-latent-attention with --attention-backend unfused is not known; flash")
    if shape.num_query_groups != shape.num_attention_heads:
        wrong.append("--multi-latent-attention makes keys for every head; --num-query-groups says otherwise")
    sizes = {name: numbers.get(name, int(text) if text.isdigit() else 0) for name, text in _LATENT.items()}
    return dataclasses.replace(
        shape,
        q_lora_rank=sizes["q_lora_rank"],
        kv_lora_rank=sizes["kv_lora_rank"],
        qk_head_dim=sizes["qk_head_dim"],
        qk_pos_emb_head_dim=sizes["qk_pos_emb_head_dim"],
        v_head_dim=sizes["v_head_dim"],
    )


def _split(given: argparse.Namespace, shape: Shape, numbers: Mapping[str, int], wrong: list[str]) -> Degrees:
    tensor, pipeline = numbers.get("tensor_model_parallel_size", 1), numbers.get("pipeline_model_parallel_size", 1)
    data, per_part = numbers.get("data_parallel_size", 1), numbers.get("num_layers_per_virtual_pipeline_stage")
    if getattr(given, "pipeline_schedule", None) == "v" and per_part is None and given.pipeline_stages is None:
        per_part = max(1, shape.num_layers // (2 * pipeline))  # a V has two virtual stages
    virtual, micro_batches, counts = 1, 1, ""
    if given.pipeline_stages is not None:
        virtual, counts = _uneven(given.pipeline_stages, shape.num_layers, pipeline, wrong)
        if per_part is not None:
            wrong.append("--pipeline-stages says what --num-layers-per-virtual-pipeline-stage would; give either")
    elif per_part is not None and (shape.num_layers % (pipeline * per_part) or pipeline == 1):
        wrong.append(
            f"--num-layers-per-virtual-pipeline-stage {per_part} needs --pipeline-model-parallel-size above 1 and "
            f"layers that are a multiple of both: {shape.num_layers} layers, {pipeline} stages"
        )
    elif per_part is not None:
        virtual = shape.num_layers // pipeline // per_part
    elif shape.num_layers % pipeline:
        wrong.append(
            f"--num-layers {shape.num_layers} is no multiple of --pipeline-model-parallel-size {pipeline}: "
            "--pipeline-stages says how many each has"
        )
    batch, each = numbers["global_batch_size"], shape.micro_batch_size * data
    if batch % each:
        wrong.append(
            f"--global-batch-size {batch} is no multiple of --micro-batch-size times data-parallel ranks, {each}"
        )
    else:
        micro_batches = batch // each
    line = _schedule(given, shape, (pipeline, virtual, micro_batches), wrong)
    split = Degrees(
        schedule=line.schedule,
        cap=line.cap,
        split_backward=line.split_backward,
        tensor=tensor,
        pipeline=pipeline,
        virtual=virtual,
        stage_layers=counts,
        data=data,
        context=shape.context,
        micro_batches=micro_batches,
        sequence_parallel=given.sequence_parallel and tensor > 1,
        distributed_optimizer=given.use_distributed_optimizer,
        expert=numbers.get("expert_model_parallel_size", 1),
        expert_tensor=numbers.get("expert_tensor_parallel_size", 0),
        reduce_each=given.chunk_reduce_each_microbatch,
    )
    split = _states(given, split, numbers.get("chunk_zero_stage", 0), wrong)
    over, ranks = split.expert * split.experts_split, tensor * data * shape.context
    if shape.num_experts and ranks % over:
        wrong.append(
            f"{ranks} tensor, data and context parallel ranks are no multiple of the {over} that hold each expert once "
            "(--expert-model-parallel-size times --expert-tensor-parallel-size)"
        )
    return split


def _schedule(given: argparse.Namespace, shape: Shape, sizes: tuple[int, int, int], wrong: list[str]) -> Pipeline:
    """The order of passes; sizes: stages, virtual stages and micro-batches."""
    schedule = getattr(given, "pipeline_schedule", None) or "1f1b"
    split = bool(getattr(given, "split_backward", False))
    cap = whole("--max-inflight-microbatches", getattr(given, "max_inflight_microbatches", None), wrong)
    apart = schedule != "1f1b"
    if schedule not in SCHEDULES:
        wrong.append(f"--pipeline-schedule takes {', '.join(SCHEDULES)}, not {schedule!r}")
    elif sizes[0] == 1 and apart:
        wrong.append(
            f"--pipeline-schedule {schedule} needs --pipeline-model-parallel-size above 1: a single stage never idles"
        )
    elif sizes[0] == 1 and cap is not None:
        wrong.append("--max-inflight-microbatches needs --pipeline-model-parallel-size above 1: one stage holds one")
    elif many := too_many(*sizes):
        wrong.append(f"{many}; --global-batch-size counts sequences, not tokens")
    else:
        wrong += schedule_problems(*sizes, cap=cap, split=apart, v=schedule == "v")
    if schedule == "v" and shape.mtp_num_layers:
        wrong.append("--mtp-num-layers is refused beside --pipeline-schedule v")
    if (split or apart) and getattr(given, "chunk_zero_stage", None) is not None:
        name = f"--pipeline-schedule {schedule}" if apart else "--split-backward"
        wrong.append(f"--chunk-zero-stage is refused beside {name}")
    return Pipeline(micro_batches=sizes[2], schedule=schedule, cap=cap, split_backward=split)


def _uneven(text: str, layers: int, pipeline: int, wrong: list[str]) -> tuple[int, str]:
    """Virtual stages, and the layers of each part."""
    entries = [digits(one.strip()) for one in text.split(",")]
    if None in entries:
        wrong.append(f"--pipeline-stages takes the layers of each stage, such as 3,5,5,3, not {quoted(text)}")
        return 1, ""
    try:
        found = stages.split([one for one in entries if one is not None], layers, pipeline)
    except ScheduleError as error:
        wrong.append(str(error))
        return 1, ""
    if min(found.counts) < 1:
        wrong.append(f"--pipeline-stages {text}: a stage without layers cannot be planned; give each at least one")
        return 1, ""
    return found.virtual_stages, ",".join(map(str, found.counts))


def _states(given: argparse.Namespace, split: Degrees, stage: int, wrong: list[str]) -> Degrees:
    """With what gradients and states of a parameter take, and what chunks do with them."""
    names = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    said = [name for name in (*names, "main_grads_dtype") if getattr(given, name) not in (None, "fp32")]
    if said and not given.use_precision_aware_optimizer:
        wrong.append(f"{', '.join(map(flag, said))}: no effect without --use-precision-aware-optimizer")
    if stage > 3:
        wrong.append(f"--chunk-zero-stage takes 1, 2, 3, not {stage}")
    if stage and not given.use_distributed_optimizer:
        wrong.append("--chunk-zero-stage needs --use-distributed-optimizer")
    small = given.grad_reduce_in_bf16 or given.main_grads_dtype == "bf16"
    return dataclasses.replace(
        split,
        grad_bytes=2 if small else 4,
        widened_bytes=4 if small and not given.use_precision_aware_optimizer else 0,
        state_bytes=sum(_PRECISIONS[getattr(given, name) or "fp32"] for name in names),
        chunk_zero_stage=stage,
        on_device=1.0 if given.placement_policy is None else _on_device(given.placement_policy, stage, wrong),
    )


def _on_device(text: str, stage: int, wrong: list[str]) -> float:
    """The share of what chunks split that rests on the device."""
    from mindspeed_mem.zero.core.placement import placement

    if not stage:
        wrong.append("--placement-policy needs --chunk-zero-stage")
    try:
        asked = placement(text)
    except ValueError as error:
        wrong.append(f"--placement-policy takes {error}, not {text!r}")
        return 1.0
    if asked.policy == "auto":
        wrong.append("--placement-policy auto is decided in the job, by what it measures; host needs the least")
    return 1 - (asked.policy != "device") * asked.fraction
