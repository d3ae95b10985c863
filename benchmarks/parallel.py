"""Parallel modes beside what is written by hand: time of a step, bytes that each rank sends, the host's time.

    python benchmarks/parallel.py                             # CPU: 2 gloo ranks, about two minutes
    python benchmarks/parallel.py --json parallel.json
    python benchmarks/parallel.py --auto                      # only what auto predicts, and how long it takes
    python benchmarks/parallel.py --auto --ranks 4

Transformer blocks train on 2 or 4 ranks, split over the batch (torch's DDP, `semi_auto`) and over columns and rows
(each collective placed by hand, `semi_auto`). All variants run interleaved in the same processes; a ratio is the
median over rounds of those to the variant by hand in the same round. The host's time is that of tiny tensors, of which
computing and sending count for little: what `semi_auto` adds to a chain of linear layers, by operator. Last, `auto`:
for plans found and given, the time and bytes that it predicts (with this machine's figures, taken at the start) beside
those measured, and how long it takes to find a plan for 2 to 32 layers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from chunk_zero import on_ranks  # noqa: E402
from parallel_auto import measured, searching, table, taking_turns  # noqa: E402
from timing import interleaved, machine, summary  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from mindspeed_mem import parallel  # noqa: E402

RANKS = (2, 4)
"""How many heads and columns can be split over."""
SHAPE = {"layers": 2, "hidden": 256, "heads": 4, "length": 128, "batch": 8}
PAIRS = (("batch, semi_auto", "batch, DDP"), ("columns and rows, semi_auto", "columns and rows, by hand"))
TINY, CHAIN = 8, 32


class Block(nn.Module):
    """Of heads split over `ranks`; `enter` and `leave` are what a hand-written split needs around each pair."""

    def __init__(self, hidden: int, heads: int, ranks: int = 1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.heads, self.by_hand = heads // ranks, ranks > 1
        part = hidden // ranks
        self.q, self.k, self.v = (nn.Linear(hidden, part, bias=False) for _ in range(3))
        self.out = nn.Linear(part, hidden, bias=False)
        self.fc1, self.fc2 = nn.Linear(hidden, 4 * part, bias=False), nn.Linear(4 * part, hidden, bias=False)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return parallel.copy(x, axis="tp") if self.by_hand else x

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return parallel.all_reduce(x, axis="tp") if self.by_hand else x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.enter(self.norm1(x))
        q, k, v = (one(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.leave(self.out(y))
        return x + self.leave(self.fc2(F.gelu(self.fc1(self.enter(self.norm2(x))))))


def blocks(ranks: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(SHAPE["hidden"], SHAPE["heads"], ranks) for _ in range(SHAPE["layers"])))


BATCH = {"": {"in_strategy": (("dp", None, None),)}}
COLUMNS = {f"*.{name}": {"parameter_plan": {"weight": ("tp", None)}} for name in ("q", "k", "v", "fc1")}
ROWS = {
    f"*.{name}": {"parameter_plan": {"weight": (None, "tp")}, "out_strategy": ((None, None, None),)}
    for name in ("out", "fc2")
}


def models() -> dict[str, nn.Module]:
    """The variants, by name. Collective."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    over_batch, over_columns = parallel.mesh("cpu", dp=ranks), parallel.mesh("cpu", tp=ranks)
    by_hand = blocks(ranks)
    with torch.no_grad():
        for part, whole in zip(by_hand.parameters(), blocks().parameters(), strict=True):
            dim = next((n for n, size in enumerate(part.shape) if size != whole.shape[n]), 0)
            part.copy_(whole.chunk(ranks, dim)[rank] if part.shape != whole.shape else whole)
    return {
        "batch, DDP": DistributedDataParallel(blocks()),
        "batch, semi_auto": parallel.semi_auto(blocks(), over_batch, BATCH),
        "columns and rows, by hand": by_hand,
        "columns and rows, semi_auto": parallel.semi_auto(blocks(), over_columns, COLUMNS | ROWS),
    }


def work(rank: int, ranks: int, meeting: str, given: argparse.Namespace) -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    whole = torch.randn(SHAPE["batch"], SHAPE["length"], SHAPE["hidden"], generator=torch.Generator().manual_seed(1))
    record: dict[str, Any] = {
        "benchmark": "parallel",
        "machine": machine("cpu"),
        "ranks": ranks,
        "rounds": given.rounds,
    }
    record["shape"] = SHAPE
    if not given.auto:
        record |= beside_by_hand(rank, ranks, whole, given)
    record["auto"] = measured(blocks, whole, given.rounds)
    record["search"] = searching(lambda: Block(SHAPE["hidden"], SHAPE["heads"]), whole)
    if rank == 0:
        print(table(record["auto"], record["search"]))
        if given.json:
            given.json.write_text(json.dumps(record, indent=1) + "\n")
    dist.barrier()
    os._exit(0)  # gloo ranks that have used DTensor's backward may not end


def beside_by_hand(rank: int, ranks: int, whole: torch.Tensor, given: argparse.Namespace) -> dict[str, Any]:
    """The variants, and what an operator costs the host."""
    built, losses = models(), {}

    def loss(name: str) -> torch.Tensor:
        part = name == "batch, DDP"
        made = built[name](whole.chunk(ranks)[rank] if part else whole).square().mean()
        losses[name] = made.detach()
        return made

    setting, step = taking_turns(built, loss)
    sent = {}
    for name in built:
        with setting(name), parallel.recording() as report:
            step()
        sent[name] = sum(report.sent().values())
    sent["batch, DDP"] = sum(one.nbytes for one in built["batch, DDP"].parameters()) * 2 * (ranks - 1) // ranks
    seconds = interleaved(list(built), setting, step, given.rounds, dist.barrier)
    dist.all_reduce(losses["batch, DDP"])
    losses["batch, DDP"] /= ranks
    rows: dict[str, dict[str, Any]] = {}
    for mine, by_hand in PAIRS:
        found = summary({name: seconds[name] for name in (by_hand, mine)}, by_hand)
        for name in (by_hand, mine):
            rows[name] = found[name] | {"bytes_sent": sent[name], "loss": float(losses[name])}
    added = host(given.rounds)
    if rank == 0:
        for name, row in rows.items():
            print(
                f"{name:28} {row['median_ms']:8.1f} ms  {row['median_of_ratios']:6.3f} of it by hand  "
                f"{row['bytes_sent']:>9} bytes sent  loss {row['loss']:.6f}"
            )
        print(f"semi_auto adds {added:.0f} us of the host's time to an operator's forward and backward", flush=True)
    return {"variants": rows, "host_us_per_operator": added}


def host(rounds: int) -> float:
    """Micro-seconds of this process that `semi_auto` adds to an operator."""

    def chain() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(TINY, TINY, bias=False) for _ in range(CHAIN)))

    both = {"plain": chain(), "split": parallel.semi_auto(chain(), parallel.mesh("cpu", dp=-1), {"": TINY_BATCH})}
    x = torch.randn(TINY, TINY)
    setting, step = taking_turns(both, lambda name: both[name](x).sum())
    seconds = interleaved(list(both), setting, step, rounds, lambda: None, time.process_time)
    pairs = zip(seconds["split"], seconds["plain"], strict=True)
    return 1e6 * statistics.median(one - other for one, other in pairs) / CHAIN


TINY_BATCH = {"in_strategy": (("dp", None),)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, choices=RANKS, default=RANKS[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--auto", action="store_true", help="only what auto predicts, and how long it takes")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    on_ranks(given.ranks, work, given)


if __name__ == "__main__":
    main()
