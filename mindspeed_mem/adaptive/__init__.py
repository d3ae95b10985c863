"""Finding a memory plan: a problem described by measured or estimated figures, searched, simulated and written down.

`Search(problem).best()` is the whole of it; `estimate.problem` makes a problem of a model's shape, `trace.read` of a
profile, and `plan_file.memory_config` makes the `--memory-config` file of a plan.
"""

from mindspeed_mem.adaptive.infeasible import InfeasibleError
from mindspeed_mem.adaptive.layout import Plan, StagePlan
from mindspeed_mem.adaptive.problem import Problem
from mindspeed_mem.adaptive.search import Found, Search
from mindspeed_mem.adaptive.simulation import Simulated, simulate

__all__ = ["Found", "InfeasibleError", "Plan", "Problem", "Search", "Simulated", "StagePlan", "simulate"]
