"""A run beside the real MindSpeed, in a process of its own: `python -m tests.beside_mindspeed DEVICE ORDER [flags]`.

MINDSPEED names a checkout. What it needs besides (acl, triton, torchair) has stand-ins that do nothing. DEVICE is
`cpu`, where torch_npu is one of them and our import brings MindSpeed in as it does on an NPU; or `npu`, the tests'
accelerator (ACCELERATOR: its library). ORDER is who is imported first: `ours`, `theirs`, or `alone`: MindSpeed without
us, but for what lets megatron-core train there. The flags are ours, but for --use-distributed-optimizer: with it,
losses and norms of gradients are compared, after steps of the optimizer. With RANK, WORLD_SIZE and MASTER_PORT it is
one of several ranks, data-parallel but for what TP and PP say, where reductions and gathers overlap.

Prints a line of JSON: what was trained before and after MindSpeed's `repatch`, what is wrong with our patches then, and
what moved or ran again.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

ABSENT = ("acl", "torchair", "triton", "einops")


class _Nothing(type):
    """Whatever is asked of it is another one; called with a function alone, as a decorator is, it gives that back."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "backend":  # triton's is a kind of device
            return "cpu"
        if name.startswith("range_"):  # a marker for profilers: a function, which takes the place of torch's
            return lambda *args, **kwargs: 0
        made = _Nothing(name, (), {})
        setattr(cls, name, made)
        return made

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and isinstance(args[0], types.FunctionType) else _Nothing(cls.__name__, (), {})

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())


class _Module(types.ModuleType):
    __version__, __file__ = "2.7.1", __file__

    def __getattr__(self, name: str) -> Any:
        return getattr(_Nothing(name, (), {}), name)


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        absent = name.partition(".")[0] in (*ABSENT, "torch_npu")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "torch_npu":
            import torch

            torch.npu = torch.cuda  # type: ignore[attr-defined]  # which is made to be the host


def on_host(ours: bool) -> None:
    """Let the checkout be imported on the host; `ours`: by our import."""
    _importable()
    from mindspeed_mem.device.cpu import CpuBackend

    CpuBackend.runs_mindspeed = ours


def on_accelerator(ours: bool) -> None:
    """The same where the tests' accelerator stands in as an NPU: torch_npu has all of that, and no more that works."""
    from tests.accelerator import stand_in

    stand_in.start("npu", Path(os.environ["ACCELERATOR"]))
    _importable()
    from mindspeed_mem.device.npu import NpuBackend
    from tests.accelerator import transfer

    NpuBackend.runs_mindspeed = ours
    transfer.install()
    npu: Any = sys.modules["torch_npu"]
    npu.__class__, npu.__version__, npu.__path__ = _Module, _Module.__version__, []
    sys.modules["torch_npu.npu"] = npu.npu = _Module("torch_npu.npu")
    vars(npu.npu).update(vars(sys.modules["torch.npu"]), _lazy_call=lambda call, **how: call())
    # MindSpeed asks whether it knows names of groups: its first versions did not
    npu._C._distributed_c10d = types.SimpleNamespace(ProcessGroupHCCL=types.SimpleNamespace(Options=object))


def _importable() -> None:
    sys.path.append(os.environ["MINDSPEED"])
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0")  # torch's way to build kernels asks a GPU otherwise
    sys.meta_path.insert(0, _StandIns())


def main() -> None:
    device, order, *flags = sys.argv[1:]
    sys.argv[1:] = ["--device", device, *flags]
    {"cpu": on_host, "npu": on_accelerator}[device](ours=order != "alone")
    if order == "theirs":
        from tests.worlds import apply_cpu_patches

        apply_cpu_patches(None if device == "cpu" else device)  # without which megatron-core cannot be imported here
        importlib.import_module("mindspeed.megatron_adaptor")
    import mindspeed_mem.megatron_adaptor as mem

    theirs = importlib.import_module("mindspeed.megatron_adaptor")
    from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager as manager

    from mindspeed_mem.patching import REGISTRY

    mem.configure({})
    sharded = "--use-distributed-optimizer" in flags
    found: dict[str, Any] = {"before": _trained(device, sharded)}
    theirs.repatch({"use_distributed_optimizer": sharded})
    found["after"] = _trained(device, sharded)
    manager.set_features_list(list(manager.FEATURES_LIST[:3]))
    found["in their list"] = [one.feature_name for one in manager.FEATURES_LIST][3:]
    ours = [patch for patch in REGISTRY.patches if ".cpu_" not in patch.declared_by]
    lost = (patch for patch in ours if patch.verify().startswith(("LOST", "FAILED")))
    if device == "npu":
        sys.modules["tests.accelerator.stand_in"].check()
    found["lost"] = [f"{patch.target} {patch.verify()}" for patch in lost]
    found["theirs"] = len(_patches_of_theirs())
    figures = _figures()
    print(json.dumps({**found, **figures}))
    sys.stdout.flush()
    os._exit(0)  # its stand-ins are in no state to be taken down


def _patches_of_theirs() -> Any:
    from mindspeed.patch_utils import MindSpeedPatchesManager

    return [one for one in MindSpeedPatchesManager.patches_info.values() if one.is_applied]


def _trained(device: str, sharded: bool) -> list[str]:
    """Losses and gradients, or norms of these, of two steps, as digests."""
    import torch.distributed as dist

    from mindspeed_mem.device import get_backend
    from tests.models import build_gpt, build_optimizer, train_step
    from tests.worlds import parallel

    layout = {name: int(os.environ.get(name.upper(), 1)) for name in ("tp", "pp")}
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if not dist.is_initialized():
        store = (
            dist.HashStore()
            if size == 1
            else dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), size, not rank)
        )
        dist.init_process_group(get_backend(device).collectives, store=store, rank=rank, world_size=size)
    accelerator = sys.modules.get("tests.accelerator.stand_in")
    with accelerator.lagging(random=200) if accelerator else contextlib.nullcontext(), parallel(**layout):
        overlap = {"overlap_grad_reduce": size > 1, "overlap_param_gather": size > 1}
        ddp = {"use_distributed_optimizer": True, **overlap} if sharded else None
        chunks = build_gpt("dropout", layers=2, ddp=ddp, sequence_parallel=layout["tp"] > 1)
        more = {"micro_batches": 2, "attention_mask": True, "optimizer": build_optimizer(chunks) if sharded else None}
        results = [train_step(chunks, step=step, **more) for step in range(2)]
    digests = []
    for one in results:
        digest = hashlib.sha256(repr((one.loss, one.grad_norm)).encode())
        for name in () if sharded else sorted(one.grads):
            digest.update(one.grads[name].cpu().numpy().tobytes())
        digests.append(digest.hexdigest()[:16])
    return digests


def _figures() -> dict[str, Any]:
    from mindspeed_mem.activation import engine as engines

    engine = engines.current()
    report = None if engine is None else engine.report()
    return {
        "moved": 0 if report is None else report.bytes_out,
        "again": 0 if report is None else report.recomputed_bytes,
    }


if __name__ == "__main__":
    main()
