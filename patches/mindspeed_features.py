"""mindspeed.features_manager: MindSpeed sees our flags and checks, and its patching does not drop ours.

Why here: MindSpeed replaces whatever it finds on a symbol when it applies its patches, again at each ``repatch``. So
ours are lifted before it touches symbols and put back, on top, when it has applied its own. Our entry in its list of
features makes its parsers know our flags and its validation call our checks; `set_features_list`, with which
MindSpeed-LLM brings its own list, would drop that entry.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from pathlib import Path

from mindspeed_mem import features
from mindspeed_mem.patching import REGISTRY, around

_MANAGER = "mindspeed.features_manager.features_manager:MindSpeedFeaturesManager."
_lifted: list = []


def join() -> bool:
    """Import MindSpeed's adaptor with our features in its list; False where MindSpeed or torch_npu is missing.

    In a script of MindSpeed-LLM it is that package's own adaptor, which applies MindSpeed's patches by itself: after
    MindSpeed's, some names would keep what MindSpeed alone has put there. What has been applied already stays: again,
    MindSpeed would raise, as nobody may replace a symbol twice.
    """
    if not all(map(importlib.util.find_spec, ("mindspeed", "torch_npu"))):
        return False
    from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager
    from mindspeed.patch_utils import MindSpeedPatchesManager

    _append(MindSpeedFeaturesManager)
    REGISTRY.apply([__name__])
    if not MindSpeedPatchesManager.patches_info and "mindspeed.megatron_adaptor" not in sys.modules:
        importlib.import_module("mindspeed_llm" if _of_mindspeed_llm(sys.argv[0]) else "mindspeed.megatron_adaptor")
    return True


def _of_mindspeed_llm(script: str) -> bool:
    """Whether the script imports MindSpeed-LLM by name, as all of its own do."""
    if importlib.util.find_spec("mindspeed_llm") is None:
        return False
    try:
        text = Path(script).read_text(encoding="utf-8", errors="replace")
    except OSError:  # of an interactive session, or none at all
        return False
    return re.search(r"^\s*(from|import)\s+mindspeed_llm\b", text, re.MULTILINE) is not None


@functools.cache
def _entry():
    from mindspeed.features_manager.feature import MindSpeedFeature

    class MemoryFeatures(MindSpeedFeature):
        def __init__(self):
            super().__init__("mindspeed_mem", optimization_level=0)

        def register_args(self, parser):
            features.add_arguments(parser)

        def validate_args(self, args):
            """`args` is a namespace, or each TransformerConfig that is made when there is no megatron.training."""
            on = [f.flag for f in features.FEATURES if getattr(args, f.dest, f.default) not in (f.default, None)]
            problems = features.conflicts(args, on)
            if problems:
                raise features.FeatureError(problems)

    return MemoryFeatures()


def _append(manager) -> None:
    if _entry() not in manager.FEATURES_LIST:
        manager.FEATURES_LIST.append(_entry())


@around(_MANAGER + "set_features_list")
def set_features_list(original, cls, *args, **kwargs):
    original(cls, *args, **kwargs)
    _append(cls)


@around(_MANAGER + "remove_patches")
def remove_patches(original, cls):
    _lifted[:] = [*_lifted, *REGISTRY.lift(keep=[__name__])]
    original(cls)


@around(_MANAGER + "apply_features_patches")
def apply_features_patches(original, cls, *args, **kwargs):
    _lifted[:] = [*_lifted, *REGISTRY.lift(keep=[__name__])]
    original(cls, *args, **kwargs)
    lifted, _lifted[:] = _lifted[:], []
    REGISTRY.put_back(lifted)
