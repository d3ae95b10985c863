"""Runs files of another project's tests with the features that flags switch on, each file in processes of its own.

    python peer_files.py --device cpu --survive-oom -- "8:order or groups:/path/to/test_schedules.py" ...

Before the path stand the number of ranks and the tests to leave out, as for pytest's -k. Processes are forked, one per
rank, once what all need has been imported; in the working directory each leaves what it printed as NUMBER.RANK.log and
pytest's report as NUMBER.RANK.xml, by the number of the file. Files in a checkout that MINDSPEED names find MindSpeed
imported, with stand-ins for what it needs of an NPU; their conftest, which would start ranks itself, is left out.
"""

import importlib
import importlib.util
import inspect
import os
import socket
import sys
import time
from types import ModuleType

import wrapt
from packaging.version import Version

_apart = sys.argv.index("--")
_files = [one.split(":", 2) for one in sys.argv[_apart + 1 :]]
del sys.argv[_apart:]
_beside = os.environ.get("MINDSPEED")
if _beside:
    from tests.beside_mindspeed import on_host

    on_host(ours=len(sys.argv) > 3)  # --device cpu and flags

import mindspeed_mem.megatron_adaptor as mem  # noqa: E402 (it reads sys.argv)
from mindspeed_mem.activation import engine as engines  # noqa: E402

LIMIT = 600
"""Seconds that a file may take."""
SHARED = ("torch.distributed", "pytest", "megatron.core.models.gpt.gpt_layer_specs", "megatron.training.training")


def stand_in() -> None:
    """For what is not installed, and for what their conftest would download although no listed test reads it."""

    def versions(utils):  # Megatron compares versions of what is not installed, too
        absent = {"_te_version": "transformer_engine", "_fa_version": "flash_attn", "_mamba_ssm_version": "mamba_ssm"}
        vars(utils).update({name: Version("0") for name, of in absent.items() if importlib.util.find_spec(of) is None})

    def local(specs):  # many tests name TransformerEngine's layer spec, and would do with any
        known = set(inspect.signature(specs.get_gpt_layer_local_spec).parameters) - {"moe_grouped_gemm"}

        def spec(num_experts=None, moe_grouped_gemm=False, *args, **more):
            more = {name: value for name, value in more.items() if name in known}
            return specs.get_gpt_layer_local_spec(num_experts, False, *args, **more)

        if importlib.util.find_spec("transformer_engine") is None:
            specs.get_gpt_layer_with_transformer_engine_spec = spec

    def hybrid(specs):
        specs.mamba_stack_spec = specs.hybrid_stack_spec = importlib.import_module("hybrid_layers").stack

    def norm(fused):  # MindSpeed names Apex', whose place its fused operators take on an NPU
        class Norm(importlib.import_module("torch").nn.LayerNorm):
            def __init__(self, config, hidden_size, eps=1e-5, **_):
                super().__init__(hidden_size, eps=eps)

        if _beside:
            fused.FusedLayerNorm = Norm

    wrapt.register_post_import_hook(versions, "megatron.core.utils")
    wrapt.register_post_import_hook(norm, "megatron.core.fusions.fused_layer_norm")
    wrapt.register_post_import_hook(local, "megatron.core.models.gpt.gpt_layer_specs")
    wrapt.register_post_import_hook(hybrid, "megatron.core.models.mamba.mamba_layer_specs")
    name = "tests.test_utils.python_scripts.download_unit_tests_dataset"
    sys.modules[name] = ModuleType(name)
    sys.modules[name].download_and_extract_asset = lambda **where: None


def rank(number: int, path: str, ranks: int, one: int, port: int, without: str) -> int:
    """One rank of one file, in a process that has been forked for it."""
    import pytest

    world = {"RANK": one, "LOCAL_RANK": one, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in world.items()}})
    output = os.open(f"{number}.{one}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    mem.configure({})
    root = _beside or path.partition("/tests/")[0]
    options = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", "--rootdir", root, f"--junitxml={number}.{one}.xml"]
    if _beside:
        importlib.import_module("torch.distributed").init_process_group("gloo", rank=one, world_size=ranks)
        options += ["--noconftest"]
    status = int(pytest.main([*options, *(["-k", f"not ({without})"] if without else []), path]))
    if (engine := engines.current()) is not None:
        report = engine.report()
        print(f"bytes moved out {report.bytes_out}, recomputed {report.recomputed_bytes}", flush=True)
    return status


def main() -> None:
    stand_in()
    for name in [*SHARED, *(["mindspeed.megatron_adaptor"] if _beside else [])]:
        importlib.import_module(name)
    for number, (ranks, without, path) in enumerate(_files):
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            port = listening.getsockname()[1]
        running = []
        for one in range(int(ranks)):
            child = os.fork()
            if not child:
                try:
                    status = rank(number, path, int(ranks), one, port, without)
                except BaseException as error:
                    print(f"{type(error).__name__}: {error}", flush=True)
                    status = 3
                sys.stdout.flush()
                os._exit(status)
            running.append(child)
        until = time.monotonic() + LIMIT
        while running and time.monotonic() < until:
            running = [child for child in running if os.waitpid(child, os.WNOHANG) == (0, 0)]
            time.sleep(0.1)
        for child in running:
            os.kill(child, 9)
            os.waitpid(child, 0)


if __name__ == "__main__":
    main()
