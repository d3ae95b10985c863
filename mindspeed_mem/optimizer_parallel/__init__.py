"""Optimizer parallelism without chunks: each data-parallel rank updates its part of the parameters and hands it out.

    from mindspeed_mem.optimizer_parallel import parallelize

    optimizer = parallelize(torch.optim.AdamW(model.parameters()), process_group, "sharding")
    loss.backward()     # leaves whole gradients, reduced over the ranks, as DistributedDataParallel does
    optimizer.step()    # updates this rank's part, then every rank gets all parameters

Optimizer states, most of what an optimizer keeps, are there for a rank's own part only. Losses and parameters stay
bit-identical. ``grouping`` gives each rank whole parameters, ``sharding`` a slice of each.
"""

from mindspeed_mem.optimizer_parallel.assignment import MODES, Assignment
from mindspeed_mem.optimizer_parallel.optimizer import Figures, ParallelOptimizer, parallelize
from mindspeed_mem.optimizer_parallel.support import OptimizerParallelError

__all__ = ["MODES", "Assignment", "Figures", "OptimizerParallelError", "ParallelOptimizer", "parallelize"]
