"""megatron.core.distributed: what gathers parameters and reduces gradients is no part of an operator.

Why here: its hooks run within the forward of modules (``--overlap-param-gather``), and hold whole buckets of parameters
and gradients. Whoever looks for what an operator changes would copy these, while others may be on their way.
"""

from __future__ import annotations

from mindspeed_mem.patching import join

join("mindspeed_mem.activation.rerun.state:FOREIGN", "megatron.core.distributed.", declared_by=__name__)
