"""NCCL's part in the memory of gathered chunks: when the memory that a collective has used can be used again.

torch before 2.8 marks the tensors of an asynchronous collective as used by NCCL's stream: after `Chunk.release` their
memory comes back only when the host finds that stream past the collective, and as the host runs ahead, more is held
than the budget says. With TORCH_NCCL_AVOID_RECORD_STREAMS=1 it keeps them until they are waited for, as newer torch
always does (and warns of the variable). Every collective of a chunk is waited for before its memory is freed.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping

import torch

_VARIABLE = "TORCH_NCCL_AVOID_RECORD_STREAMS"
_DEFAULT_SINCE = (2, 8)
_UNSAFE_BEFORE_RELEASE = (2, 7)
"""NVIDIA's build of a 2.7 to come (container 25.04) applies it to sends and receives as well, where losses then differ
with virtual pipeline stages: NVIDIA/Megatron-LM issue 1586."""


def keep_until_waited(environment: MutableMapping[str, str] = os.environ, version: str = torch.__version__) -> None:
    """Let process groups that are made from now on do so, unless the user has said something else.

    Nothing is set for versions of torch that do so by themselves, and for those in which it does harm.
    """
    number = tuple(map(int, re.findall(r"\d+", version)[:2]))
    released = re.fullmatch(r"[\d.]+", version.partition("+")[0]) is not None
    if number < _DEFAULT_SINCE and (released or number != _UNSAFE_BEFORE_RELEASE):
        environment.setdefault(_VARIABLE, "1")
