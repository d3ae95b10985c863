"""The end of a script whose process groups somebody still holds, as meshes and Megatron's globals do."""

import os
import subprocess
import sys

import pytest

ENDS = """
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
held = dist.group.WORLD
from mindspeed_mem import ranks

sys.setswitchinterval(1000.0)  # gloo's threads get the GIL only where it is given away
for _ in range(100):
    dist.all_reduce(torch.ones(3), async_op=True)
{ends}
"""
LEAVES = "ranks.leave(); assert not dist.is_initialized()"
LATER = "ranks.leave_at_exit(); dist.all_reduce(torch.ones(3), async_op=True)"


@pytest.mark.slow
@pytest.mark.parametrize("ends", [LEAVES, LATER])
def test_threads_of_gloo_have_ended_their_work_when_the_interpreter_ends(ends):
    """Without, about one in two such scripts ends with "terminate called without an active exception"."""
    path = os.pathsep.join(filter(None, sys.path))
    jobs = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", ENDS.format(ends=ends)],
            env={**os.environ, "PYTHONPATH": path},
            stderr=subprocess.PIPE,
        )
        for _ in range(4)
    ]
    assert [(job.communicate(timeout=120)[1], job.returncode) for job in jobs] == [(b"", 0)] * len(jobs)
