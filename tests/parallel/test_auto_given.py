"""What `auto` searches: the cheapest of all combinations, with rows that the user fixes; or why there is none."""

import copy
import itertools
import math
import os
import random
from collections import defaultdict

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

from mindspeed_mem import parallel
from mindspeed_mem.device.limited_cpu import LimitedMemory
from mindspeed_mem.parallel import search
from mindspeed_mem.parallel.calls import calls_of
from mindspeed_mem.parallel.given import Given
from mindspeed_mem.parallel.options import Asker, moving, parts
from tests.parallel_models import Block
from tests.worlds import on_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.needs_torch("2.13", "DTensor's rules")]
MACHINE = parallel.Machine(tflops=1e-3, memory_gbps=1, gbps=1e-2, latency_us=3, launch_us=0)


class Pair(nn.Module):
    """Two readers of one tensor, and a sum."""

    def __init__(self, hidden=4, bias=False):
        super().__init__()
        self.one, self.two = nn.Linear(hidden, hidden, bias=bias), nn.Linear(hidden, hidden, bias=bias)

    def forward(self, x):
        return self.one(x) + self.two(x)


class Chain(nn.Module):
    def __init__(self, hidden=4):
        super().__init__()
        self.one, self.two = nn.Linear(hidden, 2 * hidden, bias=False), nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x):
        return self.two(torch.relu(self.one(x)))


class Layers(nn.Module):
    def __init__(self, layers=3, hidden=8):
        super().__init__()
        self.layers = nn.ModuleList(Layer(hidden) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(x)))


def combinations(built):
    """Seconds and bytes of all combinations of options, counted one by one."""
    keys = list(built.classes)
    for options in itertools.product(*(one.options for one in built.classes.values())):
        chosen = dict(zip(keys, options, strict=True))
        sent = seconds(built, chosen)
        if sent < math.inf:
            yield sent + sum(3 * one.seconds for one in options), held(built, chosen)


def seconds(built, chosen):
    """Of what is moved: once for readers of a tensor that want the same."""
    once = {}
    for number, edge in enumerate(built.edges.values()):
        value, option, given = edge.value, chosen[edge.reader], chosen[edge.maker].outs[edge.place]
        wanted, summed = option.ins[edge.number], search._summed(option, edge.number)
        both = moving(value.bytes, given, wanted, summed, value.like.requires_grad, built.sizes, built.links)
        if both is None:
            return math.inf
        own = number if value.kind == "parameter" and given != wanted else -1
        once["forward", edge.maker, edge.place, wanted, own] = both[0]
        once["backward", edge.maker, edge.place, wanted, summed, own] = both[1]
    return sum(once.values())


def held(built, chosen):
    """Bytes: parameters, what is kept for backward, and the most that lives for a moment."""
    kept, moment, states = {}, defaultdict(float), 0
    for key, one in built.classes.items():
        option, value = chosen[key], one.member
        if one.call is None:
            if value.kind == "parameter":
                states += (2 * value.bytes + 8 * value.like.numel()) / parts(option.outs[0], built.sizes)
            continue
        kept[key] = option.kept
        for place in one.call.keeps_outputs:
            kept[key, place, option.outs[place]] = one.call.outputs[place].bytes / parts(
                option.outs[place], built.sizes
            )
        for value, placed in zip(one.call.inputs + one.call.outputs, option.ins + option.outs, strict=True):
            moment[key] += value.bytes * value.like.requires_grad / parts(placed, built.sizes)
        for maker, place in one.pending:
            moment[key] += built.classes[maker].call.outputs[place].bytes / parts(
                chosen[maker].outs[place], built.sizes
            )
    for number, edge in enumerate(built.edges.values()):
        reader, value = built.classes[edge.reader], edge.value
        p, q = chosen[edge.maker].outs[edge.place], chosen[edge.reader].ins[edge.number]
        keeps = reader.call is None or edge.number in reader.call.keeps_inputs
        own = number if value.kind == "parameter" else "moved"
        if keeps and not (p == q and value.kind == "parameter"):
            kept[(edge.maker, edge.place, q) if p == q else (own, edge.maker, edge.place, q)] = value.bytes / parts(
                q, built.sizes
            )
        if p != q:
            moment[edge.reader] += value.bytes * value.like.requires_grad / parts(p, built.sizes)
        if reader.call is None or p != q and not keeps:
            moment[edge.reader] += value.bytes / parts(q, built.sizes)
    return states + sum(kept.values()) + max(moment.values())


def enumerated(*cases):
    mesh, found = parallel.mesh("cpu", tp=2), []
    for kind, batch in cases:
        model = kind()
        x = torch.randn(batch, 4)
        plan = parallel.auto(model, x, mesh, machine=MACHINE)
        again = parallel.auto(model, x, mesh, machine=MACHINE)
        assert list(again.rows.items()) == list(plan.rows.items()) and again.seconds == plan.seconds
        calls = calls_of(model, (x,))
        given = Given(model, mesh, calls, parallel.Plan({}))
        links = [MACHINE.link("tp", mesh)]
        every = list(combinations(search.Search(calls, Asker(mesh, MACHINE), links, 8.0, given)))
        least = min(size for _, size in every)
        limits = [None, *(least * (1 - share) + plan.memory_gib * 2**30 * share + 1 for share in (0.05, 0.6))]
        for limit in limits:
            tight = parallel.auto(model, x, mesh, limit and limit / 2**30, machine=MACHINE)
            fit = [time for time, size in every if limit is None or size <= limit]
            found.append((tight.seconds, min(fit), tight.gap, limit is None or tight.memory_gib * 2**30 <= limit))
        assert len(every) > 100
    return found


@pytest.mark.parametrize(
    "cases", [[(Pair, 256)], pytest.param([(Pair, 4), (Chain, 8), (Chain, 512)], marks=pytest.mark.sweep)]
)
def test_a_plan_is_the_cheapest_of_all_combinations_that_fit(cases):
    found = on_ranks(2, enumerated, *cases)[0]
    assert len({least for _, least, *_ in found}) > len(cases), "limits change nothing"
    for planned, least, gap, fits in found:
        assert planned == pytest.approx(least, rel=1e-5)
        assert gap < 1e-5 and fits


COLUMNS = {"weight": ("tp", None), "bias": ("tp",)}
ROWS = {"weight": (None, "tp")}


def megatrons(columns, rows):
    """Columns of the first layers, rows of the others, as `given`: weights, and what their operators get."""
    given = {"": {"in_strategy": ((None, None, None),)}}
    whole, split = (None, None, None), (None, None, "tp")
    for names, parameters, ins in (
        (columns, COLUMNS, (whole, *COLUMNS.values())),
        (rows, ROWS, (split, *ROWS.values())),
    ):
        for name in names:
            given[name] = {"parameter_plan": parameters}
            given[f"{name}:linear"] = {"in_strategy": (*ins, (None,))[:3]}
    return given


SPLITS = {
    "MLP": (lambda: Layer(16), megatrons(["fc1"], ["fc2"])),
    "block": (lambda: Block(16, 4, 0.0), megatrons(["q", "k", "v", "fc1"], ["out", "fc2"])),
}


def cost(built, chosen):
    return seconds(built, chosen) + sum(3 * option.seconds for option in chosen.values())


def drawn(built, near, share):
    """A random choice that can be run; of what `near` has each is kept but for a `share`."""
    chosen = {}
    for key, one in built.classes.items():
        fit = list(one.options)
        for edge in built.edges.values():
            if edge.reader == key:
                given = chosen[edge.maker].outs[edge.place]
                fit = [
                    option
                    for option in fit
                    if not any(p.is_partial() for p in option.ins[edge.number]) or option.ins[edge.number] == given
                ]
        kept = near[key] in fit and random.random() >= share
        chosen[key] = near[key] if kept else random.choice(fit)
    return chosen


def run(model, plan, mesh, x, machine):
    """Seconds that what a step of this plan really sends takes by the machine's figures; and its error."""
    many = parallel.semi_auto(copy.deepcopy(model), mesh, plan)
    many(x).square().mean().backward()
    moves = parallel.report(many).moves.items()
    sent = sum(
        times * (machine.latency_us / 1e6 + one.sent / (machine.gbps * 1e9))
        for move, times in moves
        for one in move.collectives
    )
    model.zero_grad()
    model(x).square().mean().backward()
    pairs = zip(model.parameters(), many.parameters(), strict=True)
    return sent, max(float((a.grad - b.grad.full_tensor()).abs().max()) for a, b in pairs)


def beside_others(kind, machine, tries):
    """Seconds of the plan that is found and of Megatron's: as said, as counted here, and with what was sent; errors.
    And of random plans."""
    mesh, (make, megatron) = parallel.mesh("cpu", tp=2), SPLITS[kind]
    torch.manual_seed(1)
    model, x = make().double(), torch.randn(4, 64, 16, dtype=torch.float64)
    plans = {
        name: (given, parallel.auto(model, x, mesh, given=given, machine=machine))
        for name, given in (("Megatron's", megatron), ("found", {"": megatron[""]}))
    }
    ran = {name: run(model, plan, mesh, x, machine) for name, (_, plan) in plans.items()}
    if torch.distributed.get_rank():
        return None
    calls, asker = calls_of(model, (x,)), Asker(mesh, machine)
    found = {}
    for name, (given, plan) in plans.items():
        rows = Given(model, mesh, calls, parallel.Plan.of(given))
        built = search.Search(calls, asker, [machine.link("tp", mesh)], 8.0, rows)
        chosen = built.solve(None).chosen
        computed = sum(3 * option.seconds for option in chosen.values())
        found[name] = plan.seconds, cost(built, chosen), computed + ran[name][0], ran[name][1]
    return found, [cost(built, drawn(built, chosen, share)) for share in (1.0, 0.3, 0.1) for _ in range(tries)]


class Joined(Pair):
    def forward(self, x):
        return torch.cat([self.one(x), self.two(x)], -1)


def ways_of_a_cat():
    calls = calls_of(Joined(), (torch.ones(4, 4),))
    asker = Asker(parallel.mesh("cpu", tp=2), MACHINE)
    return [(one.ins, one.outs) for call in calls.calls if call.function is torch.cat for one in asker.options(call)]


def test_a_cat_is_known_to_run_on_parts():
    rows = (Shard(0),)
    for ways in on_ranks(2, ways_of_a_cat):
        assert ((rows, rows), (rows,)) in ways


FAST = parallel.Machine(tflops=1e-3, memory_gbps=1, gbps=1, latency_us=0, launch_us=0)
CASES = [("MLP", FAST), ("block", FAST), ("MLP", MACHINE), ("block", MACHINE)]


@pytest.mark.parametrize(
    ("kind", "machine"),
    [*CASES[:1], *(pytest.param(*one, marks=pytest.mark.sweep) for one in CASES[1:])],
    ids=["MLP", "block", "MLP, slow", "block, slow"],
)
def test_a_plan_is_not_above_megatrons_split_nor_random_ones(kind, machine):
    found, others = on_ranks(2, beside_others, kind, machine, 100)[0]
    for predicted, counted, executed, error in found.values():
        assert predicted == pytest.approx(counted, rel=1e-5) and predicted == pytest.approx(executed, rel=1e-5)
        assert error < 1e-12
    least = found["found"][0] * (1 - 1e-5)
    assert least < found["Megatron's"][0] and least < min(others) < max(others)
    assert (found["Megatron's"][0] < 1.1 * found["found"][0]) == (machine == FAST)  # there it is what one should do


def fixed():
    torch.manual_seed(1)
    mesh, x = parallel.mesh("cpu", tp=2), torch.randn(64, 8, dtype=torch.float64)
    model = Layers().double()
    given = {
        "": {"in_strategy": ((None, None),), "out_strategy": (("tp", None),)},
        "layers.*.fc2:linear": {"out_strategy": ((None, None),)},
        "layers.1.fc1": {"parameter_plan": {"weight": (None, "tp")}},
        "layers.2": {"recompute": True},
    }
    free = parallel.auto(model, x, mesh, machine=MACHINE)
    plan = parallel.auto(model, x, mesh, given=given, machine=MACHINE)
    split = {path: dict(row.parameter_plan) for path, row in plan.rows.items() if row.parameter_plan}
    brought = [path for path, row in plan.rows.items() if path.endswith("fc2:linear.0") and row.out_strategy]
    again = [path for path, row in plan.rows.items() if row.recompute]
    own, seconds = plan.rows[""], (free.seconds, plan.seconds)
    many = parallel.semi_auto(copy.deepcopy(model), mesh, plan)
    made, expected = many(x), model(x)
    made.full_tensor().square().mean().backward()
    expected.square().mean().backward()
    pairs = zip(model.parameters(), many.parameters(), strict=True)
    error = max(float((a.grad - b.grad.full_tensor()).abs().max()) for a, b in pairs)
    return split, brought, again, own, seconds, error, tuple(made.placements)


def test_given_rows_hold_and_are_paid_for_one_layer_of_several_too():
    split, brought, again, own, seconds, error, placed = on_ranks(2, fixed)[0]
    assert split["layers.1.fc1"]["weight"] == (None, "tp")
    assert split.get("layers.0.fc1", {}).get("weight") != (None, "tp")
    assert brought == [f"layers.{number}.fc2:linear.0" for number in range(3)]
    assert again == ["layers.2"]
    assert own.in_strategy == ((None, None),) and own.out_strategy == (("tp", None),)
    assert seconds[1] > seconds[0]
    assert error < 1e-12 and placed[0].is_shard(0)


class Ended(nn.Module):
    """Modules of one operator, of none, and of two."""

    def __init__(self):
        super().__init__()
        self.one, self.same, self.two = nn.Linear(8, 32), nn.Identity(), nn.Sequential(nn.Linear(32, 8), nn.Tanh())

    def forward(self, x):
        return self.two(self.same(self.one(x)))


def of_modules():
    torch.manual_seed(1)
    mesh, x = parallel.mesh("cpu", tp=2), torch.randn(64, 8, dtype=torch.float64)
    model = Ended().double()
    plain, columns = (None, None), (None, "tp")
    modules = {"one": {"out_strategy": (columns,)}, "two": {"in_strategy": (columns,), "out_strategy": (("tp", None),)}}
    operators = {
        "one:linear": {"out_strategy": (columns,)},
        "two.0:linear": {"in_strategy": (columns, columns, (None,))},
        "two.1:tanh": {"out_strategy": (("tp", None),)},
    }
    own = {"": {"in_strategy": (plain,)}, "two.0": {"parameter_plan": {"weight": columns}}}
    plans = [parallel.auto(model, x, mesh, machine=MACHINE, given=own | rows) for rows in (modules, operators)]
    many = parallel.semi_auto(copy.deepcopy(model), mesh, plans[0])
    found, wanted = many(x), model(x)
    found.square().mean().backward()
    wanted.square().mean().backward()
    pairs = zip(model.parameters(), many.parameters(), strict=True)
    errors = [
        float((found - wanted).abs().max()),
        *(float((a.grad - b.grad.full_tensor()).abs().max()) for a, b in pairs),
    ]
    with pytest.raises(parallel.StrategyError, match="'same', out_strategy: it returns what it gets"):
        parallel.auto(model, x, mesh, machine=MACHINE, given={"same": {"out_strategy": (columns,)}})
    with pytest.raises(
        parallel.StrategyError, match="'one', out_strategy: another row says otherwise of 'one:linear.0'"
    ):
        parallel.auto(model, x, mesh, machine=MACHINE, given={**modules, "one:linear": {"out_strategy": (plain,)}})
    return plans[0].rows == plans[1].rows, plans[0].rows, max(errors)


def test_strategies_of_modules_are_those_of_the_operators_at_their_ends():
    same, rows, error = on_ranks(2, of_modules)[0]
    assert same and error < 1e-12
    assert rows["one:linear.0"].out_strategy == ((None, "tp"),)
    assert rows["two.0:linear.0"].in_strategy[0] == (None, "tp")
    assert rows["two.1:tanh.0"].out_strategy == (("tp", None),)


WRONG = {
    "": {"in_strategy": ((None, None), (None, None)), "out_strategy": ((None, None), (None,))},
    "layers.1": {"in_strategy": ((None, None), (None,))},
    "layers.0.fc1:linear.0": {"in_strategy": (("tp", None),)},
    "layers.0.fc1:matmul": {"in_strategy": ((None, None),)},
    "layers.0.fc1": {"parameter_plan": {"wait": ("tp", None)}},
    "layer": {"recompute": True},
}
SAID = (
    "'', in_strategy: 2 strategies for 1 tensors",
    "'', out_strategy: 2 strategies for 1 tensors",
    "'layers.1', in_strategy: 2 strategies for 1 tensors",
    "'layers.0.fc1:linear.0', in_strategy: 1 strategies for 3 tensors",
    "'layers.0.fc1:matmul': layers.0.fc1 calls no matmul; it calls linear.0",
)


def refused(given):
    with pytest.raises(parallel.StrategyError) as error:
        parallel.auto(Layers(), torch.randn(64, 8), parallel.mesh("cpu", tp=1), given=given, machine=MACHINE)
    return error.value.problems


def test_given_rows_that_name_nothing_or_do_not_fit_are_refused_together():
    unknown = on_ranks(1, refused, WRONG)[0]
    assert any("there is no module 'layer'" in one for one in unknown)
    assert any("there is no parameter 'wait'" in one for one in unknown)
    shapes = " ".join(on_ranks(1, refused, dict(list(WRONG.items())[:4]))[0])
    for one in SAID:
        assert one in shapes


def on_an_older_torch():
    kept, torch.__version__ = torch.__version__, "2.12.1"
    try:
        return refused({})
    finally:
        torch.__version__ = kept


def test_an_older_torch_is_refused_by_name():
    assert on_ranks(1, on_an_older_torch)[0] == ("auto needs torch 2.13 or newer, this is 2.12.1",)


def unsolved():
    search.SOLVER["time_limit"] = 0.0  # the solver's own limit: there is none otherwise
    try:
        return refused({})
    finally:
        del search.SOLVER["time_limit"]


def test_a_solver_without_an_answer_is_not_called_a_plan_that_does_not_fit():
    said = on_ranks(1, unsolved)[0]
    assert "limit of time" in said[0] and "says nothing of whether" in said[0]


def chatty(folder):
    search.SOLVER["disp"] = True
    kept = os.dup(1)
    try:
        with open(f"{folder}/said", "wb") as file:
            os.dup2(file.fileno(), 1)
            parallel.auto(Chain(), torch.randn(8, 4), parallel.mesh("cpu", tp=1), machine=MACHINE)
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        del search.SOLVER["disp"]


def test_what_the_solver_prints_is_not_in_the_output(tmp_path):
    on_ranks(1, chatty, str(tmp_path))
    assert (tmp_path / "said").read_bytes() == b""


def outputs():
    torch.manual_seed(0)
    mesh, x, found = parallel.mesh("cpu", tp=2), torch.randn(4, 4), []
    for size in (4, 4096):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, size, bias=False))
        given = {
            "0": {"parameter_plan": {"weight": ("tp", None)}},
            "0:linear": {"in_strategy": ((None, None), ("tp", None))},
        }
        plan = parallel.auto(model, x, mesh, given=given, machine=MACHINE)
        split = parallel.auto(model, x, mesh, given={**given, "": {"out_strategy": ((None, "tp"),)}}, machine=MACHINE)
        many = parallel.semi_auto(model, mesh, plan)
        many(x).sum().backward()
        report = parallel.report(many)
        found.append((plan.bytes_sent, report.sent(), plan.memory_gib - split.memory_gib, plan.seconds - split.seconds))
    return found


def test_what_the_model_returns_is_paid_for_where_it_is_made_whole():
    for size, (predicted, sent, held, seconds) in zip((4, 4096), on_ranks(2, outputs)[0], strict=True):
        whole = 4 * size * 4
        assert predicted == {"tp": whole // 2} == sent
        assert held * 2**30 >= whole / 2
        assert seconds == pytest.approx(3e-6 + whole / 2 / 1e7)


class Again(nn.Module):
    """One module, called with an input of the model and with what was made."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(*size, bias=False) for size in ((8, 8), (8, 512), (512, 8)))

    def forward(self, x, y):
        made = self.three(torch.relu(self.two(self.one(x)))).repeat(8, 1)
        return self.one(made).sum() + self.one(y).square().sum()


def called_again():
    torch.manual_seed(0)
    mesh, model = parallel.mesh("cpu", tp=2), Again()
    x, y = torch.randn(16, 8), torch.randn(16, 8)
    machine = parallel.Machine(tflops=1e-3, memory_gbps=1, gbps=0.1, latency_us=0, launch_us=0)
    given = {"": {"in_strategy": ((None, None), ("tp", None))}}
    plan = parallel.auto(model, (x, y), mesh, machine=machine, given=given)
    many = parallel.semi_auto(model, mesh, plan)
    many(x, y).backward()
    return plan.bytes_sent, parallel.report(many).sent()


def test_calls_of_one_module_are_planned_alike_as_they_have_one_row():
    planned, sent = on_ranks(2, called_again)[0]
    assert planned["tp"] > 0 and abs(sent["tp"] - planned["tp"]) <= 2 * 8  # single numbers are not planned


def measured():
    """Bytes that a step holds at most above what there was before the model, by plans with less and less memory."""
    torch.manual_seed(0)
    mesh, x = parallel.mesh("cpu", tp=2), torch.randn(512, 64)
    found, limit, given = [], None, {"": {"in_strategy": ((None, None),)}}
    for _ in range(3):
        torch.manual_seed(0)
        plan = parallel.auto(Layers(4, 64), x, mesh, limit, given=given, machine=MACHINE)
        with LimitedMemory() as memory:
            before = memory.allocated
            model = parallel.semi_auto(Layers(4, 64), mesh, plan)
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(3):
                memory.reset_peak()
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append((limit, plan.memory_gib, (memory.peak - before) / 2**30))
        del model, optimizer
        limit = plan.memory_gib * 0.85
    return found


def test_what_a_step_holds_stays_within_the_memory_of_its_plan():
    for limit, planned, peak in on_ranks(2, measured)[0]:
        assert limit is None or planned <= limit
        assert 0.5 * planned < peak <= planned
