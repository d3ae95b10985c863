"""The first import of a Megatron pretrain script: reads our flags and applies what they ask for.

    import mindspeed_mem.megatron_adaptor as mem

Megatron-LM's own scripts need no more than that line. A script built on megatron-core alone also calls
``mem.add_arguments(parser)`` and ``mem.configure(args)``. If none of our flags is given, nothing is patched.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import importlib
import logging
import os
import pkgutil
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from mindspeed_mem import features, patches, ranks
from mindspeed_mem.activation.functions import adapt_mem_func_wrapper
from mindspeed_mem.activation.observe.meter import ActivationMeter
from mindspeed_mem.device import Backend, delegation, numa
from mindspeed_mem.experimental import delegating
from mindspeed_mem.features import FeatureError, Settings
from mindspeed_mem.patching import REGISTRY, Patch, PatchError, registry
from mindspeed_mem.report import log
from mindspeed_mem.zero.buffers.settings import ChunkSettings

__all__ = ["FeatureError", "activation_meter", "adapt_mem_func_wrapper", "add_arguments", "configure", "report"]

logger = logging.getLogger(__name__)


_FOR_METER = "activation_saved_tensors"


class _State:
    """What is in force in this process."""

    given = Namespace()
    """What the command line said at import."""
    wants_help = False
    settings = Settings()
    modules: tuple[str, ...] = ()
    """The patch modules applied."""
    engine: tuple = ()
    """What the engine was started with."""
    trace: tuple | None = None
    """What is traced, and the folder of the report."""
    limited: Any = None
    limit: int | None = None
    """Bytes of device memory to which this process, on the backend `limited`, was limited."""
    observing = False
    metered = False
    """Somebody counts activations, with hooks of the same kind as the engine's."""


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add the argument group "mindspeed_mem" with those flags that the parser lacks; returns the parser."""
    return features.add_arguments(parser)


def configure(args: Namespace | Mapping[str, Any]) -> None:
    """Put `args` into force: check them, apply the patches that they ask for, start the engine.

    Call it on every rank, after the device is chosen and before the model is built. Calling it again with the same
    settings does nothing; other settings replace the earlier ones.

    Args:
        args: a parser's namespace, or a mapping from our flags' names (``memory_config``, ``swap_host_memory_gib``,
            ``survive_oom``, ...) to values; ``memory_config`` may be a file or a mapping with the contents of one.
            Flags that are not in `args` are taken from the command line.

    Raises:
        FeatureError: a ValueError that lists everything that is wrong.
    """
    given = vars(_State.given)
    merged = {**given, **args} if isinstance(args, Mapping) else Namespace(**{**given, **vars(args)})
    settings = _check(merged)
    if isinstance(args, Mapping) and os.environ.get("RANK", "0") == "0" and (line := features.nothing_of_ours(args)):
        logger.warning(line)
    _refuse_beside_attached(settings)
    _apply(settings)
    _start_engine(settings)


def report(page: str | os.PathLike | None = None) -> str:
    """Print, on rank 0, what was swapped and recomputed so far on all ranks; returns that text ("" if there is none).

    Collective: every rank of the default process group must call it.

    Args:
        page: a folder where rank 0 writes a page about the run, and the data that it shows (default: that of
            --memory-report). With several ranks, the page is written when rank 0's process ends. If something cannot be
            written there, a message says so.
    """
    from mindspeed_mem.activation import engine as engines
    from mindspeed_mem.report.chunk_report import format_chunks
    from mindspeed_mem.report.swap_report import format_report
    from mindspeed_mem.zero.buffers import runtime

    parts: list[str] = []
    found: list[list[Any]] = []
    for running, formatted in ((engines.current(), format_report), (runtime.current(), format_chunks)):
        everyone = ranks.gather(None if running is None else running.report())
        rows: list[Any] = [one for one in everyone if one is not None]
        parts += [formatted(rows)] if rows and ranks.number() == 0 else []
        found.append(rows)
    text = "\n".join(filter(None, parts))
    if text:
        print(text, flush=True)
    folder = _State.settings.report_folder if page is None else Path(page)
    if folder is not None and ranks.number() == 0:
        from mindspeed_mem.report import run_file

        of_engines, of_chunks = found
        settings = _State.settings
        trace = None if settings.trace is None else settings.trace[0]
        run_file.write(folder, of_engines, of_chunks, settings.values, settings.notices, trace)
    return text


def activation_meter(backend: Backend) -> ActivationMeter:
    """A context manager, for around forward and backward, that counts the bytes of activations kept for backward, with
    or without a plan."""
    _State.metered = True
    modules = patch_modules([_FOR_METER])
    for module in modules:
        importlib.import_module(module)
    REGISTRY.apply(modules)
    return ActivationMeter(backend)


def _finished() -> None:
    """Megatron-LM's pretrain has ended, and leaves the process group as it is; the script may go on with it."""
    report()
    if ranks.is_initialized() and dist.get_backend() == "gloo":
        ranks.leave_at_exit()


def observe() -> None:
    """Watch all operators of the training to come and move nothing, whatever the flags say."""
    from mindspeed_mem.activation import engine as engines
    from mindspeed_mem.plan import load_memory_config

    _State.observing = True
    settings = _check(_State.given)
    _apply(settings)
    assert settings.backend is not None  # while observing, one is always chosen
    engines.start(load_memory_config(None), settings.backend, None, watch_only=True)


def patch_modules(patterns: Iterable[str]) -> list[str]:
    """The modules of mindspeed_mem.patches that match these shell patterns, in the order of the patterns."""
    names = sorted(module.name for module in pkgutil.iter_modules(patches.__path__))
    found = [name for pattern in patterns for name in fnmatch.filter(names, pattern)]
    return [f"{patches.__name__}.{name}" for name in dict.fromkeys(found)]


def refuse(error: Exception) -> NoReturn:
    """End this process with status 2, as for any wrong command line; the message appears once per machine."""
    rank = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))
    if rank == "0" or not rank.isdecimal():
        print(f"mindspeed_mem: {error}", file=sys.stderr, flush=True)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(20)  # torchrun ends all ranks as soon as one has ended: the one that speaks goes first
        print(f"mindspeed_mem, on rank {os.environ.get('RANK')} alone: {error}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def _read_command_line(arguments: list[str]) -> None:
    """At import: apply what the flags ask for, before Megatron is imported; the engine waits for `configure`."""
    unknown = features.misspelt(arguments)
    try:
        rank = os.environ.get("RANK", "0")
        if not rank.isdecimal():
            raise ValueError(f"RANK: got {rank!r}; allowed: a whole number, as launchers set it, or none at all")
        log.set_up(int(rank))
        _State.given = features.scan(arguments)
        _State.wants_help = not {"-h", "--help"}.isdisjoint(arguments)
        _apply(_check(_State.given))
    except FeatureError as error:
        refuse(FeatureError([*error.problems, *unknown]))
    except (ValueError, PatchError) as error:
        refuse(error)
    for word in unknown if rank == "0" else ():  # a parser that does not know them may ignore them
        logger.warning(word)


def _check(args: Namespace | Mapping[str, Any]) -> Settings:
    settings = features.check(args, always=_State.observing or _State.wants_help)
    if not _State.observing:
        return settings
    return dataclasses.replace(
        settings, memory=None, patches=tuple(dict.fromkeys((*settings.patches, "activation_*", "recompute_fused")))
    )


def _apply(settings: Settings) -> None:
    """Apply the patches of `settings` and undo those that nothing asks for any more."""
    if settings == _State.settings:
        return
    patterns = list(settings.patches)
    on_host = settings.backend is not None and settings.backend.is_host  # gloo has to be ended in any case
    reports = settings.memory is not None or settings.survive_oom or settings.report_folder is not None
    if on_host or reports or settings.chunk.stage:
        patterns += ["megatron_pretrain", "megatron_logging"]
    if any(feature.bars for feature in features.FEATURES if feature.flag in settings.on):
        patterns.append("own_configs")
    if settings.patches:
        patterns += ["pass_events", "first_step"]
    if _State.metered:
        patterns.append(_FOR_METER)
    flags = {feature.dest for feature in features.FEATURES}
    if _State.wants_help or flags & set(vars(_State.given)):
        patterns.append("megatron_arguments")
    if settings.backend is not None and settings.backend.runs_mindspeed:
        from mindspeed_mem.patches import mindspeed_features

        mindspeed_features.join()
    registry.asked_by = functools.partial(_asked_by, settings)
    wanted = patch_modules(patterns)
    for module in wanted:
        importlib.import_module(module)
    _connect(settings)
    lifted = _make_room(wanted)
    try:
        REGISTRY.undo([module for module in _State.modules if module not in wanted])
        REGISTRY.apply(wanted)
    except PatchError:
        REGISTRY.put_back(lifted)
        raise
    features.put_into_force(settings)
    _use_chunks(settings.chunk)
    _State.modules, _State.settings = tuple(wanted), settings
    for notice in settings.notices if os.environ.get("RANK", "0") == "0" else ():
        logger.warning(notice)


def _asked_by(settings: Settings, module: str) -> str:
    """The flags that are on and ask for a patch module; of one that all need, all."""
    name = module.rpartition(".")[2]
    on = [one for one in features.FEATURES if one.flag in settings.on and one.patches]
    named = [one for one in on if any(fnmatch.fnmatch(name, pattern) for pattern in one.patches)]
    return " and ".join(one.flag for one in named or on)


def _use_chunks(wanted: ChunkSettings) -> None:
    from mindspeed_mem.zero.buffers import runtime
    from mindspeed_mem.zero.core import nccl

    if wanted == runtime.settings_in_force():
        return  # what runs goes by the object: an equal one would begin anew, without what was recorded
    if runtime.in_use():
        logger.warning(
            "--chunk-zero-stage or its options have changed: models built before keep the memory that they have and "
            "must not be trained any further. Build them again"
        )
    if wanted.stage >= 2:
        nccl.keep_until_waited()
    runtime.use(wanted)


def _make_room(wanted: list[str]) -> list[Patch]:
    """Take off what shares a symbol with patches that come or go: applied again, all stand in the table's order."""
    stay = [module for module in _State.modules if module in wanted]
    symbols = {patch.target for patch in REGISTRY.of(set(wanted) ^ set(_State.modules))}
    off = {patch.declared_by for patch in REGISTRY.of(stay) if patch.target in symbols}
    off |= set(_State.modules) - set(wanted)
    return REGISTRY.lift(keep={patch.declared_by for patch in REGISTRY.patches} - off) if off else []


def _connect(settings: Settings) -> None:
    """Hand our functions to those patches that call back; patches know nothing of this module."""
    from mindspeed_mem.patches import first_step, megatron_arguments, megatron_pretrain, pipeline_stages

    megatron_arguments.when_validated = _validated
    pipeline_stages.when_refused = refuse
    megatron_pretrain.when_finished = _finished
    if settings.patches:
        first_step.before(_compare)
        first_step.after(_verify)
    else:
        first_step.forget()


def _validated(args: Namespace) -> None:
    try:
        if _State.settings.backend is not None:
            _State.settings.backend.use_device_of_rank()  # Megatron-LM chooses it later than it checks its arguments
        configure(args)
    except (FeatureError, PatchError) as error:
        refuse(error)


def _compare() -> None:
    """All ranks have asked for the same, or none goes on. Only where ranks speak to each other in any case."""
    if _State.engine:
        problems = features.differing(ranks.gather(features.for_all_ranks(_State.settings)))
        if problems:
            raise FeatureError(problems)


def _verify() -> None:
    REGISTRY.verify_once(logger)
    if (_State.settings.memory is not None or _State.settings.survive_oom) and not _State.engine:
        logger.error("the memory plan is not in force: the script never called megatron_adaptor.configure(args)")


def _needs_engine(settings: Settings) -> bool:
    return settings.memory is not None or settings.survive_oom or settings.trace is not None


def _refuse_beside_attached(settings: Settings) -> None:
    if not _needs_engine(settings):
        return
    from mindspeed_mem.activation import engine as engines

    if (model := engines.attached_model()) is not None:
        what = f"another memory plan is in force, of an attached model (a {type(model).__name__})"
        raise FeatureError([f"{what}: detach it first, or leave out what needs one here"])


def _start_engine(settings: Settings) -> None:
    needed = _needs_engine(settings)
    wanted = (
        settings.memory,
        settings.backend,
        settings.host_limit_bytes,
        settings.survive_oom,
        settings.adaptive,
        settings.plan_file,
        settings.device_limit_bytes,
        needed,
    )
    if _State.observing:
        return
    same = wanted == _State.engine or not (needed or _State.engine)
    _trace(settings, same)
    _limit_memory(settings)
    if same:
        return
    from mindspeed_mem.activation import engine as engines
    from mindspeed_mem.plan import load_memory_config

    engines.stop()
    if needed:
        assert settings.backend is not None  # something is on
        config = settings.memory or load_memory_config(None)
        copies = config.swap.swap or settings.survive_oom or settings.adaptive
        if copies and settings.backend.index() is None:  # an accelerator's process is, before its first host buffer
            logger.info(numa.bind(None))
        engine = engines.start(config, settings.backend, settings.host_limit_bytes, survive=settings.survive_oom)
        if settings.adaptive:
            from mindspeed_mem.adaptive.run.adaptation import Adaptation

            Adaptation(engine, settings.plan_file)
    _State.engine = wanted if needed else ()


def _trace(settings: Settings, same_engine: bool) -> None:
    """Trace what these settings want; another engine for the same report is another run."""
    wanted = None if settings.trace is None else (*settings.trace, settings.report_folder)
    if wanted == _State.trace and (same_engine or settings.report_folder is None):
        return
    from mindspeed_mem.report import run_file, trace

    trace.stop()
    run_file.begin(settings.report_folder)
    if settings.trace is not None:
        by = "--memory-trace" if "--memory-trace" in settings.on else "--memory-report"
        trace.start(*settings.trace, asked_by=by)
    _State.trace = wanted


def _limit_memory(settings: Settings) -> None:
    backend, before = settings.backend or _State.limited, _State.limit
    if settings.device_limit_bytes == before:
        return
    try:
        backend.limit_memory(settings.device_limit_bytes)
    except ValueError as error:
        raise FeatureError([f"--device-memory-gib: {error}"]) from error
    _State.limited, _State.limit = backend, settings.device_limit_bytes


delegation.INSTALLERS[:] = [delegating.install_if_built]
_read_command_line(sys.argv[1:])
