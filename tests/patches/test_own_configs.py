"""What a loop of one's own says only in its configs is refused as on a command line, before it does harm."""

import json
import re

import pytest

from tests.documented import ROOT, blocks_of
from tests.patches.test_adaptor import TRAIN, python

LOOP = """
    import json, sys
    import mindspeed_mem.megatron_adaptor as mem
    exec(sys.argv.pop(1))
    train()
    from megatron.core.transformer.module import MegatronModule
    from tests.models import build_optimizer

    FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    LAYERS = {"recompute_layers": "all"}
    ADAPTS = {"adaptive_memory_optimization": True}
    CHUNKS = {"chunk_zero_stage": 2}
    CASES = {
        "fields": (LAYERS, {**FULL, "fine_grained_activation_offloading": True, "use_te_rng_tracker": True}, {}, {}),
        "adaptive": (ADAPTS, {"overlap_moe_expert_parallel_comm": True}, {}, {}),
        "swap alone": ({"memory_config": {"swap_config": {"swap": True}}}, {"use_te_rng_tracker": True}, {}, {}),
        "ddp": (CHUNKS, {}, {"use_distributed_optimizer": True, "nccl_ub": True}, {}),
        "needs": (CHUNKS, {}, {}, {}),
        "optimizer": ({"optimizer_parallel": "sharding"}, {}, {}, {"optimizer_cpu_offload": True}),
        "both": ({"optimizer_parallel": "sharding"}, {"qk_clip": True}, {"use_distributed_optimizer": True}, {}),
        "cap": ({"max_inflight_microbatches": 1}, {"variable_seq_lengths": True}, {}, {}),
        "fine": ({**LAYERS, "optimizer_parallel": "sharding", "max_inflight_microbatches": 1}, {}, {}, {}),
    }

    def init(module, config):  # as a script that changes its config once Megatron has checked it
        vars(config).update(fields)
        original(module, config)

    original, MegatronModule.__init__ = MegatronModule.__init__, init

    found = {}
    for name, (settings, fields, ddp, of_optimizer) in CASES.items():
        mem.configure({"device": "cpu", **dict.fromkeys(("recompute_layers", "memory_config")), **settings})
        found[name] = [], ""
        try:
            chunks = build_gpt("dropout", layers=2, ddp=ddp)
            found[name] = [], "built"
            optimizer = build_optimizer(chunks, **of_optimizer)
            found[name] = [], "optimized"
            train_step(chunks, micro_batches=2)
            found[name] = [], "trained"
        except mem.FeatureError as error:
            found[name] = list(error.problems), found[name][1]
    fields = {}
    mem.configure({"device": "cpu", **dict.fromkeys(("recompute_layers", "memory_config"))})
    chunks = build_gpt("dropout", layers=2)
    chunks[0].config.recompute_granularity = "full"
    mem.configure({"device": "cpu", **LAYERS})
    try:
        train_step(chunks)
    except mem.FeatureError as error:
        found["configured late"] = list(error.problems), ""
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    return json.loads(python(LOOP, TRAIN, "--device", "cpu")[0].splitlines()[-1])


@pytest.mark.parametrize(
    ("case", "stage", "barred"),
    [
        ("fields", "", ["--recompute-granularity full", "--fine-grained-activation-offloading", "--te-rng-tracker"]),
        ("adaptive", "", ["--overlap-moe-expert-parallel-comm"]),
        ("ddp", "", ["--use-nccl-ub"]),
        ("optimizer", "built", ["--optimizer-cpu-offload"]),
        ("both", "", ["--qk-clip", "--use-distributed-optimizer"]),
        ("cap", "", ["--variable-seq-lengths"]),
        ("configured late", "", ["--recompute-granularity full"]),
    ],
)
def test_every_bar_fires(found, case, stage, barred):
    problems, reached = found[case]
    assert reached == stage and len(problems) == len(barred), problems
    for option in barred:
        assert any(f" cannot be combined with {option}: " in problem for problem in problems), problems


def test_what_chunks_need_is_looked_for(found):
    (problem,), reached = found["needs"]
    assert problem.startswith("--chunk-zero-stage needs --use-distributed-optimizer: ") and reached == ""


@pytest.mark.parametrize("case", ["fine", "swap alone"])
def test_what_fits_trains(found, case):
    assert found[case] == [[], "trained"]


def test_what_a_loop_does_not_bring_is_said_in_its_first_step():
    """Its model is in no DistributedDataParallel, and its optimizer is torch's."""
    [loop] = [block.text for block in blocks_of(ROOT / "docs" / "your-own-loop.md") if "# train.py" in block.text]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    given = "--device cpu --chunk-zero-stage 3 --optimizer-parallel sharding".split()
    _, said = python(loop, *given, environment=alone)
    assert re.findall(r"WARNING mindspeed_mem: (.+) has no effect: ", said) == given[2::2]
    assert "Wrap it in one with use_distributed_optimizer=True" in said and "Have it made there, or call" in said
