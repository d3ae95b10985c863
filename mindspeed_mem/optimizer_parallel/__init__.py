"""Optimizer parallelism without chunks: each data-parallel rank updates its part of the parameters and hands it out.

    from mindspeed_mem.optimizer_parallel import parallelize

    optimizer = parallelize(torch.optim.AdamW(model.parameters()), process_group, "sharding")
    loss.backward()     # leaves whole gradients, reduced over the ranks, as DistributedDataParallel does
    optimizer.step()    # updates this rank's part, then every rank gets all parameters

Optimizer states, most of what an optimizer keeps, are there for a rank's own part only. Losses and parameters stay
bit-identical. ``grouping`` gives each rank whole parameters, ``sharding`` a slice of each.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mindspeed_mem.optimizer_parallel.assignment import MODES, Assignment

if TYPE_CHECKING:
    from mindspeed_mem.optimizer_parallel.optimizer import Figures as Figures
    from mindspeed_mem.optimizer_parallel.optimizer import ParallelOptimizer as ParallelOptimizer
    from mindspeed_mem.optimizer_parallel.optimizer import parallelize as parallelize
    from mindspeed_mem.optimizer_parallel.support import OptimizerParallelError as OptimizerParallelError

__all__ = ["MODES", "Assignment", "Figures", "OptimizerParallelError", "ParallelOptimizer", "parallelize"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # not before it is asked for: it imports DTensors, for a second
        module = "support" if name == "OptimizerParallelError" else "optimizer"
        return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
