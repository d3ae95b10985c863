"""THE table of features: what each flag switches on, what it needs, and what it cannot run beside.

`check` turns arguments into `Settings`, or raises one FeatureError with every reason at once.
"""

from __future__ import annotations

import difflib
import os
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_mem.device import Backend, DeviceError, get_backend
from mindspeed_mem.options import Feature, Option, at_least_one, by_pattern, gib, layer_list, source, whole_numbers
from mindspeed_mem.plan import MemoryConfig, MemoryConfigError, load_memory_config
from mindspeed_mem.schedule import settings as schedule
from mindspeed_mem.schedule.stages import describes

GROUP = "mindspeed_mem"


class FeatureError(ValueError):
    """The given options cannot be used; `problems` holds one entry for each reason."""

    def __init__(self, problems: Iterable[str]):
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n  ".join([f"{count} with the options", *self.problems]))


def _core(flag: str, why: str, **condition: Any) -> Option:
    return Option(flag=flag, origin="megatron-core", why=why, **condition)


def _lm(flag: str, why: str) -> Option:
    return Option(flag=flag, origin="megatron-lm", why=why)


def _ms(flag: str, why: str) -> Option:
    return Option(flag=flag, origin="mindspeed", why=why)


def _made_of_stages(args: Any) -> bool:
    """Whether the layout in `args` is what --pipeline-stages stands for: its patch puts that there."""
    given = getattr(args, "pipeline_stages", None)
    try:
        entries = schedule.current().stages if given is None else whole_numbers(given)
    except ValueError:  # reported where it is read
        return False
    return entries is not None and describes(str(getattr(args, "pipeline_model_parallel_layout", None)), entries)


_SAME = "both decide about the same activations"
_GRAPH = "replaying a graph skips the Python code that swaps and recomputes"
_NOT_YET = "not supported yet"

_MEMORY_PATCHES = ("activation_*",)
_RECOMPUTE_PATCHES = ("recompute_*",)
_MEMORY_BARS = (
    _core("--recompute-granularity", "a layer that Megatron recomputes keeps nothing to decide about", value="full"),
    _core("--fine-grained-activation-offloading", _SAME),
    _core("--cpu-offloading", _SAME),
    _core("--cpu-offloading-num-layers", _SAME),
    _core("--cuda-graph-impl", _GRAPH, off="none"),
    _core("--enable-cuda-graph", _GRAPH),
    _core("--external-cuda-graph", _GRAPH),
    _core("--overlap-moe-expert-parallel-comm", _NOT_YET),
    _core("--moe-shared-expert-overlap", "it computes on a second stream, which swap and recompute do not follow"),
    _lm("--use-megatron-fsdp", _NOT_YET),
    _lm("--use-torch-fsdp2", _NOT_YET),
    _lm("--use-legacy-models", "the legacy models have none of megatron-core's layers"),
    _lm("--yaml-cfg", "it replaces the command line, this option included"),
    _ms("--swap-attention", _SAME),
    _ms("--smart-swap", _SAME),
    _ms("--recompute-in-bubble", _NOT_YET),
    _ms("--recompute-in-advance", _NOT_YET),
    _ms("--moe-fb-overlap", _NOT_YET),
)
_RECOMPUTE_BARS = (
    _core("--fp8-format", "delayed scaling changes with each forward, also with one that runs again", field="fp8"),
    _core(
        "--moe-router-load-balancing-type",
        "its running counts change between a forward and its repetition",
        value="global_aux_loss",
    ),
)

_TWO_SPLITS = "both say which layers a pipeline stage has"
_STAGES_BARS = (
    _core("--pipeline-model-parallel-layout", _TWO_SPLITS, unless=_made_of_stages),
    _core("--decoder-first-pipeline-num-layers", _TWO_SPLITS, field="num_layers_in_first_pipeline_stage"),
    _core("--decoder-last-pipeline-num-layers", _TWO_SPLITS, field="num_layers_in_last_pipeline_stage"),
    _lm("--decoder-first-pipeline-num-layers", _TWO_SPLITS),
    _lm("--decoder-last-pipeline-num-layers", _TWO_SPLITS),
    _core("--account-for-embedding-in-pipeline-split", _TWO_SPLITS),
    _core("--account-for-loss-in-pipeline-split", _TWO_SPLITS),
    _lm("--num-layers-per-virtual-pipeline-stage", "the number of virtual stages follows from that of the counts"),
    _core("--is-hybrid-model", "hybrid models always split their layers evenly"),
    _lm("--use-legacy-models", "the legacy models have none of megatron-core's layers"),
    _lm("--yaml-cfg", "it replaces the command line, this option included"),
)

_OWN_LOOP = "it belongs to Megatron's own loop, whose place a capped schedule takes"
_CAP_BARS = (
    _core("--overlap-moe-expert-parallel-comm", _OWN_LOOP),
    _core("--defer-embedding-wgrad-compute", _OWN_LOOP),
    _core("--num-microbatches-with-partial-activation-checkpoints", _OWN_LOOP),
    _core("--fine-grained-activation-offloading", _NOT_YET),
    _core("--hybrid-context-parallel", _NOT_YET),
    _core("--variable-seq-lengths", "stages do not tell each other sizes: all micro-batches have one"),
    _core("--mtp-standalone", "stages do not tell each other sizes: between all of them they are one"),
    _core("--cuda-graph-impl", "graphs are captured in the order of Megatron's own loop", off="none"),
    _core("--enable-cuda-graph", "graphs are captured in the order of Megatron's own loop"),
    _core("--external-cuda-graph", "graphs are captured in the order of Megatron's own loop"),
    _lm("--use-megatron-fsdp", _NOT_YET),
    _lm("--use-torch-fsdp2", _NOT_YET),
    _lm("--yaml-cfg", "it replaces the command line, this option included"),
    _ms("--recompute-in-bubble", "both decide about the order of passes"),
    _ms("--recompute-in-advance", "both decide about the order of passes"),
    _ms("--moe-fb-overlap", "both decide about the order of passes"),
)

FEATURES = (
    Feature(
        flag="--device",
        choices=("auto", "cpu", "cuda", "npu"),
        default="auto",
        help="device to train on; auto (default) takes what MINDSPEED_MEM_DEVICE says, else the first present of npu, "
        "cuda, cpu. On cpu, megatron-core is made to train on host memory with gloo",
    ),
    # Before all that wraps Megatron's schedules: it takes the place of what lies beneath it.
    Feature(
        flag="--max-inflight-microbatches",
        read=at_least_one,
        metavar="N",
        help="micro-batches (with virtual stages: passes of one chunk) whose activations a pipeline stage may hold; "
        "fewer than the schedule would hold cost time in which stages idle",
        patches=("pipeline_cap",),
        bars=_CAP_BARS,
    ),
    Feature(
        flag="--memory-config",
        read=source,
        metavar="FILE",
        help="YAML file naming the layers and operators whose activations are swapped to host memory (swap_config) or "
        "computed again in backward (recompute_config), with MindFormers' field names",
        patches=_MEMORY_PATCHES,
        bars=_MEMORY_BARS,
        recompute_bars=_RECOMPUTE_BARS,
    ),
    Feature(
        flag="--recompute-layers",
        read=layer_list,
        metavar="LAYERS",
        help="layers whose forward runs again in backward, counted from 0 over the whole model: 0,3-5 or all",
        section="recompute",
        patches=(*_MEMORY_PATCHES, *_RECOMPUTE_PATCHES),
        bars=(*_MEMORY_BARS, *_RECOMPUTE_BARS),
    ),
    Feature(
        flag="--select-recompute",
        read=by_pattern,
        many=True,
        metavar="PATTERN[=LAYERS]",
        help=r"operators whose forward runs again in backward, with their layers (none named: all), such as "
        r"'mlp=0,3' 'self_attention\.core_attention'",
        section="select_recompute",
        patches=(*_MEMORY_PATCHES, *_RECOMPUTE_PATCHES),
        bars=(*_MEMORY_BARS, *_RECOMPUTE_BARS),
    ),
    Feature(
        flag="--select-comm-recompute",
        read=by_pattern,
        many=True,
        metavar="PATTERN[=LAYERS]",
        help=r"the same for operators that communicate, and the norms that feed them, such as '.*\.norm'",
        section="select_comm_recompute",
        patches=(*_MEMORY_PATCHES, *_RECOMPUTE_PATCHES),
        bars=(*_MEMORY_BARS, *_RECOMPUTE_BARS),
    ),
    Feature(
        flag="--swap-host-memory-gib",
        read=gib,
        metavar="GIB",
        help="host memory that each rank may fill with swapped activations; beyond it an activation stays on the "
        "device (default: no limit)",
        needs_features=("--memory-config", "--survive-oom"),
    ),
    Feature(
        flag="--survive-oom",
        read=bool,
        default=False,
        help="when device memory runs out in the middle of a step, move activations to the host and go on, whatever "
        "the memory plan says",
        patches=(*_MEMORY_PATCHES, "recompute_random", "survive_*"),
        bars=_MEMORY_BARS,
    ),
    Feature(
        flag="--sdpa-attention",
        read=bool,
        default=False,
        help="run core attention of the local layer spec by torch's scaled_dot_product_attention",
        patches=("sdpa_*",),
        needs=(_core("--transformer-impl", "the other layer specs bring their own attention", value="local"),),
    ),
    Feature(
        flag="--pipeline-stages",
        read=whole_numbers,
        metavar="COUNTS",
        help="layers of each pipeline stage, such as 3,5,5,3 (with virtual stages one count for each chunk, in the "
        "model's order), or the stage of each layer, such as 0,0,0,1,1,1,1,1",
        patches=("pipeline_stages",),
        bars=_STAGES_BARS,
    ),
)
BY_DEVICE = {"cpu": ("cpu_*",), "simulated": ("cpu_*",)}
"""Patches for a device, as shell patterns: they come before all others."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Checked arguments: what is on, and what it takes."""

    on: tuple[str, ...] = ()
    """Flags of the features that are on."""
    backend: Backend | None = None
    """The device; None if nothing is on."""
    memory: MemoryConfig | None = None
    """Given only if it swaps or recomputes anything."""
    host_limit_bytes: int | None = None
    survive_oom: bool = False
    max_inflight: int | None = None
    """Passes whose activations a pipeline stage may hold."""
    pipeline_stages: tuple[int, ...] | None = None
    """Layers of each stage, or the stage of each layer."""
    patches: tuple[str, ...] = ()
    """Shell patterns of patch modules, in the order of application."""
    notices: tuple[str, ...] = ()
    """What is configured but has no effect."""


def check(args: Namespace | Mapping[str, Any], *, always: bool = False) -> Settings:
    """What `args` ask for. Keys are the flags' names (``memory_config``); what is missing is off.

    ``always``: choose a device even if nothing is on. Raises FeatureError naming all that is wrong: values, files,
    an absent device, options that exclude each other.
    """
    problems: list[str] = []
    if isinstance(args, Mapping):
        problems += _misspelt(args)
        args = Namespace(**args)
    values = {f.flag: _read(f, args, problems) for f in FEATURES}
    on = [f for f in FEATURES if values[f.flag] != f.default]
    flags = {f.section: (f.flag, values[f.flag]) for f in on if f.section}
    memory = _load(values["--memory-config"], flags, getattr(args, "num_layers", None), problems)
    notices = () if memory is None else memory.notices
    swaps, recomputes = memory is not None and memory.swap.swap, memory is not None and memory.recompute.active
    survives = values["--survive-oom"]
    if recomputes and not (swaps or survives) and values["--swap-host-memory-gib"] is not None:
        notices += ("--swap-host-memory-gib has no effect: nothing is swapped",)
    if memory is not None and not (swaps or recomputes):
        if values["--memory-config"] is not None:
            notices += (f"--memory-config {memory.source}: nothing is swapped (swap_config.swap) or recomputed",)
        on = [f for f in on if not set(_MEMORY_PATCHES) & set(f.patches) or f.flag == "--survive-oom"]
        memory = None
    problems += conflicts(args, [f.flag for f in on], recomputes=recomputes)
    given = [f.flag for f in FEATURES if getattr(args, f.dest, f.default) not in (f.default, None)]
    problems += [
        f"{f.flag} needs {' or '.join(f.needs_features)}: it limits nothing otherwise. Add {f.needs_features[0]}, or "
        f"leave {f.flag} out"
        for f in FEATURES
        if f.needs_features and f.flag in given and not set(f.needs_features) & set(given)
    ]
    backend = _device(values["--device"], bool(given) or always, problems)
    if survives and backend is not None and (allocator := backend.foreign_allocator()):
        problems.append(f"--survive-oom cannot be combined with {allocator}: both manage memory. Leave one of them out")
    if problems:
        raise FeatureError(problems)
    patches = [*BY_DEVICE.get(backend.type if backend else "", ()), *(p for f in on for p in f.patches)]
    patches += _RECOMPUTE_PATCHES if recomputes else ()
    limit = values["--swap-host-memory-gib"]
    return Settings(
        on=tuple(f.flag for f in on),
        backend=backend,
        memory=memory,
        host_limit_bytes=int(limit * 2**30) if (swaps or survives) and limit is not None else None,
        survive_oom=survives,
        max_inflight=values["--max-inflight-microbatches"],
        pipeline_stages=values["--pipeline-stages"],
        patches=tuple(dict.fromkeys(patches)),
        notices=notices,
    )


def conflicts(args: Any, on: Iterable[str], *, recomputes: bool = False) -> list[str]:
    """Why the features whose flags are in `on` cannot run with `args`, a namespace or a TransformerConfig.

    What a feature needs is looked for in a namespace only: a TransformerConfig has defaults that nobody chose.
    ``recomputes``: the file behind --memory-config asks for recompute.
    """
    found: list[str] = []
    barred: dict[Option, list[str]] = {}
    for feature in (f for f in FEATURES if f.flag in set(on)):
        for option in feature.needs:
            if isinstance(args, Namespace) and hasattr(args, option.dest) and not option.holds(args):
                found.append(f"{feature.flag} needs {option}: {option.why}. Add {option}, or leave {feature.flag} out")
        for option in (*feature.bars, *(feature.recompute_bars if recomputes else ())):
            if option.holds(args):
                barred.setdefault(option, []).append(feature.flag)
    return found + [
        f"{' and '.join(flags)} cannot be combined with {option}: {option.why}. Leave one of them out"
        for option, flags in barred.items()
    ]


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add our argument group, with those flags that the parser does not have yet; returns the parser."""
    missing = [f for f in FEATURES if f.flag not in parser._option_string_actions]
    if missing:
        group = parser.add_argument_group(GROUP)
        for feature in missing:
            feature.add_to(group)
    return parser


def scan(arguments: list[str]) -> Namespace:
    """What a command line says about our flags and those in our table, before its own parser has seen it.

    Values stay strings, and what is not given is not in the namespace. Raises FeatureError if a value is missing.
    """
    parser = _Scanner(add_help=False, allow_abbrev=False)
    for feature in FEATURES:
        how = {"nargs": "+", "action": "extend"} if feature.many else {}
        how = {"action": "store_true"} if feature.read is bool else how
        parser.add_argument(feature.flag, default=SUPPRESS, **how)
    others = {option.flag: option.dest for f in FEATURES for option in (*f.needs, *f.bars)}
    for flag, dest in sorted({**others, "--num-layers": "num_layers"}.items()):
        parser.add_argument(flag, dest=dest, nargs="*", default=SUPPRESS)
    found = vars(parser.parse_known_args(arguments)[0])
    for dest in found.keys() - {f.dest for f in FEATURES}:  # somebody else's: a switch, one value or several
        found[dest] = {0: True, 1: next(iter(found[dest]), None)}.get(len(found[dest]), found[dest])
    layers = str(found.pop("num_layers", ""))
    return Namespace(**found, **({"num_layers": int(layers)} if layers.isdecimal() else {}))


class _Scanner(ArgumentParser):
    def error(self, message: str):
        raise FeatureError([message])


def _read(feature: Feature, args: Namespace, problems: list[str]) -> Any:
    value = getattr(args, feature.dest, None)
    if value is None:
        return feature.default
    try:
        if feature.choices is not None and value not in feature.choices:
            raise ValueError(", ".join(feature.choices))
        if feature.read is bool and not isinstance(value, bool):
            raise ValueError("True or False")
        return feature.read(value)
    except (TypeError, ValueError) as error:
        allowed = str(error) if not str(error).startswith("could not convert") else "a number above 0"
        problems.append(f"{feature.flag}: got {value!r}; allowed: {allowed}")
        return feature.default


def _load(file: Any, flags: Mapping[str, Any], num_layers: Any, problems: list[str]) -> MemoryConfig | None:
    try:
        return load_memory_config(file, num_layers=num_layers if isinstance(num_layers, int) else None, flags=flags)
    except MemoryConfigError as error:
        problems += error.problems if file is None else [f"--memory-config {error}".replace("\n", "\n  ")]
        return None


def _device(name: str, wanted: bool, problems: list[str]) -> Backend | None:
    if not wanted and not os.environ.get("MINDSPEED_MEM_DEVICE", "").strip():
        return None
    try:
        return get_backend(name)
    except DeviceError as error:
        problems.append(str(error))
        return None


def _misspelt(args: Mapping[str, Any]) -> list[str]:
    """Keys that look like one of ours; others belong to the caller."""
    ours = [f.dest for f in FEATURES]
    theirs = ("recompute_num_layers", "recompute_modules")  # Megatron's, and near ours
    known = {*ours, *theirs, *(option.dest for f in FEATURES for option in (*f.needs, *f.bars))}
    near = {key: difflib.get_close_matches(str(key), ours, n=1, cutoff=0.8) for key in args if key not in known}
    return [f"{key!r} is not a setting; did you mean {match[0]!r}?" for key, match in near.items() if match]
