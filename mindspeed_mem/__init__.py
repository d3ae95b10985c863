"""Train models that do not fit in device memory, at nearly the speed of those that do.

For Megatron, ``import mindspeed_mem.megatron_adaptor`` first in the pretrain script; importing ``mindspeed_mem`` alone
changes nothing. For other torch models, `attach` applies a memory plan, `trainer_callback` does so in Hugging Face's
Trainer, and `recompute` and `swap` add single modules to it.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspeed_mem.attachment import attach as attach
    from mindspeed_mem.attachment import recompute as recompute
    from mindspeed_mem.attachment import swap as swap
    from mindspeed_mem.attachment import trainer_callback as trainer_callback

__all__ = ["__version__", "attach", "recompute", "swap", "trainer_callback"]
__version__ = "0.1.0"

# The patches live in a top-level folder of the checkout and inside the package of an installed wheel: with this line
# `mindspeed_mem.patches` is the same name in both.
if not (Path(__file__).parent / "patches").is_dir():
    __path__.append(str(Path(__file__).parent.parent))


def __getattr__(name: str) -> Any:
    if name in __all__:  # not before it is asked for: it imports torch
        from mindspeed_mem import attachment

        return getattr(attachment, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
