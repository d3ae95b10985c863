"""A script of MindSpeed-LLM beside us: `python -m tests.beside_mindspeed_llm ORDER SCRIPT [the script's arguments]`.

MINDSPEED and MINDSPEED_LLM name checkouts, Megatron-LM of their version is on PYTHONPATH, and what they need besides
has stand-ins that do nothing (tests/beside_mindspeed.py). ORDER is who is imported first: `ours`, `theirs`, `run` (the
script is started by our command) or `alone`: without us, but for what lets Megatron-LM train on the host.

Prints, after all that the script prints, a line of JSON: digests of the parameters after each step, what moved or ran
again, which of our patches are lost, and what functions Megatron-LM's layers gather by.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from tests import beside_mindspeed

ABSENT = ("datasets", "sentencepiece", "tiktoken", "tensorboard", "ray", "fla", "trl", "jieba", "pandas", "termcolor")


def main() -> None:
    order, script, *arguments = sys.argv[1:]
    names = (*beside_mindspeed.ABSENT, *ABSENT)
    beside_mindspeed.ABSENT = tuple(name for name in names if importlib.util.find_spec(name) is None)
    beside_mindspeed.on_host(ours=order != "alone")
    sys.path.insert(0, os.environ["MINDSPEED_LLM"])
    sys.argv[:] = [script, *arguments]
    atexit.register(_tell)
    register_optimizer_step_post_hook(_stepped)
    if order in ("alone", "theirs"):
        from tests.worlds import apply_cpu_patches

        apply_cpu_patches(None)  # without which Megatron-LM cannot be imported here
        importlib.import_module("mindspeed_llm")
    if order in ("ours", "theirs"):
        importlib.import_module("mindspeed_mem.megatron_adaptor")
    if order == "run":
        sys.argv[:] = ["mindspeed_mem", "run", script, *arguments]
        runpy.run_module("mindspeed_mem", run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script, run_name="__main__")


_steps: list[str] = []


def _stepped(optimizer: Any, *_: Any) -> None:
    digest = hashlib.sha256()
    for parameter in [one for group in optimizer.param_groups for one in group["params"]]:
        digest.update(parameter.detach().float().numpy().tobytes())
    _steps.append(digest.hexdigest()[:16])


def _tell() -> None:
    from mindspeed_mem.activation import engine as engines
    from mindspeed_mem.patching import REGISTRY

    engine = engines.current()
    report = None if engine is None else engine.report()
    ours = [patch for patch in REGISTRY.patches if ".cpu_" not in patch.declared_by]
    found: dict[str, Any] = {
        "steps": _steps,
        "moved": 0 if report is None else report.bytes_out,
        "again": 0 if report is None else report.recomputed_bytes,
        "lost": [patch.target for patch in ours if patch.verify().startswith(("LOST", "FAILED"))],
        "gathers by": Path(_source("megatron.core.tensor_parallel.layers", "dist_all_gather_func")).name,
    }
    print(json.dumps(found), flush=True)


def _source(module: str, name: str) -> str:
    return getattr(sys.modules[module], name).__code__.co_filename


if __name__ == "__main__":
    main()
