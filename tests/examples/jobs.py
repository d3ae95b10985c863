"""Runs the examples as a user would: in a process of their own, with this interpreter, warm."""

import json
import os
import re
import socket
import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path

from tests import warm

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TIMEOUT = 240
ALSO: dict[str, str] = {}
"""Variables of all jobs."""
SMALL = """--hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --global-batch-size 8
--log-interval 2 --split 95,5,0 --device cpu""".split()
"""Arguments of a model that takes tens of milliseconds per iteration."""


@dataclass
class Job:
    """A job that has ended."""

    status: int
    output: str
    left_over: list[str]
    """Command lines of processes that it started and that were still there."""

    def succeeded(self):
        assert self.status == 0, self.output[-4000:]
        assert not self.left_over
        return self

    def refused(self, *messages):
        """It ended with an error status, said each of these once, and left nothing running."""
        assert self.status not in (0, None), self.output[-4000:]
        for message in messages:
            assert self.output.count(message) == 1, f"{message!r} in\n{self.output[-4000:]}"
        assert not self.left_over
        return self

    def losses(self, what="lm loss"):
        """The losses on the log lines."""
        return [float(value) for value in re.findall(rf"{what}: ([-+.\dE]+)", self.output)]


def script(name, *arguments, **environment):
    """Run examples/`name`; `environment` as on the command line before it."""
    return start([str(EXAMPLES / name), *arguments], environment)


def train(*arguments, ranks=1, **environment):
    """Run examples/pretrain_gpt.py with the arguments SMALL and these; on one rank without torchrun."""
    return train_by(EXAMPLES / "pretrain_gpt.py", *arguments, ranks=ranks, **environment)


def train_by(program, *arguments, ranks=1, **environment):
    """The same with another program in the place of pretrain_gpt.py."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [warm.python(), *launch, str(program), *SMALL, *arguments]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return start(command, {"PYTHONPATH": path, **environment})


def start(command, environment):
    """Run `command` to its end, in any folder but the checkout."""
    mark = uuid.uuid4().hex
    inherited = {key: value for key, value in os.environ.items() if key not in FORGOTTEN}
    own = {"PYTHON": warm.python(), "PYTHON_EXEC": warm.python(), "OMP_NUM_THREADS": "1", "TEST_JOB": mark}
    done = subprocess.run(
        list(map(str, command)),
        env=inherited | ALSO | own | {key: str(value) for key, value in environment.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=TIMEOUT,
        cwd="/",
    )
    return Job(done.returncode, done.stdout, _processes(mark))


FORGOTTEN = """RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT NNODES NODE_RANK DEVICE NPROC TP PP VPP SAVE
TRAIN_ITERS MAX_INFLIGHT MEGATRON_LM MINDSPEED_MEM_DEVICE""".split()


def rows(path):
    """The lines of a metrics file as dicts."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


SHORT = ["--log-interval", 1, "--eval-interval", 100, "--metrics-file"]
"""Arguments of a short run, before its metrics file."""


def numbers(path, after=0):
    """(iteration, rank, loss, gradient norm) of each line of a metrics file behind iteration `after`."""
    keys = ("iteration", "rank", "loss", "grad_norm")
    return [tuple(row[key] for key in keys) for row in rows(path) if row["iteration"] > after]


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def _processes(mark):
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it has ended meanwhile
    return found
