"""Device memory that nobody may plan with: what is taken beside the tensors that are counted."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20
_LIBRARIES, _LIBRARIES_SHARE = 1024 * MIB, 16
"""For what asks the driver itself: contexts and workspaces of the libraries, code loaded at its first use. With torch
some 300 MB where CUDA loads code lazily, more than 1000 where it does not (pytorch/pytorch#107667); for CANN no figure
was found. No more than this part of a small device."""
_COMMUNICATOR, _COMMUNICATOR_SHARE = 688 * MIB, 64
"""For the buffers of one group of ranks, which are made at its first collective, under load. NCCL took 544 MB for two
A100 with NVLink and 688 for more (NVIDIA/nccl#964), less over PCIe, more for an all-to-all (3 GB among 8 H100,
NVIDIA/nccl#1685); HCCL takes twice HCCL_BUFFSIZE, 400 MB unless told (its documentation)."""
_WORKSPACES_SHARE = 32
"""This part for operators' workspaces where they are taken beside torch's allocator: one for each stream, as large as
its largest. An assumption: the fp32 sums of an attention's backward take 1.5 GiB for 4 x 8192 tokens of width 4096."""
_FRAGMENTATION = 0.02
"""Of the memory: what an allocator keeps in pieces that nobody can use. With expandable segments 1 % sufficed on an
H200 (16 layers of 7B, micro-batch 4 x 8192, 52 GiB); without, what took 94 % of a cap did not fit and 86 % did, and
where recomputing and virtual stages mix lifetimes torch's allocator can waste far more (43 %, arXiv 2507.16274)."""
_LATE_COPIES = 256
"""The part of the memory that copies to the host may hold longer than planned: 320 MiB of 80 GiB, which take a link of
25 GB/s 13 ms, so that computation does not stand still wherever the link is busy for a while."""


@dataclass(frozen=True)
class Reserve:
    """Bytes that are left to others, by what they are for."""

    contexts: int = 0
    communicators: int = 0
    fragmentation: int = 0
    asked: int = 0
    """Instead of these, a user's own figure."""

    @property
    def bytes(self) -> int:
        return self.contexts + self.communicators + self.fragmentation + self.asked


def of_device(nbytes: int, groups: int) -> Reserve:
    """What a device of so many bytes needs where a rank is in so many groups of its own (tensor-parallel, ...)."""
    each = min(_COMMUNICATOR, nbytes // _COMMUNICATOR_SHARE)
    return Reserve(contexts(nbytes), groups * each, fragmentation(nbytes))


def contexts(nbytes: int) -> int:
    """For libraries, on a device of so many bytes."""
    return min(_LIBRARIES, nbytes // _LIBRARIES_SHARE)


def late_copies(nbytes: int) -> int:
    """For what has not been copied to the host in time, where tensors may take so many bytes."""
    return nbytes // _LATE_COPIES


def workspaces(nbytes: int) -> int:
    """For what operators compute in, on a device of so many bytes where that is none of torch's tensors."""
    return nbytes // _WORKSPACES_SHARE


def fragmentation(nbytes: int) -> int:
    """For pieces, where tensors may take so many bytes."""
    return round(_FRAGMENTATION * nbytes)
