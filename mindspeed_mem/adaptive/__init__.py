"""Finding a memory plan: a problem described by measured or estimated figures, searched, simulated and written down.

    problem/  what is to be planned: layers, stages, link, limits; made from a profile or from a model's shape
    search/   the plan: decisions, the integer program, descent, simulation, what plans are compared with
    layout/   how a model is split over devices, each split with its best plan
    run/      a training run: from its profile to a settled plan

`Search(problem).best()` is the whole of it; `from_shape.problem` makes a problem of a model's shape,
`profile_file.read` of a profile, and `plan_file.memory_config` makes the memory configuration of a plan.
"""

from mindspeed_mem.adaptive.problem.definition import Problem
from mindspeed_mem.adaptive.search.decisions import Plan, StagePlan
from mindspeed_mem.adaptive.search.infeasible import InfeasibleError
from mindspeed_mem.adaptive.search.search import Found, Search
from mindspeed_mem.adaptive.search.simulation import Simulated, simulate

__all__ = ["Found", "InfeasibleError", "Plan", "Problem", "Search", "Simulated", "StagePlan", "simulate"]
