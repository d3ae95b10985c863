"""The file behind ``--memory-config``: MindFormers' `swap_config` and `recompute_config`, typed and checked.

Nothing here knows a model; `resolve` in resolving.py joins the configuration with a model's operators.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mindspeed_mem import requirements
from mindspeed_mem.plan.checks import Checker, Distance, MemoryConfigError, given, suggestion
from mindspeed_mem.plan.layers import Layers, Stages
from mindspeed_mem.plan.recompute_config import KINDS, RecomputeConfig, read_recompute

MINDFORMERS_SECTIONS = frozenset(
    """
    auto_trans_ckpt auto_tune autotune_per_step callbacks context do_eval eval_callbacks eval_dataset eval_dataset_task
    eval_epoch_interval eval_step_interval filepath_prefix init_start_profile layer_decay layer_scale load_checkpoint
    load_ckpt_async load_ckpt_format lr_scale lr_scale_factor lr_schedule memory_usage metric micro_batch_interleave_num
    model moe_config monitor_config only_save_strategy optimizer output_dir parallel parallel_config pipeline_config
    pretrained_model_dir print_separate_loss processor profile profile_communication profile_memory profile_start_step
    profile_stop_step remote_save_url remove_redundancy resume_training run_mode runner_config runner_wrapper seed
    src_strategy_path_or_dir time_config train_dataset train_dataset_task trainer use_legacy use_parallel
    """.split()
)
"""Top-level keys of MindFormers' training files, which say nothing about memory plans."""

_SECTIONS = ("swap_config", "recompute_config")
_SWAP_KEYS = (
    "swap",
    "default_prefetch",
    "layer_swap",
    "op_swap",
    "activations",
    "swap_recompute_inputs",
    "pp_aware",
    "window_bytes",
    "smallest_bytes",
    "idle_prefetch",
    "output_gradients",
)
_MCORE_KEYS = {"cpu_offloading": "swap", "cpu_offloading_num_layers": "layer_swap"}
"""What the models of MindFormers that are built like Megatron's call these keys."""


@dataclass(frozen=True, kw_only=True)
class SwapEntry:
    """What an entry of `layer_swap` and one of `op_swap` both say."""

    layers: Layers
    """True for all, or layers by number or with their stack's name."""
    backward_prefetch: Distance
    """Distance in operators, at least 1, or Auto: release in forward, start of the copy back in backward."""
    activations: str
    """``produced``, ``saved`` or ``both``."""
    stages: Stages = True
    """Only those of the layers that are on these pipeline stages, counted from 0; True: on all."""
    entry: str
    """Where it stands in the file, such as ``swap_config.layer_swap[0]``."""


class LayerSwap(SwapEntry):
    """One entry of `layer_swap`: swap everything in these layers."""


@dataclass(frozen=True, kw_only=True)
class OpSwap(SwapEntry):
    """One entry of `op_swap`: swap these operators in these layers."""

    op_name: tuple[str, ...]
    r"""Patterns, each a path of regular expressions joined by ``\.``."""


@dataclass(frozen=True, kw_only=True)
class SwapConfig:
    """The section `swap_config`."""

    swap: bool = False
    """False: nothing below has any effect."""
    default_prefetch: Distance = 1
    """Distance of the default policy, which applies if `layer_swap` and `op_swap` are both None."""
    layer_swap: tuple[LayerSwap, ...] | None = None
    op_swap: tuple[OpSwap, ...] | None = None
    activations: str = "produced"
    """What an entry moves that does not say it: ``produced``, ``saved`` or ``both``."""
    swap_recompute_inputs: bool = False
    """Also swap what a recomputed region takes as its input."""
    pp_aware: bool = True
    """Pipeline stages do not swap what they have room for below the highest stage's peak."""
    window_bytes: int | None = None
    """What copies to the host that are late at their release points may hold before computation waits for them; None: a
    share of the device's memory (`reserve.late_copies`)."""
    smallest_bytes: int | None = None
    """Smaller activations are not swapped; None: those whose copies would take longer to start than to run."""
    idle_prefetch: bool = False
    """Pipeline stages bring more back between two passes, as far as an earlier backward has begun with as much."""
    output_gradients: bool = False
    """Gradients of linear layers' outputs are on the host while gradients of weights, which are put off, need them."""


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """A checked memory configuration."""

    swap: SwapConfig = field(default_factory=SwapConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    notices: tuple[str, ...] = ()
    """What is configured but has no effect, one line each; to be logged once, on rank 0."""
    source: str = "memory configuration"
    """The file, for messages."""


def load_memory_config(
    source: str | os.PathLike[str] | Mapping[str, Any] | None,
    *,
    num_layers: int | None = None,
    flags: Mapping[str, tuple[str, Any]] | None = None,
) -> MemoryConfig:
    """Read and check a memory configuration.

    Args:
        source: a YAML file, what such a file contains, or None for "everything off".
        num_layers: the model's layers, over all pipeline stages; None: layer indices are not range-checked here.
        flags: what flags add to `recompute_config`: by its key (`recompute`, `select_recompute`,
            `select_comm_recompute`) the flag and its value, whose numbers are always layer indices.

    Raises:
        MemoryConfigError: with all problems, each with its path, what was given and what is allowed.
    """
    check = Checker(num_layers)
    notices: list[str] = []
    name = "memory configuration"
    content: Any = source
    if source is None:
        name, content = "command line" if flags else name, {}
    elif isinstance(source, str | os.PathLike):
        name = os.fspath(source)
        content, problems = _read(name)
        check.problems += problems
    if not isinstance(content, Mapping):
        if not check.problems:
            check.wrong(name, content, f"a mapping with the keys {', '.join(_SECTIONS)}")
        raise MemoryConfigError(check.problems, name)

    _check_sections(content, check, notices)
    swap = _read_swap(content.get("swap_config"), check, notices)
    with_swap = swap.swap is True
    recompute = read_recompute(content.get("recompute_config"), flags or {}, with_swap, check, notices)
    if check.problems:
        raise MemoryConfigError(check.problems, name)
    if not recompute.active:
        selects = swap.layer_swap or swap.op_swap or swap.output_gradients
        if with_swap and (swap.layer_swap, swap.op_swap) != (None, None) and not selects:
            notices.append("swap_config.swap is True, but layer_swap and op_swap are empty: nothing is swapped")
        if with_swap and swap.swap_recompute_inputs:
            notices.append("swap_config.swap_recompute_inputs has no effect: nothing is recomputed")
        if source is not None and "swap_config" not in content:
            notices.append("there is no swap_config: nothing is swapped")
    return MemoryConfig(swap=swap, recompute=recompute, notices=tuple(notices), source=name)


def _read(name: str) -> tuple[Any, list[str]]:
    """The content of a file, or None, and what is wrong with it."""
    reason = requirements.absent("PyYAML")
    if reason is not None:
        return None, [f"{name}: {reason}"]
    from mindspeed_mem.plan.files import read_yaml

    return read_yaml(name, _SECTIONS)


def _check_sections(content: Mapping[Any, Any], check: Checker, notices: list[str]) -> None:
    """Other sections are errors, except in a MindFormers training file, which may be used as it is."""
    others = [key for key in content if key not in _SECTIONS]
    from_mindformers = any(key in MINDFORMERS_SECTIONS for key in others if isinstance(key, str))
    ignored = []
    for key in others:
        near = suggestion(key, _SECTIONS, cutoff=0.8)  # MindFormers has other names that end in _config
        if key in _SWAP_KEYS or key in _MCORE_KEYS:
            check.problem(str(key), "unknown section; it belongs below swap_config, indented")
        elif key in KINDS:
            check.problem(str(key), "unknown section; it belongs below recompute_config, indented")
        elif from_mindformers and (near is None or key in MINDFORMERS_SECTIONS):
            ignored.append(str(key))
        else:
            hint = f"did you mean {near!r}? " if near else ""
            check.problem(str(key), f"unknown section; {hint}allowed: {', '.join(_SECTIONS)}")
    if ignored:
        notices.append(
            f"this is a MindFormers training file: only {' and '.join(_SECTIONS)} are used, "
            f"ignored: {', '.join(ignored)}"
        )


def _read_swap(section: Any, check: Checker, notices: list[str]) -> SwapConfig:
    path = "swap_config"
    if section is None:
        return SwapConfig()
    found = check.section(section, path, (*_SWAP_KEYS, *_MCORE_KEYS))
    called = {key: key for key in _SWAP_KEYS}
    for other, key in _MCORE_KEYS.items():
        if other in found and key in found:
            check.problem(f"{path}.{other}", f"got {given(found[other])}, and {key} is given; allowed: one of the two")
        elif other in found:
            called[key], found[key] = other, found[other]
    readers = {
        "swap": check.boolean,
        "default_prefetch": check.distance,
        "activations": check.activations,
        "swap_recompute_inputs": check.boolean,
        "pp_aware": check.boolean,
        "window_bytes": check.size,
        "smallest_bytes": check.size,
        "idle_prefetch": check.boolean,
        "output_gradients": check.boolean,
    }
    values: dict[str, Any] = {
        key: read(found[key], f"{path}.{called[key]}") for key, read in readers.items() if key in found
    }
    activations = values.get("activations") or "produced"
    for key in ("layer_swap", "op_swap"):
        values[key] = _read_entries(found.get(key), f"{path}.{called[key]}", activations, check)
    config = SwapConfig(**values)
    if not check.problems:
        notices += _without_effect(config, found, called)
    return config


def _without_effect(config: SwapConfig, found: Mapping[str, Any], called: Mapping[str, str]) -> list[str]:
    """What is set in `swap_config` but changes nothing."""
    entries = [entry for key in (config.layer_swap, config.op_swap) if key for entry in key]
    notices = []
    if not config.swap:
        if set_here := [key for key in ("layer_swap", "op_swap") if found.get(key)]:
            names = " and ".join(f"swap_config.{called[key]}" for key in set_here)
            notices.append(f"{names} has no effect, since swap_config.{called['swap']} is not True")
        return notices
    if (config.layer_swap, config.op_swap) != (None, None):
        if config.default_prefetch != 1 and not config.swap_recompute_inputs:
            notices.append(
                "swap_config.default_prefetch has no effect, since layer_swap or op_swap is given; "
                "each of their entries has its own backward_prefetch"
            )
    notices += [f"{entry.entry} has no effect: its list of layers is empty" for entry in entries if entry.layers == ()]
    return notices


def _read_entries(value: Any, path: str, default_activations: str, check: Checker) -> tuple[Any, ...] | None:
    """The entries of `layer_swap` or `op_swap`: None, a list of mappings, or one mapping."""
    if value is None:
        return None
    by_name = path.endswith("op_swap")
    required = ("op_name", "backward_prefetch", "layers") if by_name else ("backward_prefetch", "layers")
    if isinstance(value, Mapping):
        items = [(path, value)]
    elif isinstance(value, list | tuple):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    else:
        check.wrong(
            path, value, f"a list of mappings, each with the keys {', '.join(required)}; one such mapping; None"
        )
        return ()
    readers = {
        "op_name": check.patterns,
        "backward_prefetch": check.distance,
        "layers": check.layers,
        "activations": check.activations,
        "stages": check.stages,
    }
    entries = []
    for where, item in items:
        before = len(check.problems)
        found = check.section(item, where, (*required, "activations", "stages"), required)
        values: dict[str, Any] = {"entry": where, "activations": default_activations}
        values |= {key: read(found[key], f"{where}.{key}") for key, read in readers.items() if key in found}
        if len(check.problems) == before and found["layers"] is not False:
            entries.append(OpSwap(**values) if by_name else LayerSwap(**values))
    _check_distances(entries, check)
    return tuple(entries)


def _check_distances(entries: Sequence[SwapEntry], check: Checker) -> None:
    """Entries for one operator add up; if one of them takes all layers, all must have its distance."""
    groups: dict[str, list[SwapEntry]] = {}
    for entry in entries:
        for name in dict.fromkeys(entry.op_name) if isinstance(entry, OpSwap) else ("layer_swap",):
            groups.setdefault(name, []).append(entry)
    for name, group in groups.items():
        everywhere = next((entry for entry in group if entry.layers is True and entry.stages is True), None)
        for entry in group:
            if everywhere is not None and entry.backward_prefetch != everywhere.backward_prefetch:
                check.problem(
                    f"{entry.entry}.backward_prefetch",
                    f"got {entry.backward_prefetch}; allowed: {everywhere.backward_prefetch}, since "
                    f"{everywhere.entry} is for {name!r} as well and says layers: True",
                )
