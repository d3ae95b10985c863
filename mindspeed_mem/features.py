"""THE table of features: what each flag switches on, what it needs, and what it cannot run beside.

`check` turns arguments into `Settings`, or raises one FeatureError with every reason at once.
"""

from __future__ import annotations

import difflib
import math
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_mem.device import Backend, DeviceError, get_backend
from mindspeed_mem.plan import MemoryConfig, MemoryConfigError, load_memory_config

GROUP = "mindspeed_mem"


class FeatureError(ValueError):
    """The given options cannot be used; `problems` holds one entry for each reason."""

    def __init__(self, problems: Iterable[str]):
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n  ".join([f"{count} with the options", *self.problems]))


@dataclass(frozen=True, kw_only=True)
class Option:
    """A condition on somebody else's option; without a value: that it is set to anything but off."""

    flag: str
    origin: str
    """Whose it is: ``megatron-core`` (a field of TransformerConfig, flag or not), ``megatron-lm`` or ``mindspeed``."""
    value: str | None = None
    """Holds only for this value."""
    off: str | None = None
    """This value, too, means off."""
    why: str

    @property
    def dest(self) -> str:
        return _dest(self.flag)

    def holds(self, args: Any) -> bool:
        """Whether `args`, a namespace or a TransformerConfig, meet the condition."""
        actual = getattr(args, self.dest, None)
        if self.value is not None:
            return str(actual) == self.value
        return bool(actual) and str(actual) not in ("False", "0", self.off)

    def __str__(self) -> str:
        return self.flag if self.value is None else f"{self.flag} {self.value}"


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One flag and all that hangs on it."""

    flag: str
    help: str
    read: Callable[[Any], Any] = str
    """Turns what was given into the setting; raises ValueError saying what is allowed. `bool` makes it a switch."""
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    default: Any = None
    """The value that means off."""
    patches: tuple[str, ...] = ()
    """Modules of mindspeed_mem.patches, as shell patterns."""
    needs: tuple[Option, ...] = ()
    """Each must hold where the arguments know the option."""
    needs_feature: str | None = None
    bars: tuple[Option, ...] = ()
    """None may hold."""

    @property
    def dest(self) -> str:
        return _dest(self.flag)

    def add_to(self, group: Any) -> None:
        if self.read is bool:
            group.add_argument(self.flag, action="store_true", help=self.help)
        else:
            kwargs = {"metavar": self.metavar} if self.choices is None else {"choices": self.choices}
            kwargs |= {"type": self.read} if self.read is not str and self.choices is None else {}
            group.add_argument(self.flag, default=self.default, help=self.help, **kwargs)


def _dest(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _gib(value: Any) -> float:
    """Gibibytes: a finite number above 0."""
    number = None if isinstance(value, bool) else float(value)
    if number is None or not (math.isfinite(number) and number > 0):
        raise ValueError("a number above 0")
    return number


def _source(value: Any) -> Any:
    """A YAML file, or the mapping that such a file contains."""
    if not isinstance(value, str | os.PathLike | Mapping):
        raise ValueError("a file name, or a mapping with what such a file contains")
    return value


def _core(flag: str, why: str, **condition: str) -> Option:
    return Option(flag=flag, origin="megatron-core", why=why, **condition)


def _lm(flag: str, why: str) -> Option:
    return Option(flag=flag, origin="megatron-lm", why=why)


def _ms(flag: str, why: str) -> Option:
    return Option(flag=flag, origin="mindspeed", why=why)


_SAME = "both move the same activations"
_GRAPH = "replaying a graph skips the Python code that swaps"
_NOT_YET = "not supported yet"

FEATURES = (
    Feature(
        flag="--device",
        choices=("auto", "cpu", "cuda", "npu"),
        default="auto",
        help="device to train on; auto (default) takes what MINDSPEED_MEM_DEVICE says, else the first present of npu, "
        "cuda, cpu. On cpu, megatron-core is made to train on host memory with gloo",
    ),
    Feature(
        flag="--memory-config",
        read=_source,
        metavar="FILE",
        help="YAML file naming the layers and operators whose activations are swapped to host memory (swap_config, "
        "with MindFormers' field names)",
        patches=("swap_*",),
        bars=(
            _core(
                "--recompute-granularity", "a fully recomputed layer keeps nothing that could be swapped", value="full"
            ),
            _core("--fine-grained-activation-offloading", _SAME),
            _core("--cpu-offloading", _SAME),
            _core("--cpu-offloading-num-layers", _SAME),
            _core("--cuda-graph-impl", _GRAPH, off="none"),
            _core("--enable-cuda-graph", _GRAPH),
            _core("--external-cuda-graph", _GRAPH),
            _core("--overlap-moe-expert-parallel-comm", _NOT_YET),
            _core("--moe-shared-expert-overlap", "it computes on a second stream, which swap does not follow"),
            _lm("--use-megatron-fsdp", _NOT_YET),
            _lm("--use-torch-fsdp2", _NOT_YET),
            _lm("--use-legacy-models", "the legacy models have none of megatron-core's layers"),
            _lm("--yaml-cfg", "it replaces the command line, this option included"),
            _ms("--swap-attention", _SAME),
            _ms("--smart-swap", _SAME),
            _ms("--recompute-in-bubble", _NOT_YET),
            _ms("--recompute-in-advance", _NOT_YET),
            _ms("--moe-fb-overlap", _NOT_YET),
        ),
    ),
    Feature(
        flag="--swap-host-memory-gib",
        read=_gib,
        metavar="GIB",
        help="host memory that each rank may fill with swapped activations; beyond it an activation stays on the "
        "device (default: no limit)",
        needs_feature="--memory-config",
    ),
    Feature(
        flag="--sdpa-attention",
        read=bool,
        default=False,
        help="run core attention of the local layer spec by torch's scaled_dot_product_attention",
        patches=("sdpa_*",),
        needs=(_core("--transformer-impl", "the other layer specs bring their own attention", value="local"),),
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
    """Given only if it swaps anything."""
    host_limit_bytes: int | None = None
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
    memory, notices = None, ()
    if values["--memory-config"] is not None:
        memory = _load(values["--memory-config"], getattr(args, "num_layers", None), problems)
    if memory is not None:
        notices = memory.notices
        if not memory.swap.swap:
            notices += (f"--memory-config {memory.source}: swap_config.swap is False, so nothing is swapped",)
            on = [f for f in on if f.flag != "--memory-config"]
            memory = None
    problems += conflicts(args, [f.flag for f in on])
    given = [f.flag for f in FEATURES if getattr(args, f.dest, f.default) not in (f.default, None)]
    problems += [
        f"{f.flag} needs {f.needs_feature}: it limits nothing otherwise. Add {f.needs_feature}, or leave {f.flag} out"
        for f in FEATURES
        if f.needs_feature and f.flag in given and f.needs_feature not in given
    ]
    backend = _device(values["--device"], bool(given) or always, problems)
    if problems:
        raise FeatureError(problems)
    patches = [*BY_DEVICE.get(backend.type if backend else "", ()), *(p for f in on for p in f.patches)]
    gib = values["--swap-host-memory-gib"]
    return Settings(
        on=tuple(f.flag for f in on),
        backend=backend,
        memory=memory,
        host_limit_bytes=None if gib is None or memory is None else int(gib * 2**30),
        patches=tuple(dict.fromkeys(patches)),
        notices=notices,
    )


def conflicts(args: Any, on: Iterable[str]) -> list[str]:
    """Why the features whose flags are in `on` cannot run with `args`, a namespace or a TransformerConfig.

    What a feature needs is looked for in a namespace only: a TransformerConfig has defaults that nobody chose.
    """
    found = []
    for feature in (f for f in FEATURES if f.flag in set(on)):
        for option in feature.needs:
            if isinstance(args, Namespace) and hasattr(args, option.dest) and not option.holds(args):
                found.append(f"{feature.flag} needs {option}: {option.why}. Add {option}, or leave {feature.flag} out")
        for option in feature.bars:
            if option.holds(args):
                found.append(f"{feature.flag} cannot be combined with {option}: {option.why}. Leave one of them out")
    return found


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
    parser = _Scanner(add_help=False, allow_abbrev=False, argument_default=None)
    for feature in FEATURES:
        how = {"action": "store_true"} if feature.read is bool else {}
        parser.add_argument(feature.flag, default=_NOT_GIVEN, **how)
    others = {option.flag for f in FEATURES for option in (*f.needs, *f.bars)}
    for flag in sorted({*others, "--num-layers"}):
        parser.add_argument(flag, nargs="?", const=True, default=_NOT_GIVEN)
    found = {k: v for k, v in vars(parser.parse_known_args(arguments)[0]).items() if v is not _NOT_GIVEN}
    layers = str(found.pop("num_layers", ""))
    return Namespace(**found, **({"num_layers": int(layers)} if layers.isdecimal() else {}))


_NOT_GIVEN = object()


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


def _load(source: Any, num_layers: Any, problems: list[str]) -> MemoryConfig | None:
    try:
        return load_memory_config(source, num_layers=num_layers if isinstance(num_layers, int) else None)
    except MemoryConfigError as error:
        problems.append(f"--memory-config {error}".replace("\n", "\n  "))
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
    known = {*ours, *(option.dest for f in FEATURES for option in (*f.needs, *f.bars))}
    near = {key: difflib.get_close_matches(str(key), ours, n=1, cutoff=0.8) for key in args if key not in known}
    return [f"{key!r} is not a setting; did you mean {match[0]!r}?" for key, match in near.items() if match]
