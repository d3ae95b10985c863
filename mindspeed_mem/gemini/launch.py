"""How ColossalAI's scripts start: arguments, ranks, devices and log lines."""

from __future__ import annotations

import argparse
import functools
import logging
import os
import random
from collections.abc import Iterable
from typing import Any

import numpy
import torch
import torch.distributed as dist

from mindspeed_mem.device import get_backend
from mindspeed_mem.gemini.options import refuse, say_once
from mindspeed_mem.ranks import leave_at_exit, number
from mindspeed_mem.zero.core.shard_memory import device_of


def get_current_device() -> torch.device:
    """The accelerator that this process uses, or the CPU where there is none."""
    return device_of(get_backend())


def get_default_parser() -> argparse.ArgumentParser:
    """A parser with ColossalAI's own arguments, of which `launch_from_torch` reads none."""
    parser = argparse.ArgumentParser()
    for name, kind in {
        "config": str,
        "host": str,
        "port": int,
        "world_size": int,
        "rank": int,
        "local_rank": int,
    }.items():
        parser.add_argument(f"--{name}", type=kind, help="no effect: torchrun says it")
    parser.add_argument("--backend", default="nccl", help="no effect: the device says it")
    return parser


def launch_from_torch(config: Any = None, backend: str | None = None, seed: int = 1024, verbose: bool = True) -> None:
    """Initialise torch.distributed from what torchrun says, choose this rank's device, and seed all generators.

    Args:
        config: has no meaning; what scripts set there is given to GeminiDDP.
        backend: of the collectives; None: the device's. ColossalAI's "nccl" means the same where there is no CUDA.
            gloo's group is left at exit.
        seed: of Python's, numpy's and torch's generators.
        verbose: rank 0 logs what it found.

    Raises:
        OptionError: outside of torchrun.
    """
    missing = [
        name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ
    ]
    refuse([f"launch_from_torch: {', '.join(missing)} are not set; start with torchrun"] * bool(missing))
    if config:
        say_once("launch_from_torch: config has no effect; GeminiDDP and GeminiAdamOptimizer take all settings")
    device = get_backend()
    if not device.is_host:
        torch.get_device_module(device.type).set_device(int(os.environ["LOCAL_RANK"]))
    if backend in (None, "nccl"):
        backend = device.collectives
    if not dist.is_initialized():
        dist.init_process_group(backend)
        if dist.get_backend() == "gloo":
            leave_at_exit()  # the script may leave the group as it is
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    if verbose:
        ranks = dist.get_world_size()
        get_dist_logger().info(
            f"{ranks} ranks on {device.type}, collectives by {dist.get_backend()}, seed {seed}", ranks=[0]
        )


class DistributedLogger:
    """Lines that some of the ranks print: `ranks`, or all."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        self._logger.setLevel(logging.INFO)
        if not self._logger.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(name)s: %(levelname)s: %(message)s"))
            self._logger.addHandler(handler)

    def info(self, message: str, ranks: Iterable[int] | None = None) -> None:
        self._say(logging.INFO, message, ranks)

    def warning(self, message: str, ranks: Iterable[int] | None = None) -> None:
        self._say(logging.WARNING, message, ranks)

    def debug(self, message: str, ranks: Iterable[int] | None = None) -> None:
        self._say(logging.DEBUG, message, ranks)

    def error(self, message: str, ranks: Iterable[int] | None = None) -> None:
        self._say(logging.ERROR, message, ranks)

    def _say(self, level: int, message: str, ranks: Iterable[int] | None) -> None:
        if ranks is None or number() in ranks:
            self._logger.log(level, message)


@functools.cache
def get_dist_logger(name: str = "gemini") -> DistributedLogger:
    """The logger of this name."""
    return DistributedLogger(name)


def disable_existing_loggers(include: Iterable[str] | None = None, exclude: Iterable[str] = ("gemini",)) -> None:
    """Let existing loggers speak from warnings on: those of `include`, or all but those of `exclude`."""
    chosen, spared = include and set(include), set(exclude)
    for name in list(logging.Logger.manager.loggerDict):
        if name in chosen if chosen is not None else name not in spared:
            logging.getLogger(name).setLevel(logging.WARNING)
