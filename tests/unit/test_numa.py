"""Binding to NUMA nodes: topologies are made up, the affinity that changes is a real process's."""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mindspeed_mem.device import get_backend, numa

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
ADDRESS = "0000:3b:00.0"
NEAR, FAR = set(CORES[: len(CORES) // 2]), set(CORES[len(CORES) // 2 :])

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores and sched_setaffinity")


@pytest.fixture(autouse=True)
def affinity_is_restored(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    before = {int(thread): os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")}
    yield
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(thread, before.get(thread, set(CORES)))


def host(folder: Path, nodes: dict[int, set[int] | str], numa_node: int | None = 1) -> Path:
    """A sysfs with these nodes' cores, and one PCI device on the node `numa_node`."""
    for number, cores in nodes.items():
        place = folder / "devices/system/node" / f"node{number}"
        place.mkdir(parents=True)
        text = cores if isinstance(cores, str) else ",".join(map(str, sorted(cores)))
        (place / "cpulist").write_text(text + "\n")
    if numa_node is not None:
        place = folder / "bus/pci/devices" / ADDRESS
        place.mkdir(parents=True)
        (place / "numa_node").write_text(f"{numa_node}\n")
    return folder


def test_all_threads_move_to_the_cores_next_to_the_device(tmp_path):
    release, ready, threads = threading.Event(), threading.Event(), []

    def other():
        threads.append(threading.get_native_id())
        ready.set()
        release.wait()

    thread = threading.Thread(target=other)
    thread.start()
    try:
        ready.wait()
        line = numa.bind(0, ADDRESS.upper(), sysfs=host(tmp_path, {0: NEAR, 1: FAR}))
        assert line.startswith("bound to NUMA node 1 (cores ")
        assert line.endswith(f"next to device 0 ({ADDRESS.upper()})")
        assert os.sched_getaffinity(0) == FAR == os.sched_getaffinity(threads[0])
    finally:
        release.set()
        thread.join()


def test_cores_are_never_added(tmp_path):
    """Those of the node that the launcher has not given to this process stay out, per thread."""
    nodes = {0: {CORES[0], 5000}, 1: set(CORES[1:]) | {5001, 5002}}
    assert "bound to NUMA node 1" in numa.bind(3, ADDRESS, sysfs=host(tmp_path, nodes))
    assert os.sched_getaffinity(0) == set(CORES[1:])


def test_a_thread_bound_elsewhere_on_purpose_keeps_its_cores(tmp_path):
    release, ready, threads = threading.Event(), threading.Event(), []

    def pinned():
        os.sched_setaffinity(0, NEAR)
        threads.append(threading.get_native_id())
        ready.set()
        release.wait()

    thread = threading.Thread(target=pinned)
    thread.start()
    try:
        ready.wait()
        numa.bind(0, ADDRESS, sysfs=host(tmp_path, {0: NEAR, 1: FAR}))
        assert os.sched_getaffinity(threads[0]) == NEAR
    finally:
        release.set()
        thread.join()


@pytest.mark.parametrize(
    ("nodes", "numa_node", "address", "reason"),
    [
        ({0: "0-7"}, 0, ADDRESS, "this host has only one"),
        ({0: "0-7", 1: ""}, 0, ADDRESS, "this host has only one"),
        ({}, 0, ADDRESS, "the kernel shows none below"),
        ({0: NEAR, 1: FAR}, -1, ADDRESS, r"the firmware does not tell where device 2 is \(numa_node is -1\)"),
        ({0: NEAR, 1: FAR}, 1, None, "the PCI address of device 2 is unknown"),
        ({0: NEAR, 1: FAR}, None, ADDRESS, "the kernel shows no .*numa_node for device 2"),
        ({0: {*CORES}, 1: "5000-5003"}, 1, ADDRESS, "this process may use no core of NUMA node 1"),
        ({0: "5000", 1: {*CORES}}, 1, ADDRESS, "this process keeps to NUMA node 1 anyway"),
        ({0: NEAR, 1: FAR}, 7, ADDRESS, "this process may use no core of NUMA node 7"),
        ({0: NEAR, 1: "what"}, 1, ADDRESS, "invalid literal"),
    ],
)
def test_where_nothing_can_be_done_it_says_why_and_changes_nothing(tmp_path, nodes, numa_node, address, reason):
    line = numa.bind(2, address, sysfs=host(tmp_path, nodes, numa_node))
    with pytest.raises(AssertionError, match=f"^not bound to a NUMA node: {reason}"):
        raise AssertionError(line)
    assert os.sched_getaffinity(0) == set(CORES)


@pytest.mark.parametrize(
    ("rank", "count", "cores"),
    [(0, 2, NEAR), (1, 2, FAR), (0, 4, NEAR), (1, 4, NEAR), (2, 4, FAR), (3, 4, FAR), (0, 3, NEAR), (2, 3, FAR)],
)
def test_ranks_that_compute_on_the_host_are_spread_over_its_nodes(tmp_path, rank, count, cores):
    line = numa.bind(None, sysfs=host(tmp_path, {0: NEAR, 1: FAR}), ranks=(rank, count))
    assert line.endswith(f"for rank {rank} of the {count} on this host")
    assert os.sched_getaffinity(0) == cores


def test_a_rank_alone_on_a_host_keeps_all_its_nodes(tmp_path):
    line = numa.bind(None, sysfs=host(tmp_path, {0: NEAR, 1: FAR}))
    assert line.startswith("not bound to a NUMA node: this process keeps to NUMA nodes 0, 1 anyway")
    assert os.sched_getaffinity(0) == set(CORES)


def test_who_does_not_want_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("MINDSPEED_MEM_NUMA", "0")
    line = numa.bind(0, ADDRESS, sysfs=host(tmp_path, {0: NEAR, 1: FAR}))
    assert line == "not bound to a NUMA node: MINDSPEED_MEM_NUMA is 0" and os.sched_getaffinity(0) == set(CORES)


def test_the_launchers_numbers_are_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert "rank 1 of the 2" in numa.bind(None, sysfs=host(tmp_path, {0: NEAR, 1: FAR}))
    assert os.sched_getaffinity(0) == FAR
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert "LOCAL_RANK is 2 and LOCAL_WORLD_SIZE 2" in numa.bind(None, sysfs=tmp_path)


def test_the_real_topology_is_read_without_an_error():
    """Whatever this machine has; in a process of its own, which may be bound."""
    script = "from mindspeed_mem.device import numa; print(numa.bind(None, ranks=(0, 2)))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "bound to " in done.stdout and done.stdout.count("\n") == 1


def test_the_host_itself_is_on_no_pci_bus():
    assert get_backend("cpu").pci_address() is None
