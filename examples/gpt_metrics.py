"""One row of figures per iteration and rank: the log line of rank 0, and the metrics file."""

import json
from datetime import datetime
from pathlib import Path

import torch
from gpt_arguments import UsageError

from mindspeed_mem import output
from mindspeed_mem.report.scalars import Scalars

MIB = 1 << 20
KEYS = "iteration rank loss grad_norm step_ms peak_activation_bytes swapped_bytes host_bytes stall_ms".split()
"""The keys of a line in the metrics file, in this order."""


class Metrics:
    """Rows wait on their rank until `flush` brings them to rank 0, which alone writes the file.

    Numbers are written so that reading them back gives the same float, bit by bit.
    """

    def __init__(self, path, start_iteration):
        self._rows = []
        self._path = Path(path) if path else None
        if self._path and torch.distributed.get_rank() == 0:
            self._start(start_iteration)

    def _start(self, start_iteration):
        """Leave in the file what came before."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            kept = [line for line in self._lines() if json.loads(line)["iteration"] <= start_iteration]
            output.write(self._path, "".join(kept))
        except OSError as error:
            raise UsageError(f"--metrics-file {self._path}: {error.strerror}") from error

    def add(self, **row):
        """Remember one iteration of this rank; needs all of KEYS, more is only for the log line."""
        self._rows.append(row | {"rank": torch.distributed.get_rank()})

    def flush(self):
        """Collect the rows of all ranks (a collective call); on rank 0 append them to the file and return them."""
        mine, self._rows = self._rows, []
        rank = torch.distributed.get_rank()
        everyone = [None] * torch.distributed.get_world_size() if rank == 0 else None
        torch.distributed.gather_object(mine, everyone)
        if rank:
            return []
        rows = [row for rows in zip(*everyone, strict=True) for row in rows]
        if self._path:
            try:
                with open(self._path, "a") as file:
                    file.writelines(json.dumps({key: row[key] for key in KEYS}) + "\n" for row in rows)
            except OSError as error:
                raise UsageError(f"--metrics-file {self._path}: {error.strerror}") from error
        return rows

    def _lines(self):
        return self._path.read_text().splitlines(keepends=True) if self._path.is_file() else []


class Board:
    """TensorBoard's file of events in a folder, or nothing where there is none."""

    def __init__(self, folder, start_iteration):
        self._writer, self._scalars = None, Scalars(start_iteration)
        if folder:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(folder)

    def add(self, rows):
        """Write the iterations of `rows`, as rank 0 saw them, and what the pack did there in the meantime."""
        if self._writer is None:
            return
        for row in (row for row in rows if row["rank"] == 0):
            named = {"lm loss": "loss", "grad-norm": "grad_norm", "learning-rate": "lr", "loss-scale": "loss_scale"}
            for name, key in named.items():
                self._writer.add_scalar(name, row[key], row["iteration"])
            self._writer.add_scalar("iteration-time", row["step_ms"] / 1e3, row["iteration"])
        for name, value in self._scalars.take(rows[-1]["iteration"]).items():
            self._writer.add_scalar(name, value, rows[-1]["iteration"])
        self._writer.flush()


def log_line(rows, args, skipped):
    """What Megatron prints, for the iterations and ranks of `rows`, and tokens/s, activation and swap besides.

    Loss is the mean over the iterations that were not skipped; bytes are those of the rank with most.
    """
    last = rows[-1]
    mine = [row for row in rows if row["rank"] == 0]
    milliseconds = sum(row["step_ms"] for row in mine) / len(mine)
    losses = [row["loss"] for row in mine if row["loss"] == row["loss"]]
    parts = [
        f" [{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {last['iteration']:8d}/{args.train_iters:8d}",
        f"consumed samples: {last['consumed']:12d}",
        f"elapsed time per iteration (ms): {milliseconds:.1f}",
        f"tokens/s: {args.global_batch_size * args.seq_length / milliseconds * 1e3:.0f}",
        f"learning rate: {last['lr']:.6E}",
        f"global batch size: {args.global_batch_size:5d}",
        f"lm loss: {sum(losses) / max(1, len(losses)):.6E}",
        f"loss scale: {last['loss_scale']:.1f}",
        f"grad norm: {last['grad_norm']:.3f}",
        f"peak device activation (MiB): {max(row['peak_activation_bytes'] for row in rows) / MIB:.2f}",
        f"swapped (MiB): {max(row['swapped_bytes'] for row in rows) / MIB:.2f}",
        f"number of skipped iterations: {skipped:3d}",
        f"number of nan iterations: {len(mine) - len(losses):3d}",
    ]
    return " | ".join(parts) + " |"
