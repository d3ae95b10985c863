"""How long it takes to choose among the layouts of a 70B on 1024 devices: ``python benchmarks/layout.py``.

Needs neither Megatron nor a device. The goal is a minute for 10,000 layouts on two cores; one is used.
"""

from __future__ import annotations

import time
from collections import Counter

from mindspeed_mem.adaptive.layout.cluster import Cluster
from mindspeed_mem.adaptive.layout.enumeration import Model, layouts
from mindspeed_mem.adaptive.layout.search import LayoutSearch
from mindspeed_mem.adaptive.problem.definition import GIB
from mindspeed_mem.adaptive.problem.shape import Degrees, Machine, Shape

LLAMA_70B = Shape(
    num_layers=80,
    hidden_size=8192,
    num_attention_heads=64,
    seq_length=8192,
    micro_batch_size=1,
    ffn_hidden_size=28672,
    num_query_groups=8,
    kv_channels=128,
    swiglu=True,
    normalization="RMSNorm",
    rope=True,
    bias=False,
    untied=True,
    te=True,
)
H100 = Machine(memory_bytes=79 * GIB, tflops=635.6, memory_gbps=2680, tensor_gbps=360, link_gbps=35.4)


def main() -> None:
    model = Model(shape=LLAMA_70B, split=Degrees(), batch=1024, vocab_size=128256)
    cluster = Cluster(machine=H100, devices=1024, per_node=8, inter_node_gbps=40)
    for chunks in (True, False):
        began, refused = time.process_time(), Counter[str]()
        every = list(layouts(model, cluster, {}, chunks, refused))
        listed = time.process_time() - began
        found = LayoutSearch(model, cluster).run(every)
        seconds = time.process_time() - began
        print(
            f"{'with' if chunks else 'without'} chunks: {len(every)} layouts listed in {listed:.2f} s of CPU; the best "
            f"found in {seconds:.1f} s, {1e4 * seconds / len(every):.1f} s for 10,000 "
            f"({found.refined} bounds raised, {len(found.planned)} planned): {found.planned[0].layout}, "
            f"{found.planned[0].seconds:.4g} s a step",
            flush=True,
        )


if __name__ == "__main__":
    main()
