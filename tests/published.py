"""Layouts that were published with what they reached: Megatron-LM on A100 of 80 GB, 8 in a node, sequences of 2048.

- FULL: everything recomputed. TFLOP/s of a device, table 1 of arXiv 2104.04473 (2021-04), FLOPs by its formula, which
  counts what is recomputed; micro-batches, batches and virtual stages from Megatron-LM's
  examples/academic_paper_scripts/sc21/run_table_1.sh (core_v0.16.1).
- UNSEEN: table 2 of the same paper, the rows with pipelines. The speeds in the table of devices were chosen without
  them. How many virtual stages they had is not said: one here.
- SELECTIVE: sequence parallelism and core attention recomputed. Model FLOPs as a share of 312 TFLOP/s, Megatron-LM's
  README (tag 23.04); shapes and batches of arXiv 2205.05198 (2022-05).
Read 2026-11-22, table 2 on 2026-11-29. Degrees of parallelism were "picked using heuristics" (section 5.1), without a
search. The second paper could not be opened: its shapes are from memory, borne out by its step times, from
memory as well (1.10, 13.75, 37.83, 71.49 s), which follow from them and the shares by its FLOP formula within 0.3 %.
"""

from __future__ import annotations

from typing import NamedTuple

from mindspeed_mem.adaptive.layout.cluster import Cluster
from mindspeed_mem.adaptive.problem import devices
from mindspeed_mem.adaptive.problem.definition import GIB, LayerClass
from mindspeed_mem.adaptive.problem.shape import Degrees, Machine, Shape
from mindspeed_mem.plan.operators import CORE

PEAK = 312


class Row(NamedTuple):
    """A model, its layout, and what was reached."""

    name: str
    layers: int
    hidden: int
    heads: int
    tensor: int
    pipeline: int
    virtual: int
    micro_batch: int
    batch: int
    devices: int
    reached: float
    selective: bool = False

    @property
    def seconds(self) -> float:
        """A step."""
        base = self.batch * 2048 * self.layers * self.hidden**2
        if self.selective:
            flops = 72 * base * (1 + 2048 / (6 * self.hidden) + 51200 / (12 * self.layers * self.hidden))
            return flops / self.devices / (self.reached / 100 * PEAK * 1e12)
        flops = 96 * base * (1 + 2048 / (6 * self.hidden) + 51200 / (16 * self.layers * self.hidden))
        return flops / self.devices / (self.reached * 1e12)

    @property
    def shape(self) -> Shape:
        return Shape(
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            seq_length=2048,
            micro_batch_size=self.micro_batch,
            ffn_hidden_size=4 * self.hidden,
            num_query_groups=self.heads,
            kv_channels=self.hidden // self.heads,
            vocab_size=51200,
            flash=False,
            attention_dropout=True,
            hidden_dropout=True,
        )

    @property
    def split(self) -> Degrees:
        data = self.devices // (self.tensor * self.pipeline)
        return Degrees(
            tensor=self.tensor,
            pipeline=self.pipeline,
            virtual=self.virtual,
            data=data,
            micro_batches=self.batch // data // self.micro_batch,
            sequence_parallel=self.selective,
            grad_bytes=2,  # fp16
            widened_bytes=4,
            overlap=False,
        )

    def again(self, kind: LayerClass) -> float:
        """Seconds that a layer recomputes."""
        if self.selective:
            return sum(one.forward_seconds for one in kind.operators if one.name == CORE)
        return kind.forward_seconds


FULL = (
    Row("1.7B", 24, 2304, 24, 1, 1, 1, 16, 512, 32, 137),
    Row("3.6B", 30, 3072, 32, 2, 1, 1, 16, 512, 64, 138),
    Row("7.5B", 36, 4096, 32, 4, 1, 1, 16, 512, 128, 142),
    Row("18.4B", 40, 6144, 48, 8, 1, 1, 8, 1024, 256, 135),
    Row("39.1B", 48, 8192, 64, 8, 2, 1, 4, 1536, 512, 138),
    Row("76.1B", 60, 10240, 80, 8, 4, 3, 2, 1792, 1024, 140),
    Row("145.6B", 80, 12288, 96, 8, 8, 2, 2, 2304, 1536, 148),
    Row("310.1B", 96, 16384, 128, 8, 16, 2, 1, 2160, 1920, 155),
    Row("529.6B", 105, 20480, 128, 8, 35, 3, 1, 2520, 2520, 163),
    Row("1008B", 128, 25600, 160, 8, 64, 1, 1, 3072, 3072, 163),
)
_175B, _530B = (12, 1, 1, 1536), (35, 1, 1, 2240)
"""Pipeline stages, virtual stages, micro-batch, batch."""
UNSEEN = tuple(
    Row(f"{name} on {devices}", layers, hidden, heads, 8, *split, devices, reached)
    for name, layers, hidden, heads, split, runs in (
        ("175B", 96, 12288, 96, _175B, ((384, 153), (768, 149), (1536, 141))),
        ("530B", 105, 20480, 128, _530B, ((560, 171), (1120, 167), (2240, 159))),
    )
    for devices, reached in runs
)
SELECTIVE = (
    Row("22B", 48, 6144, 64, 8, 1, 1, 4, 4, 8, 41.5, True),
    Row("175B", 96, 12288, 96, 8, 8, 3, 1, 64, 64, 51.4, True),
    Row("530B", 105, 20480, 128, 8, 35, 3, 1, 280, 280, 56.0, True),
    Row("1T", 128, 25600, 160, 8, 64, 1, 1, 512, 512, 56.3, True),
)


def cluster(count: int) -> Cluster:
    """So many A100 by the table of devices. Nothing was sent while anything was computed, in those days."""
    row = devices.table()["a100-80g"]
    found = devices.device("a100-80g", row, False, {"inter_node_gbps": None})
    speeds = dict(found.speeds)
    inter = speeds.pop("inter_node_gbps")
    machine = Machine(memory_bytes=round(row["memory_gib"] * GIB), **speeds)
    return Cluster(machine=machine, devices=count, per_node=8, inter_node_gbps=inter, sends_overlap=False)
