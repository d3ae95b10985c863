"""Megatron-LM's own megatron.training (0.16.1) without CUDA, nvcc and triton. Waits until somebody imports it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from mindspeed_mem.patching import REGISTRY, Patch, around

_DATASETS, _HELPERS = "megatron.core.datasets", "helpers_cpp"


@around("megatron.training.initialize:initialize_megatron")
def _initialize_megatron(original, *args, **kwargs):
    """pretrain() never says that it can do without CUDA."""
    if len(args) < 4:
        kwargs["allow_no_cuda"] = True
    return original(*args, **kwargs)


@around("megatron.core.datasets.utils:compile_helpers")
def _compile_helpers(original):
    """The published wheel has the dataset index builder, but not the Makefile that upstream runs on every start."""
    if importlib.util.find_spec(f"{_DATASETS}.{_HELPERS}") is None:
        original()


@around("megatron.legacy.fused_kernels:load")
def _load_fused_kernels(original, args):
    """CUDA kernels; upstream fails on looking for nvcc."""


class _Package:
    """A package's modules as attributes: those that were imported."""

    def __init__(self, name):
        self.__dict__["_name"] = name

    def __getattr__(self, name):
        try:
            return sys.modules[f"{self._name}.{name}"]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name, module):
        sys.modules[f"{self._name}.{name}"] = module

    def __delattr__(self, name):
        del sys.modules[f"{self._name}.{name}"]


def _stand_in(module: ModuleType, **versions: str) -> None:
    """Declare that importing `module.__name__` finds it; versions: ``since`` and ``before``."""
    package, _, name = module.__name__.rpartition(".")
    owner = _Package(package)
    how: dict[str, Any] = {"create": True, "declared_by": __name__, "_bound_to": owner, **versions}
    REGISTRY.declare(Patch(f"{package}:{name}", module, "replace", **how))


def _without_kernels(name: str, *functions: str, why: str) -> Any:
    """The module `name`, which imports triton, for those who import and seldom use it: its functions say why not."""

    def refuse(*args, **kwargs):
        raise RuntimeError(why)

    module = ModuleType(name, _without_kernels.__doc__)
    vars(module).update(dict.fromkeys(functions, refuse))
    return module


def _installed_helpers() -> ModuleType | None:
    """The index builder of an installed megatron-core, where a checkout that lacks one comes first in sys.path."""
    folders = [Path(entry or ".", *_DATASETS.split(".")) for entry in sys.path]
    found = [sorted(folder.glob(f"{_HELPERS}.*.so")) for folder in folders if (folder / "utils.py").is_file()]
    if not found or found[0] or not any(found):
        return None
    spec = importlib.util.spec_from_file_location(f"{_DATASETS}.{_HELPERS}", next(filter(None, found))[0])
    assert spec is not None and spec.loader is not None  # of a file that is there
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if importlib.util.find_spec("triton") is None:
    _kernels = _without_kernels(  # imported by megatron.training.initialize
        "megatron.core.transformer.custom_layers.batch_invariant_kernels",
        *("enable_batch_invariant_mode", "disable_batch_invariant_mode"),
        why="batch invariant kernels need triton: leave --batch-invariant-mode out on CPU",
    )
    _kernels.is_batch_invariant_mode_enabled = lambda: False
    _stand_in(_kernels)
    _kernels = _without_kernels(  # imported by the state-space mixer's file
        "megatron.core.inference.contexts.attention_context.triton.tensor_ops",
        *("tensor_get_slice_after", "tensor_masked_update", "tensor_merge"),
        why="inference of state-space layers needs triton, which runs on CUDA",
    )
    _stand_in(_kernels)
    _why = "a paged stash needs triton, which runs on CUDA: leave --moe-paged-stash out"  # imported by the schedules
    _kernels = _without_kernels(
        "megatron.core.transformer.moe.paged_stash",
        *("paged_stash_reset", "paged_stash_init_chunk_handler", "paged_stash_group_start", "paged_stash_group_commit"),
        *("get_paged_stash_context", "PagedStashRunner"),
        why=_why,
    )
    _stand_in(_kernels, since="0.18", before="0.19")
    _kernels = _without_kernels(
        "megatron.core.transformer.moe.ops.paged_stash",
        *("paged_stash_copy_kernel", "paged_stash_pop_kernel", "GLOBAL_BLOCK_SIZE"),
        why=_why,
    )
    _stand_in(_kernels, since="0.19")
_helpers = _installed_helpers()
if _helpers is not None:
    _stand_in(_helpers)
