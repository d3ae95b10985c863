"""`benchmarks/chunk_zero.py`: what it says of figures, and how it tells two memories apart where there is one."""

import runpy
from pathlib import Path

import pytest
import torch

from mindspeed_mem.device.cpu import CpuBackend
from mindspeed_mem.device.limited_cpu import LimitedMemory
from tests.guarding import settled

FOLDER = Path(__file__).parents[2] / "benchmarks"
PAGE = runpy.run_path(str(FOLDER / "chunk_page.py"))
BASE, OFFLOAD = PAGE["BASE"], PAGE["FSDP_OFFLOAD"]


def row(ratio, mib, peer=False, same=True, exact=None):
    exact = not peer if exact is None else exact
    zeros = dict.fromkeys(("gathers", "gathered_bytes", "bytes_to_device", "bytes_to_host", "resting_bytes"), 0)
    found = {"median_of_ratios": ratio, "median_ms": 100 * ratio, "device_bytes": round(mib * 2**20), "peer": peer}
    return zeros | found | {"same": same, "exact": exact, "off": 0.0 if same else 2e-3}


def all_rows():
    return {
        BASE: row(1.0, 200, peer=True, exact=True),
        "stage 1": row(1.01, 200),
        "stage 2": row(1.1, 150),
        "stage 3": row(1.2, 130),
        "stage 3, host": row(1.5, 60),
        "stage 3, host, stepped there": row(1.3, 60, same=False, exact=False),
        "stage 3, reduced each time": row(1.25, 129, same=False, exact=False),
        PAGE["FSDP_RESHARD"]: row(1.4, 130, peer=True, same=False),
        PAGE["FSDP_KEPT"]: row(1.3, 149, peer=True, same=False),
        OFFLOAD: row(1.6, 61, peer=True, same=False),
    }


def met(rows, failed=None):
    return {goal.text: goal.met for goal in PAGE["goals"](rows, failed or {})}


def test_goals_are_met_missed_or_cannot_be_told():
    assert met(all_rows(), {PAGE["MEGATRON_OFFLOAD"]: "no device"}) == {
        "stage 3 takes no more device memory than FSDP2, resharded": True,
        "stage 2 takes no more device memory than FSDP2, not resharded": False,
        "stage 3, reduced each time takes no more device memory than FSDP2, resharded": True,
        "stage 2, reduced each time takes no more device memory than FSDP2, not resharded": None,
        "stage 3 takes no more device memory than FSDP2, resharded, reduced once": None,
        "stage 2 takes no more device memory than FSDP2, not resharded, reduced once": None,
        "stage 1 takes at most 1.02 of the time of Megatron, overlapped": True,
        "faster than FSDP2, offloaded with equal device memory": True,
        "faster than Megatron, optimizer offloaded with equal device memory": None,
        "losses are equal bit for bit where that is promised": True,
    }


@pytest.mark.parametrize(
    "name, change, goal",
    [
        ("stage 3", {"device_bytes": 131 * 2**20}, "stage 3 takes no more device memory than FSDP2, resharded"),
        ("stage 1", {"median_of_ratios": 1.021}, "stage 1 takes at most 1.02 of the time of Megatron, overlapped"),
        (OFFLOAD, {"device_bytes": 59 * 2**20}, "faster than FSDP2, offloaded with equal device memory"),
        (OFFLOAD, {"median_of_ratios": 1.3}, "faster than FSDP2, offloaded with equal device memory"),
        ("stage 2", {"same": False}, "losses are equal bit for bit where that is promised"),
    ],
)
def test_what_makes_the_difference_between_met_and_missed(name, change, goal):
    rows = all_rows()
    assert met(rows)[goal] is True
    rows[name] |= change
    assert met(rows)[goal] is False


def test_the_reason_of_what_could_not_be_run_is_told_and_of_equals_the_fastest_counts():
    lines = PAGE["goal_lines"](PAGE["goals"](all_rows(), {PAGE["MEGATRON_OFFLOAD"]: "no device"}))
    assert any(line.startswith("untold: ") and "no device" in line for line in lines)
    assert any(line.startswith("met: faster than FSDP2") and "stepped there: 1.300, 60.0 MiB" in line for line in lines)
    assert any(line.startswith("MISSED: stage 2") and "(150.0 MiB, 149.0 MiB)" in line for line in lines)
    peers = {name: row for name, row in all_rows().items() if row["peer"]}
    assert met(peers)["faster than FSDP2, offloaded with equal device memory"] is None


def test_table_and_page_have_a_line_for_each_variant_and_the_page_says_how_a_cpu_was_measured():
    rows = all_rows()
    lines = PAGE["table"](rows).splitlines()
    assert len({len(line) for line in lines}) == 1 and len(lines) == 1 + len(rows)
    assert [line.split()[-1] for line in lines[-3:]] == ["2e-03"] * 3 and lines[2].endswith("equal")
    record = {"variants": rows, "failed": {"a peer": "no device"}, "ranks": 2, "rounds": 3, "command": "python"}
    record |= {"machine": {"date": "today"}, "shape": {"layers": 4}, "chunk_elements": 5}
    on_cpu, on_gpu = (PAGE["page"](record | {"device": device}) for device in ("cpu", "cuda"))
    assert on_cpu.startswith(on_gpu.replace("cuda", "cpu").rstrip()) and len(on_cpu) > len(on_gpu)
    assert "Not run: a peer: no device" in on_cpu and "| stage 3, host | 1.500 | 150.0 | - | 60.0 |" in on_cpu


def test_on_a_cpu_an_offload_moves_and_is_seen():
    names = runpy.run_path(str(FOLDER / "two_memories.py"))
    backend = CpuBackend()
    memories = names["TwoMemories"](backend)
    tensor, before = torch.arange(1000.0), dict(vars(torch.Tensor))
    with LimitedMemory() as memory, names["Traffic"](memories) as traffic:
        backend.attach_ledger(memory)
        with names["offloading"](memories):
            counted = settled(memory)
            down = tensor.cpu()
            cast = down.to(torch.bfloat16).clone()
            assert [memories.on_host(one) for one in (tensor, down, down[3:])] == [False, True, True]
            assert (tensor.is_cuda, down.is_cuda, down.pin_memory() is down) == (True, False, True)
            assert down.cpu() is down and memories.on_host(cast)
            del cast
            assert memory.allocated == counted
            up = down.to(tensor.device, non_blocking=True)
            assert up.is_cuda and memory.allocated == counted + up.nbytes
            with memories.hosted():
                work = torch.zeros_like(up)
            assert memory.allocated == counted + up.nbytes and not work.any()
            down.copy_(up)
    assert torch.equal(up, tensor) and torch.equal(down, tensor)
    assert (traffic.bytes_to_device, traffic.bytes_to_host) == (4000, 8000)
    assert dict(vars(torch.Tensor)) == before and tensor.cpu() is tensor
