"""``mindspeed_mem.attach``: activation swap and recompute for any torch model, operators named by its modules."""

from mindspeed_mem.attachment.attached import Attached, attach
from mindspeed_mem.attachment.trainer import trainer_callback
from mindspeed_mem.parallel.recompute import recompute, swap

__all__ = ["Attached", "attach", "recompute", "swap", "trainer_callback"]
