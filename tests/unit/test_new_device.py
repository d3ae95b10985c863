"""A new device is one file and one row: the flag takes it, and training swaps through it."""

import json
import os
import subprocess
from pathlib import Path

from tests import warm

ROOT = Path(__file__).parents[2]
FILE = """
from mindspeed_mem.device.cpu import CpuBackend


def why_absent():
    return None


class ToyBackend(CpuBackend):
    type = "toy"
    copies = 0

    def copy(self, target, source, stream):
        ToyBackend.copies += 1
        super().copy(target, source, stream)
"""
SCRIPT = """
import argparse
import sys

from mindspeed_mem import device

device.__path__.append(sys.argv.pop(1))
device.DEVICES["toy"] = device.Row("ToyBackend")

import mindspeed_mem.megatron_adaptor as mem
import torch
from tests.models import build_gpt, train_step
from tests.worlds import parallel

given = mem.add_arguments(argparse.ArgumentParser()).parse_args()
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
with parallel():
    mem.configure(given)
    train_step(build_gpt("dense"))
print(given.device, device.get_backend("toy").copies > 0)
"""


def test_a_row_and_a_file_are_enough(tmp_path):
    (tmp_path / "toy.py").write_text(FILE)
    (tmp_path / "plan.yaml").write_text(json.dumps({"swap_config": {"swap": True}}))
    words = [str(tmp_path), "--device", "toy", "--memory-config", str(tmp_path / "plan.yaml")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [warm.python(), "-c", SCRIPT, *words]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "toy True"
