"""The commands of each page, one after the other in one folder, as a reader would type them, with what they print.

plan.yaml is the page's first one. Megatron-LM's pretrain_gpt.py is the one of MEGATRON_LM=PATH, else the one in
examples/, on two ranks of a CPU by examples/pretrain_gpt.sh.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documented import DOCS, ROOT, Command, blocks_of, commands, prints, why_not
from tests.examples.jobs import ALSO, FORGOTTEN

LIMIT = 1200
RUN = re.compile(r"torchrun --nproc-per-node \d+ -m mindspeed_mem run pretrain_gpt.py")
ANYTHING = "TRAIN_ITERS=24 examples/pretrain_gpt.sh"


def sessions() -> dict[Path, list[Command]]:
    found = {page: [command for command in commands() if command.block.page == page] for page in DOCS}
    return {page: [one for one in all_of_it if not why_not(one)] for page, all_of_it in found.items()}


def typed(command: str) -> str:
    """As it runs here."""
    command, found = RUN.subn(ANYTHING, command)
    if found and re.search("--(adaptive-memory-optimization|survive-oom|placement-policy auto)", command):
        command += " --device-memory-gib 0.05"
    return command.replace("ops pretrain_gpt.py", "ops examples/pretrain_gpt.py --device cpu")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.sweep
@pytest.mark.parametrize("page", [page for page, run in sessions().items() if run], ids=lambda page: page.stem)
def test_commands_of_a_page(page, tmp_path):
    for name in ("examples", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    plans = [block.text for block in blocks_of(page) if block.language == "yaml"]
    (tmp_path / "plan.yaml").write_text((plans or [(ROOT / "examples/configs/swap_operators.yaml").read_text()])[0])
    inherited = {key: value for key, value in os.environ.items() if key not in {*FORGOTTEN} - {"MEGATRON_LM"}}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {"PATH": path, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    own["PYTHONUNBUFFERED"] = "1"  # what is printed and what is logged come in the order of a terminal
    for command in sessions()[page]:
        if re.search(r"examples/(hf|fsdp2)_", command.text):
            pytest.importorskip("transformers")
            pytest.importorskip("accelerate")
        call = ["bash", "-c", typed(command.text)]
        done = subprocess.run(
            call,
            cwd=tmp_path,
            env=inherited | ALSO | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
            stdin=subprocess.DEVNULL,
        )
        printed = done.stdout
        assert done.returncode == 0, f"$ {command.text}\n{printed[-6000:]}"
        assert not command.shown or prints(command.shown, printed), f"$ {command.text}\n{printed[-12000:]}"
