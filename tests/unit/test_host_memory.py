"""What the host has left, on this machine and on made-up ones."""

import os

import pytest

from mindspeed_mem.device import host_memory


def test_on_this_machine():
    found = host_memory.available()
    assert found is None or 0 < found <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"meminfo": "MemTotal: 9 kB\nMemAvailable:   5 kB\n"}, 5120),
        ({"meminfo": "MemAvailable: 5 kB", "memory.max": "max\n", "memory.current": "7"}, 5120),
        ({"meminfo": "MemAvailable: 5 kB", "memory.max": "3000\n", "memory.current": "1000\n"}, 2000),
        ({"memory.max": "30", "memory.current": "20", "memory.stat": "anon 9\ninactive_file 5\n"}, 15),
        ({"memory.max": "30", "memory.current": "40"}, 0),
        ({"memory/memory.limit_in_bytes": "70", "memory/memory.usage_in_bytes": "20"}, 50),
    ],
)
def test_on_made_up_machines(tmp_path, files, expected):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert host_memory.available(tmp_path / "meminfo", tmp_path) == expected


@pytest.mark.parametrize(("given", "expected"), [("4", 4), ("", 1), ("0", 1), ("x", 1)])
def test_ranks_of_a_host(monkeypatch, given, expected):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", given)
    assert host_memory.ranks_here() == expected
