"""How our flags are checked: what those of the table (table.py) ask for.

`check` turns arguments into `Settings`, or raises one FeatureError with every reason at once.
"""

from __future__ import annotations

import difflib
import os
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_mem import requirements
from mindspeed_mem.device import Backend, DeviceError, get_backend
from mindspeed_mem.features.rows import Feature, Option, dest_of
from mindspeed_mem.features.table import FEATURES, MEMORY_PATCHES, ON_HOST, RECOMPUTE_PATCHES, V_PATCHES
from mindspeed_mem.patching import upstream
from mindspeed_mem.plan import MemoryConfig, MemoryConfigError, load_memory_config
from mindspeed_mem.plan.layers import as_ranges
from mindspeed_mem.zero.buffers.settings import ChunkSettings

GROUP = "mindspeed_mem"
_NEAR_OURS = ("recompute_num_layers", "recompute_modules")  # they are Megatron's
_TRACED = (5, 7)  # by then shapes are known, and what is only done once is behind


class FeatureError(ValueError):
    """The given options cannot be used; `problems` holds one entry for each reason."""

    def __init__(self, problems: Iterable[str]):
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n  ".join([f"{count} with the options", *self.problems]))


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
    adaptive: bool = False
    """It survives, too."""
    plan_file: Path | None = None
    """Where the adaptive plan is kept."""
    device_limit_bytes: int | None = None
    max_inflight: int | None = None
    """Passes whose activations a pipeline stage may hold."""
    zero_bubble: bool = False
    """Pipelines run gradients of weights in what would be idle time."""
    v_placement: bool = False
    """And the parts of the model lie in a V."""
    pipeline_stages: tuple[int, ...] | None = None
    """Layers of each stage, or the stage of each layer."""
    chunk: ChunkSettings = ChunkSettings()
    """What is split over data-parallel ranks, and where it lies."""
    optimizer_parallel: str | None = None
    """How the optimizer is split over data-parallel ranks: grouping or sharding."""
    trace: tuple[Path, int, int, bool] | None = None
    """The file, the first and last training step to be traced, and whether as many follow once a plan is settled on."""
    report_folder: Path | None = None
    patches: tuple[str, ...] = ()
    """Shell patterns of patch modules, in the order of application."""
    notices: tuple[str, ...] = ()
    """What is configured but has no effect."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The setting of each feature that is on, by flag."""


_in_force = Settings()


def in_force() -> Settings:
    """What is on in this process."""
    return _in_force


def put_into_force(settings: Settings) -> None:
    """For the adaptor: patches go by this from now on."""
    global _in_force
    _in_force = settings


def plan_facts(settings: Settings) -> dict[str, Any]:
    """What the plan of --adaptive-memory-optimization is found for, of all our flags: plain values by name."""
    named = {f.dest: settings.values.get(f.flag, f.default) for f in FEATURES if not f.same_plan}
    return {name: value if isinstance(value, _PLAIN) else str(value) for name, value in named.items()}


def differing(everyone: Sequence[Mapping[str, Any]], numbers: Sequence[int] | None = None) -> list[str]:
    """What ranks that train together have asked for differently, of what `for_all_ranks` says on each.

    ``numbers``: of these ranks; None: they are all there are.
    """
    found = []
    for name in everyone[0]:
        by_value: dict[Any, list[int]] = {}
        for rank, theirs in zip(numbers or range(len(everyone)), everyone, strict=True):
            by_value.setdefault(theirs[name], []).append(rank)
        if len(by_value) > 1:
            told = "; ".join(f"{value} on {_ranks(those)}" for value, those in by_value.items())
            found.append(f"{name} differs between ranks: {told}; allowed: the same on all. Give them the same options")
    return found


def for_all_ranks(settings: Settings) -> dict[str, str]:
    """What has to be the same on all ranks of a job, by name, in words."""
    plan = "given" if settings.memory is not None else "absent"
    device = settings.backend.type if settings.backend is not None else "none"
    flags = (f for f in FEATURES if not f.each_rank)
    return {
        "a memory plan (--memory-config, --recompute-layers and the like)": plan,
        "the device": device,
        **{f.flag: str(settings.values.get(f.flag, f.default)) for f in flags},
    }


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {as_ranges(numbers)}"


V_SINCE = "0.16"
_PLAIN = (bool, int, float, str, list, tuple, type(None))


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
    # With another stack besides, layers count on from the first one's: their number is not there.
    more = getattr(args, "decoder_seq_length", None) or getattr(args, "mtp_num_layers", None)
    num_layers = None if more else getattr(args, "num_layers", None)
    memory = _load(values["--memory-config"], flags, num_layers, problems)
    adapts = values["--adaptive-memory-optimization"]
    survives = values["--survive-oom"] or adapts
    swaps, recomputes = memory is not None and memory.swap.swap, memory is not None and memory.recompute.active
    notices = () if memory is None else memory.notices
    notices += (*_chunk_flags_without_effect(values), *_without_effect(memory, values, survives))
    if memory is not None and not (swaps or recomputes):
        others = ("--survive-oom", "--adaptive-memory-optimization", "--memory-trace", "--memory-report")
        on = [f for f in on if not set(MEMORY_PATCHES) & set(f.patches) or f.flag in others]
        memory = None
    problems += [why for f in on if (why := too_old(f, values[f.flag]))]
    problems += conflicts(args, [f.flag for f in on], recomputes=recomputes)
    given = [f.flag for f in FEATURES if getattr(args, f.dest, f.default) not in (f.default, None)]
    problems += [
        f"{f.flag} needs {' or '.join(f.needs_features)}: it has no effect otherwise. Add {f.needs_features[0]}, or "
        f"leave {f.flag} out"
        for f in FEATURES
        if f.needs_features and f.flag in given and not set(f.needs_features) & set(given)
    ]
    backend = _device(values["--device"], bool(given) or always, problems)
    if survives and backend is not None and (allocator := backend.foreign_allocator()):
        flag = "--adaptive-memory-optimization" if adapts else "--survive-oom"
        problems.append(f"{flag} cannot be combined with {allocator}: both manage memory. Leave one of them out")
    if adapts and (no_solver := requirements.without_solver()):
        problems.append(f"--adaptive-memory-optimization: {no_solver}")
    if problems:
        raise FeatureError(problems)
    patches = [*(ON_HOST if backend and backend.is_host else ()), *(p for f in on for p in f.patches)]
    patches += RECOMPUTE_PATCHES if recomputes else ()
    v = values["--pipeline-schedule"] == "v"
    patches += V_PATCHES if v else ()
    notices += tuple(requirements.untested({"megatron-core": upstream.version_of("megatron")}) if patches else ())
    limit = _bytes(values["--swap-host-memory-gib"]) if swaps or survives else None
    folder = values["--memory-report"]
    traced = values["--memory-trace-steps"]
    trace = values["--memory-trace"] or (None if folder is None else folder / "trace.json")
    return Settings(
        on=tuple(f.flag for f in on),
        backend=backend,
        memory=memory,
        host_limit_bytes=limit,
        survive_oom=survives,
        adaptive=adapts,
        plan_file=values["--adaptive-plan-file"],
        device_limit_bytes=_bytes(values["--device-memory-gib"]),
        max_inflight=values["--max-inflight-microbatches"],
        zero_bubble=values["--pipeline-schedule"] != "1f1b",
        v_placement=v,
        pipeline_stages=values["--pipeline-stages"],
        chunk=_chunk(values, backend),
        optimizer_parallel=values["--optimizer-parallel"],
        trace=None if trace is None else (trace, *(traced or _TRACED), adapts and traced is None),
        report_folder=folder,
        patches=tuple(dict.fromkeys(patches)),
        notices=notices,
        values={f.flag: values[f.flag] for f in on},
    )


def too_old(feature: Feature, value: Any = None) -> str | None:
    """Why the installed megatron-core cannot carry `feature`, with this value of its flag; None if it can, or is not
    installed."""
    version = upstream.version_of("megatron")
    if upstream.within("megatron", since=feature.since):
        if (feature.flag, value) != ("--pipeline-schedule", "v") or upstream.within("megatron", since=V_SINCE):
            return None
        return (
            f"--pipeline-schedule v needs megatron-core {V_SINCE} or newer, and {version} is "
            "installed: it decides elsewhere which layers a model chunk has. Install a newer one, or give zb"
        )
    return (
        f"{feature.flag} needs megatron-core {feature.since} or newer, and {version} is installed: "
        f"{feature.before_that}. Install a newer one, or leave {feature.flag} out"
    )


def _without_effect(memory: MemoryConfig | None, values: Mapping[str, Any], survives: bool) -> list[str]:
    """What a plan, or a flag beside it, says about swap and changes nothing."""
    if memory is None:
        return []
    found = []
    swaps, recomputes = memory.swap.swap, memory.recompute.active
    puts_off = values["--split-backward"] or values["--pipeline-schedule"] != "1f1b"
    if swaps and memory.swap.output_gradients and not puts_off:
        found.append(
            "swap_config.output_gradients has no effect: without --split-backward or --pipeline-schedule zb or v "
            "gradients of weights are computed at once"
        )
    if recomputes and not (swaps or survives) and values["--swap-host-memory-gib"] is not None:
        found.append("--swap-host-memory-gib has no effect: nothing is swapped")
    if not (swaps or recomputes) and values["--memory-config"] is not None:
        found.append(f"{_name(values['--memory-config'])}: nothing is swapped (swap_config.swap) or recomputed")
    return found


def _chunk_flags_without_effect(values: Mapping[str, Any]) -> list[str]:
    """What is said about chunks and changes nothing."""
    stage, placement = values["--chunk-zero-stage"], values["--placement-policy"]
    if stage is None:
        return []
    policy = "device" if placement is None else placement.policy
    flags = [flag for flag in ("--host-optimizer-step", "--chunk-host-memory-gib") if policy == "device"]
    found = [(flag, "nothing rests on the host (--placement-policy)") for flag in flags]
    if stage == 1:
        found.append(("--chunk-reduce-each-microbatch", "--chunk-zero-stage 1 keeps gradients whole"))
    if stage == 1 and policy not in ("static", "auto"):
        sizes = ("--min-chunk-size-mib", "--chunk-search-range-mib", "--chunk-hidden-dim")
        found += [(flag, "--chunk-zero-stage 1 leaves Megatron's buckets as they are") for flag in sizes]
    idle = [f"{flag} has no effect: {why}" for flag, why in found if values[flag] not in (None, False, "device")]
    if stage < 3 and placement is not None and placement.budget is not None:
        idle.append(
            f"the budget of --placement-policy {policy} has no effect: --chunk-zero-stage {stage} gathers nothing"
        )
    return idle


def _chunk(values: Mapping[str, Any], backend: Backend | None) -> ChunkSettings:
    """Sizes are given in MiB of bf16, and kept in elements."""
    if values["--chunk-zero-stage"] is None:
        return ChunkSettings()
    minimum, span = values["--min-chunk-size-mib"], values["--chunk-search-range-mib"]
    given = {
        "placement": values["--placement-policy"],
        "host_limit_bytes": _bytes(values["--chunk-host-memory-gib"]),
        "min_chunk_size": None if minimum is None else int(minimum * 2**19),
        "search_range": None if span is None else int(span * 2**19),
        "hidden_size": values["--chunk-hidden-dim"],
    }
    return ChunkSettings(
        stage=values["--chunk-zero-stage"],
        backend=backend,
        reduce_each=values["--chunk-reduce-each-microbatch"],
        step_on_host=values["--host-optimizer-step"] == "host",
        **{name: value for name, value in given.items() if value is not None},
    )


def _bytes(number: float | None) -> int | None:
    return None if number is None else int(number * 2**30)


def check_configs(settings: Settings, configs: Iterable[Any]) -> None:
    """Raise FeatureError with all that configs of megatron-core have and `settings` cannot run beside."""
    recomputes = settings.memory is not None and settings.memory.recompute.active
    problems = [one for config in configs for one in conflicts(config, settings.on, recomputes=recomputes)]
    if problems:
        raise FeatureError(dict.fromkeys(problems))


def conflicts(args: Any, on: Iterable[str], *, recomputes: bool = False) -> list[str]:
    """Why the features whose flags are in `on` cannot run with `args`, a namespace or a config of megatron-core.

    What a feature needs is not looked for in a TransformerConfig, which has defaults that nobody chose.
    ``recomputes``: the file behind --memory-config asks for recompute.
    """
    found: list[str] = []
    barred: dict[Option, list[str]] = {}
    for feature in (f for f in FEATURES if f.flag in set(on)):
        for option in feature.needs:
            known = isinstance(args, Namespace) or option.origin != "megatron-core"
            if known and hasattr(args, option.dest) and not option.holds(args):
                found.append(f"{feature.flag} needs {option}: {option.why}. Add {option}, or leave {feature.flag} out")
        for option in (*feature.bars, *(feature.recompute_bars if recomputes else ())):
            if option.holds(args):
                barred.setdefault(option, []).append(feature.flag)
    return found + [
        f"{' and '.join(flags)} cannot be combined with {option.given(args)}: {option.why}. Leave one of them out"
        + (f", or give {option.flag} {option.off}" if option.off is not None else "")
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
        how: dict[str, Any] = {"nargs": "+", "action": "extend"} if feature.many else {}
        how = {"action": "store_true"} if feature.read is bool else how
        parser.add_argument(feature.flag, default=SUPPRESS, **how)
    ours = {f.flag for f in FEATURES}
    named = [option for f in FEATURES for option in (*f.needs, *f.bars) if option.flag not in ours]
    others = {flag: dest_of(flag) for option in named for flag in option.asks}
    others |= {option.flag: option.dest for option in named}
    model = ("--num-layers", "--decoder-seq-length", "--mtp-num-layers")
    for flag, dest in sorted({**others, **{flag: dest_of(flag) for flag in model}}.items()):
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
        said = str(MemoryConfigError(error.problems, _name(file))).replace("\n", "\n  ")
        problems += error.problems if file is None else [said]
        return None


def _name(file: Any) -> str:
    """Of what --memory-config was given: a file, or what one contains."""
    return "memory_config" if isinstance(file, Mapping) else f"--memory-config {file}"


def _device(name: str, wanted: bool, problems: list[str]) -> Backend | None:
    if not wanted and not os.environ.get("MINDSPEED_MEM_DEVICE", "").strip():
        return None
    try:
        return get_backend(name)
    except DeviceError as error:
        problems.append(str(error))
        return None


def misspelt(arguments: Iterable[str]) -> list[str]:
    """What to say of words of a command line that look very much like one of our flags, and are nobody's."""
    ours, theirs = [f.flag for f in FEATURES], _known() - {f.dest for f in FEATURES}
    words = dict.fromkeys(word.partition("=")[0] for word in arguments if word.startswith("--"))
    others = [word for word in words if word not in ours and dest_of(word) not in theirs]
    near = {word: difflib.get_close_matches(word, ours, n=1, cutoff=0.85) for word in others}
    return [f"{word} is no flag of mindspeed_mem; did you mean {match[0]}?" for word, match in near.items() if match]


def _misspelt(args: Mapping[str, Any]) -> list[str]:
    """Keys that look like one of ours; others belong to the caller."""
    ours, known = [f.dest for f in FEATURES], _known()
    near = {key: difflib.get_close_matches(str(key), ours, n=1, cutoff=0.8) for key in args if key not in known}
    return [f"{key!r} is not a setting; did you mean {match[0]!r}?" for key, match in near.items() if match]


def nothing_of_ours(args: Mapping[str, Any]) -> str:
    """What to say of a mapping none of whose keys is a setting; empty if it has any, or says nothing."""
    ours = [f.dest for f in FEATURES]
    if not args or not args.keys().isdisjoint(ours):
        return ""
    given = ", ".join(map(repr, [*args][:4])) + ", ..." * (len(args) > 4)
    return f"configure: none of the keys given ({given}) is a setting of mindspeed_mem; allowed: {', '.join(ours)}"


def _known() -> set[str]:
    """Our settings, and those of others that we know."""
    theirs = (option.dest for f in FEATURES for option in (*f.needs, *f.bars))
    return {*(f.dest for f in FEATURES), *_NEAR_OURS, *theirs}
