"""``mindspeed_mem.attach``: activation swap and recompute for any torch model, operators named by its modules."""

from mindspeed_mem.attachment.attached import Attached, attach

__all__ = ["Attached", "attach"]
