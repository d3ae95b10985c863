"""The CPU repairs leave no trace when undone, and work whether Megatron was imported before or after."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

from tests.worlds import on_ranks, parallel, patch_modules

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
FILES = [name.rpartition(".")[2] for name in patch_modules("cpu_*", "sdpa_*")]


def trace_of(file: str) -> tuple[int, list[str], list[str]]:
    """How many names applying one patch file changes, which of them undoing it does not restore, and what waits."""
    from mindspeed_mem.patching import REGISTRY

    everything, (module,) = patch_modules("cpu_*"), patch_modules(file)
    for patch in REGISTRY.of([module]):
        if patch.status == "absent":  # for another version
            continue
        if importlib.util.find_spec(patch.module.partition(".")[0] + ".core" * patch.module.startswith("megatron")):
            try:
                importlib.import_module(patch.module)
            except ModuleNotFoundError as error:  # megatron.training, which the wheel does not have
                assert error.name.startswith(("megatron.training", "megatron.legacy"))
    REGISTRY.undo(everything)
    try:
        before = bindings(module)
        REGISTRY.apply([module])
        waiting = [patch.target for patch in REGISTRY.of([module]) if patch.status == "waiting"]
        during = bindings(module)
        changed = [name for name in during if name not in before or during[name] is not before[name]]
        REGISTRY.undo([module])
        after = bindings(module)
        left = [name for name in {**before, **after} if before.get(name, "gone") is not after.get(name, "gone")]
        return len(changed), left, waiting
    finally:
        REGISTRY.apply(everything)


def bindings(module: str) -> dict:
    """Everything that any module binds, and what the classes that are patched hold."""
    from mindspeed_mem.patching import REGISTRY

    found: dict = {("sys.modules", name): value for name, value in sys.modules.items() if name.startswith("megatron")}
    for name, value in list(sys.modules.items()):
        # wrapt notes that somebody waits for a module: neither Megatron's nor torch's business.
        if type(value) is ModuleType and not name.startswith(("wrapt", "__main__", "__mp_main__")):
            found |= {(name, key): bound for key, bound in vars(value).items() if not key.startswith("__")}
    for patch in REGISTRY.of([module]):
        owner, _, rest = patch.target.partition(":")
        if "." in rest and owner in sys.modules:
            holder = getattr(sys.modules[owner], rest.partition(".")[0])
            found |= {(patch.target, key): bound for key, bound in vars(holder).items()}
    return found


@pytest.mark.parametrize("file", FILES)
def test_undo_restores_every_name(file):
    ((changed, left, waiting),) = on_ranks(1, trace_of, file)
    assert left == []
    assert changed > 0
    assert all(target.startswith(("megatron.training", "megatron.legacy")) for target in waiting)


def loss_with_recomputed_dropout() -> list[float]:
    import torch

    from tests.models import build_gpt, train_step

    with parallel():
        fused = {"bias_dropout_fusion": True, "bias_activation_fusion": True}  # decorated by torch.compile at import
        chunks = build_gpt("dropout", dtype=torch.bfloat16, recompute_granularity="selective", **fused)
        result = train_step(chunks)
        return [result.loss, *(float(grad.double().sum()) for grad in result.grads.values())]


def test_megatron_may_have_been_imported_before():
    """Its copies of torch's functions are found, and what it compiled at import is run as it was written."""
    script = """
        import megatron.core.models.gpt, megatron.core.pipeline_parallel, megatron.core.optimizer, os, sys, tempfile
        import megatron.core.fusions.fused_bias_dropout as fusion
        import torch, torch.distributed as dist
        from tests.worlds import apply_cpu_patches

        assert hasattr(fusion.bias_dropout_add_fused_train, "_torchdynamo_orig_callable")
        apply_cpu_patches()
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("nccl", init_method=f"file://{folder}/group", rank=0, world_size=1)
            from tests.patches.test_cpu_undo import loss_with_recomputed_dropout
            print("numbers", *loss_with_recomputed_dropout())
            dist.destroy_process_group()
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "CXX": "/none", "CC": "/none"}
    run = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(run, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("numbers")]
    assert [float(number) for number in line.split()[1:]] == on_ranks(1, loss_with_recomputed_dropout)[0]
