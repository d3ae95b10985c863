"""Semi-automatic mode: models split over gloo ranks train with the numbers of one device; what was moved is told."""

import copy
import importlib.util
import logging
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from mindspeed_mem import parallel
from mindspeed_mem.parallel import StrategyError
from tests.parallel_models import GPT, MODELS, Pair, apart, compared, full, gpt_batch, gpt_plan, pair_batch, pair_plan
from tests.sweeping import but
from tests.worlds import on_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.needs_torch("2.13", "DTensor's rules")]
TOTALS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
}


def counted(comm):
    """The totals of torch's CommDebugMode, by our names."""
    found = {}
    for key, times in comm.get_comm_counts().items():
        name = TOTALS[str(key).split(".")[-1]]
        found[name] = found.get(name, 0) + times
    return found


# ---- the original description's pair of MatMuls


def pair(size, first_strategy, second_strategy):
    mesh = parallel.mesh("cpu", mp=size)
    torch.manual_seed(0)
    leaves = [torch.randn(*shape, dtype=torch.float64) for shape in ((8, 16), (16, 32), (32, 8))]
    x, w1, w2 = plain = [one.clone().requires_grad_() for one in leaves]
    wanted = (x @ w1) @ w2
    wanted.square().mean().backward()
    first = parallel.shard(torch.matmul, first_strategy, name="first")
    second = parallel.shard(torch.matmul, second_strategy, name="second")
    mine = [distribute_tensor(one, mesh).requires_grad_() for one in leaves]
    with parallel.recording() as report, CommDebugMode() as comm:
        y = second(first(mine[0], mine[1]), mine[2])
        y.square().sum().div(y.numel()).backward()
    errors = [float((full(y) - wanted).abs().max())]
    errors += [float((full(one.grad) - two.grad).abs().max()) for one, two in zip(mine, plain, strict=True)]
    return max(errors), report, counted(comm)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("form", ["names", "numbers", "Layout"])
def test_the_pair_of_matmuls(size, form):
    """Rows of the first, columns of the second: what is between them is gathered, forward, and nothing else is."""
    layout = parallel.Layout((size,), ("mp",))
    strategies = {
        "names": ((("mp", None), (None, None)), ((None, None), (None, "mp"))),
        "numbers": (((size, 1), (1, 1)), ((1, 1), (1, size))),
        "Layout": ((layout("mp", "None"), layout("None", "None")), (layout("None", "None"), layout("None", "mp"))),
    }
    for error, report, counts in on_ranks(size, pair, size, *strategies[form]):
        assert error < 1e-12
        (gathered,) = [move for move in report.moves if not move.backward and move.collectives]
        rows = 8 // size * 32 * 8  # bytes
        assert gathered[1:5] == ("second, input 0", (8, 32), "mp:0", "whole") and gathered.asked
        assert gathered.collectives == (("all_gather", "mp", rows * (size - 1)),)
        assert report.totals() == counts == {"all_gather": 3, "reduce_scatter": 1, "all_reduce": 1}
        back = next(move for move in report.moves if move.source == "mp:sum" and move.target == "mp:0")
        assert back.backward and back.operator == "second, input 0"
        assert "second, input 0" in str(report) and "3 all_gather" in str(report)


def pair_on_two_axes():
    model = parallel.semi_auto(Pair().double(), parallel.mesh("cpu", **BOTH), pair_plan(BOTH))
    model(**pair_batch(0, torch.float64)).backward()
    return [move for move in parallel.report(model).moves if not move.backward and move.operator == ":matmul 0"]


@pytest.mark.sweep
def test_the_pair_of_matmuls_on_two_axes():
    """What is between them is gathered along the axis of the second's columns."""
    for moves in on_ranks(4, pair_on_two_axes):
        (gathered,) = [move for move in moves if move.collectives]
        assert gathered[2:5] == ((8, 32), "dp:0 tp:0", "dp:0") and gathered.asked
        assert gathered.collectives == (("all_gather", "tp", 2 * 32 * 8),)


# ---- models


def cases(*usual):
    """Models and meshes; those but `usual` are for --sweep."""
    rows = [(kind, shape) for kind in MODELS for shape in MESHES]
    return [pytest.param(*row, marks=() if row in usual else pytest.mark.sweep) for row in rows]


BOTH = {"dp": 2, "tp": 2}
MESHES = [{"dp": 2}, {"tp": 2}, {"dp": 4}, {"tp": 4}, BOTH]
KINDS_OF_SPLITS = ("resnet", {"dp": 2}), ("gpt", {"tp": 2}), ("gpt", BOTH)


@pytest.mark.parametrize(("kind", "shape"), cases(*KINDS_OF_SPLITS), ids=str)
def test_training_is_that_of_one_device(kind, shape):
    """Losses, parameters and running statistics; with dropout, in the GPT."""
    for found in on_ranks(math.prod(shape.values()), compared, kind, shape, torch.float64):
        assert found["loss"] < 1e-12 and found["tensors"] < 1e-12 and found["learned"] > 0.01, found


@pytest.mark.parametrize(("kind", "shape"), cases(("gpt", {"dp": 2})), ids=str)
def test_training_in_fp32(kind, shape):
    for found in on_ranks(math.prod(shape.values()), compared, kind, shape, torch.float32):
        assert found["loss"] < 1e-6 and found["tensors"] < 1e-6 and found["learned"] > 0.01, found


def first_step(kind, shape):
    """The report of a first step, and CommDebugMode's count beside that of another."""
    make, batch, plan = MODELS[kind]
    mesh = parallel.mesh("cpu", **shape)
    model, other = (parallel.semi_auto(make().double(), mesh, plan(shape)) for _ in range(2))
    model(**batch(0, torch.float64)).backward()
    report = parallel.report(model)
    before = dict(report.moves)
    model(**batch(1, torch.float64)).backward()
    with CommDebugMode() as comm:  # whose hooks give each module tensors of its own: nothing is shared
        other(**batch(0, torch.float64)).backward()
    return report, dict(report.moves) == before, parallel.report(other), counted(comm)


@pytest.mark.parametrize("kind", but(["resnet", "gpt"], "resnet"))
def test_the_report_is_what_torch_counts(kind):
    report, unchanged, other, counts = on_ranks(4, first_step, kind, {"dp": 2, "tp": 2})[0]
    assert other.totals() == counts and unchanged
    # No activation is gathered: batch norms send C numbers, and the gradient of a split layer's input is summed once.
    gathered = [move for move in report.moves for one in move.collectives if one.name == "all_gather"]
    assert {move.operator for move in gathered} == {"fc, output 0" if kind == "resnet" else "head, output 0"}
    sums = [move for move in report.moves if move.backward and any(one.axis == "tp" for one in move.collectives)]
    assert all(move.asked for move in sums)
    if kind == "gpt":  # Megatron's: one for attention, whose q, k and v share it, one for the MLP, and the head's
        assert [report.moves[move] for move in sums if len(move.shape) == 3] == [1] * 5


def gpt2(shape, dtype, steps=5):
    """Hugging Face's, unmodified, dropout included: how far apart losses and parameters are after five steps."""
    from transformers import GPT2Config, GPT2LMHeadModel

    mesh, dp = parallel.mesh("cpu", **shape), "dp" if "dp" in shape else None
    torch.manual_seed(1)
    config = GPT2Config(n_layer=2, n_head=4, n_embd=32, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0)
    one = GPT2LMHeadModel(config).to(dtype)
    if dtype is torch.float64:  # its own loss rounds to fp32
        one.loss_function = next_token_loss
    many = copy.deepcopy(one)
    plan = {"": {"in_strategy": {"input_ids": (dp, None), "labels": (dp, None)}}}
    plan[""]["out_strategy"] = {"logits": (dp, None, None)}
    if "tp" in shape:
        mlp, split = "transformer.h.*.mlp", (dp, None, None)
        plan[f"{mlp}.c_fc"] = {"in_strategy": (split,), "parameter_plan": {"weight": (None, "tp"), "bias": ("tp",)}}
        plan[f"{mlp}.c_proj"] = {"parameter_plan": {"weight": ("tp", None)}, "out_strategy": (split,)}
    parallel.semi_auto(many, mesh, plan)
    ids = [torch.randint(0, 64, (4, 16)) for _ in range(steps)]
    losses, kinds = [], []
    for model in (one, many):
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for batch in ids:
            optimizer.zero_grad()
            out = model(input_ids=batch, labels=batch)
            out.loss.backward()
            optimizer.step()
            losses.append(float(out.loss))
        kinds.append((type(out), isinstance(out.loss, DTensor), isinstance(out.logits, DTensor)))
    pairs = zip(one.parameters(), many.parameters(), strict=True)
    lost = max(abs(a - b) / max(1.0, a) for a, b in zip(losses[:steps], losses[steps:], strict=True))
    return lost, max(apart(full(a), full(b)) for a, b in pairs), losses[0] - losses[steps - 1], kinds


def next_token_loss(logits, labels, **rest):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


GPT2 = [(shape, dtype) for shape in MESHES for dtype in (torch.float64, torch.float32)]


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("case", but(GPT2, *GPT2[1:]), ids=str)
def test_hugging_faces_gpt2(case):
    shape, dtype = case
    for lost, difference, learned, (one, many) in on_ranks(math.prod(shape.values()), gpt2, shape, dtype):
        most = 1e-12 if dtype is torch.float64 else 1e-6
        assert lost < most and difference < most and abs(learned) > 1e-3, (lost, difference, learned)
        assert one[0] == many[0] and not many[1] and many[2]


def variants():
    """Ways to call a split model, each against one device: the largest difference of a gradient."""
    shape = {"dp": 2, "tp": 2}
    mesh = parallel.mesh("cpu", **shape)
    torch.manual_seed(1)
    one = GPT().double()
    batch = gpt_batch(0, torch.float64)
    torch.manual_seed(7)
    one(**batch).backward()
    grads = {name: param.grad for name, param in one.named_parameters()}

    def difference(plan, call, **settings):
        model = parallel.semi_auto(copy.deepcopy(one), mesh, plan, **settings)
        model.zero_grad()
        torch.manual_seed(7)
        call(model)
        return max(float((full(p.grad) - grads[name]).abs().max()) for name, p in model.named_parameters())

    rank = mesh.get_local_rank("dp")
    part = {name: value[rank * 4 : rank * 4 + 4] for name, value in batch.items()}
    plan = gpt_plan(shape)
    again = {**plan, "blocks.*": {"recompute": True}}
    by_operator = {**plan, "blocks.0:gelu": {"in_strategy": (("dp", None, None),)}}
    by_operator["blocks.1:add.1"] = {"out_strategy": (("dp", "tp", None),)}
    halves = [{name: value[half * 4 : half * 4 + 4] for name, value in batch.items()} for half in range(2)]
    return {
        "local": difference(plan, lambda model: model(**part).backward(), inputs="local"),
        "copied, by position": difference(
            plan,
            lambda model: [
                copied := copy.deepcopy(model),
                copied(batch["ids"], batch["labels"]).backward(),
                adopt(model, copied),
            ],
        ),
        "recompute": difference(again, lambda model: model(**batch).backward()),
        "operators": difference(by_operator, lambda model: model(**batch).backward()),
        "nothing split": difference({}, lambda model: model(**batch).backward()),
        "no dropout, in two": accumulated(one, mesh, plan, halves, batch),
    }


def adopt(model, other):
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        mine.grad = theirs.grad


def accumulated(one, mesh, plan, halves, batch):
    plain, model = copy.deepcopy(one).eval(), parallel.semi_auto(copy.deepcopy(one).eval(), mesh, plan)
    for each in (plain, model):
        each.zero_grad()
        for half in halves:
            each(**half).backward()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    return max(float((full(b.grad) - a.grad).abs().max()) for a, b in pairs)


def test_ways_to_call_a_split_model():
    for found in on_ranks(4, variants):
        assert all(error < 1e-12 for error in found.values()), found


def plan_files(folder):
    parallel.mesh("cpu", dp=2)
    plan = parallel.Plan.of(MODELS["gpt"][2]({"dp": 2, "tp": 1}))
    plan.save(f"{folder}/plan{torch.distributed.get_rank()}.yaml")
    return parallel.Plan.of(f"{folder}/plan{torch.distributed.get_rank()}.yaml") == plan


def test_a_plan_is_a_file(tmp_path):
    assert all(on_ranks(2, plan_files, str(tmp_path)))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        nn.utils.parametrizations.weight_norm(self.fc2)

    def forward(self, x):
        return self.fc2(F.dropout(self.norm(self.fc1(x)), 0.1, self.training))


def handled():
    """What users do with a split model, each against one device: the largest difference, and what is said."""
    mesh, found = parallel.mesh("cpu", dp=2), {}
    torch.manual_seed(2)
    one, x = Normed().double(), torch.randn(8, 6, dtype=torch.float64)
    start = copy.deepcopy(one)

    def trained(model):
        for _ in range(2):
            torch.manual_seed(7)
            model(x).square().mean().backward()
        return {name: p.grad for name, p in model.named_parameters()} | dict(model.named_buffers())

    def split(model):
        return parallel.semi_auto(model, mesh, {"": {"in_strategy": (("dp", None),)}})

    def compare(name, model, wanted):
        mine = trained(model)
        assert all(p.grad.placements == p.placements for p in model.parameters()), (name, "a gradient lies as it likes")
        found[name] = max(float((full(mine[key]) - wanted[key]).abs().max()) for key in wanted)

    wanted = trained(one)
    compare("a copy", copy.deepcopy(split(copy.deepcopy(start))), wanted)
    with torch.no_grad():
        model = split(copy.deepcopy(start))
    compare("split without gradients", model, wanted)
    with torch.inference_mode():
        found["inference"] = float((model.eval()(x) - one.eval()(x)).abs().max())
    frozen = copy.deepcopy(start)
    frozen.requires_grad_(False)
    compare("frozen until now", split(frozen).requires_grad_(True), wanted)
    loaded = split(Normed().double())
    loaded.load_state_dict(start.state_dict())
    compare("loaded from whole tensors", loaded, wanted)
    again = split(copy.deepcopy(start))
    again.fc1.recompute()
    again.recompute()
    compare("recompute() after the split", again, wanted)
    assert parallel.report(again).moves
    early = copy.deepcopy(start)
    optimizer = torch.optim.SGD(early.parameters(), 0.1)
    trained(split(early))
    rank = mesh.get_rank()
    said = [
        refused(optimizer.step),
        refused(lambda: split(copy.deepcopy(start))(x + rank)),
        refused(lambda: again(x[: 8 - 4 * rank])),
        refused(lambda: again.train(not rank)(x)),
    ]
    return found, said


def test_what_users_do_with_split_models():
    (found, said), (more, also) = on_ranks(2, handled)
    assert max(*found.values(), *more.values()) < 1e-12, found
    assert said == also
    (optimizer,), (numbers,), (shapes,), (modes,) = said
    assert "make the optimizer afterwards" in optimizer
    assert "the full batch is passed on all ranks" in numbers and "sum" in numbers
    assert "(4, 6) torch.float64" in shapes and "sum" not in shapes
    assert "training=True" in modes and "training=False" in modes


def told():
    """How often and what the log tells of two steps, and the report."""
    lines, counts, log = [], [], logging.getLogger("mindspeed_mem")
    handler, level = logging.Handler(), log.level
    handler.emit = lambda record: lines.append(record.getMessage())
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        model = parallel.semi_auto(Small(), parallel.mesh("cpu", dp=2), {"": {"in_strategy": (("dp", None),)}})
        for _ in range(2):
            loss = model(torch.ones(4, 6)).sum()
            counts.append(len(lines))
            loss.backward()
            counts.append(len(lines))
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    assert parallel.report() is parallel.report(model)
    return counts, lines, str(parallel.report())


def test_the_report_is_in_the_log_of_the_first_rank_after_the_first_step():
    (counts, lines, report), (_, others, _) = on_ranks(2, told)
    assert counts == [0, 1, 1, 1] and lines == [f"redistributed in the first step:\n{report}"] and not others
    assert "fc1.weight.grad" in report and "all_reduce(dp)" in report


def test_there_is_no_report_before_a_model_is_split():
    with pytest.raises(StrategyError, match="nothing is split yet: see parallel.semi_auto"):
        parallel.report()


# ---- what is refused


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x, factor=None):
        return self.fc2(F.relu(self.fc1(x)))


def refused(call):
    with pytest.raises(StrategyError) as caught:
        call()
    return list(caught.value.problems)


@torch.library.custom_op("mindspeed_mem_tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


@halved.register_fake
def _(x):
    return torch.empty_like(x)


def refusals():
    mesh = parallel.mesh("cpu", dp=2, tp=2)
    found = {}

    def split(plan, model=None, **settings):
        return parallel.semi_auto(model or Small(), mesh, plan, **settings)

    found["all together"] = refused(
        lambda: split(
            {
                "fc3": {},
                "*.fc2": {"out_strategy": (None,)},
                "fc1": {"parameter_plan": {"wieght": ("tp", None), "weight": ("dp", "dp"), "bias": (3,)}},
                "fc2": {"parameter_plan": {"weight": ("tp",), "bias": ("mp",)}, "in_strategy": ((2, 1),)},
                "fc*": {"out_strategy": ((("tp", "dp"), None),), "in_strategy": (None,)},
            }
        )
    )
    found["uneven"] = refused(lambda: split({"fc1": {"parameter_plan": {"weight": (None, ("dp", "tp"))}}}))
    found["form"] = refused(lambda: split({"fc1": {"in_strategy": ("dp", None)}, "fc2": {"outputs": ()}}))
    shapes = {
        "": {"in_strategy": (("dp", None, None),)},
        "fc1": {"out_strategy": ((None, "tp"), None)},
        "fc2": {"in_strategy": {"inptu": (None, None)}, "out_strategy": (("dp", "tp"),)},
        ":gelu": {"in_strategy": ((None, None),)},
    }
    found["shapes"] = refused(lambda: split(shapes)(torch.ones(5, 6)))
    found["twice"] = refused(lambda: split({}, split({})))
    found["wrapped"] = refused(lambda: split({}, nn.Sequential(nn.parallel.DistributedDataParallel(Small()))))
    found["inputs"] = refused(lambda: split({}, inputs="some"))
    found["file"] = refused(lambda: split("/nowhere/plan.yaml"))
    rank = torch.distributed.get_rank()
    found["ranks"] = refused(lambda: split({"fc1": {"recompute": rank == 3}}))
    found["operator"] = refused(
        lambda: parallel.shard(lambda x: x.view(4, 3, 2), ((None, "tp"),), mesh=mesh, name="cut")(torch.ones(4, 6))
    )
    found["no rule"] = refused(
        lambda: parallel.shard(lambda x: halved(x), (("tp", None),), mesh=mesh, name="half")(torch.ones(4, 6))
    )
    found["function"] = refused(lambda: parallel.shard(F.relu, parameter_plan={"weight": ()}, mesh=mesh))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "__version__", "2.12.1+cpu")
        found["torch"] = refused(lambda: split({})) + refused(lambda: parallel.shard(F.relu, mesh=mesh))
    return found


def test_what_is_refused():
    everyone = on_ranks(4, refusals, timeout=90)
    for found in everyone:
        assert {k: v for k, v in found.items() if k != "ranks"} == {
            k: v for k, v in everyone[0].items() if k != "ranks"
        }
        text = "\n".join(found["all together"])
        for part in (
            "there is no module 'fc3'; there are fc",
            "there is no module '*.fc2' (* stands for one part of a path); there are fc",
            "'fc2': two rows say in_strategy",
            "write ('dp', 'tp')",
            "there is no parameter 'wieght'; there are weight, bias",
            "axis 'dp' splits dimensions 0 and 1",
            "3 parts fit nothing of the mesh dp=2, tp=2",
            "has 1 entries, the tensor (4, 8) has 2 dimensions",
            "no mesh axis 'mp'; there are dp, tp",
            "2 parts fit ('dp',) or ('tp',)",
        ):
            assert part in text, text
        assert "cannot be split evenly into 4 parts (dp x tp)" in found["uneven"][0]
        assert "'fc1', in_strategy 0" in found["form"][0] and "unknown outputs" in found["form"][1]
        text = "\n".join(found["shapes"])
        for part in (
            "the model, input 0: the strategy ('dp', None, None) has 3 entries",
            "fc1, output: 2 strategies for 1 tensors",
            "fc2, input: nothing is called inptu; there are input",
            "fc2, output 0: dimension 0 of (5, 4) cannot be split evenly into 2 parts (dp)",
            ":gelu: the model calls no gelu",
        ):
            assert part in text, text
        assert "is split already" in found["twice"][0] and "DistributedDataParallel" in found["wrapped"][0]
        assert "'whole', 'local'" in found["inputs"][0] and "cannot be read" in found["file"][0]
        assert "different plans" in found["ranks"][0]
        assert "cut:view: inputs (4, 6) tp:1; Cannot unflatten unevenly" in found["operator"][0]
        assert found["no rule"][0].startswith("half:halved.default: inputs (4, 6) tp:0")
        assert "parallel.local" in found["no rule"][0]
        assert "parameter_plan is for modules" in found["function"][0]
        assert found["torch"] == [
            f"{one} needs torch 2.13 or newer, this is 2.12.1+cpu" for one in ("semi_auto", "shard")
        ]


@pytest.mark.parametrize(
    "call",
    [
        lambda: parallel.semi_auto([], None, {}),
        lambda: parallel.auto([], torch.ones(2), None),
        lambda: parallel.pipeline([], "mesh", 2, loss=F.mse_loss),
    ],
    ids=["semi_auto", "auto", "pipeline"],
)
def test_what_is_no_module_and_no_mesh_is_refused(call):
    with pytest.raises(StrategyError) as caught:
        call()
    assert "model: got a list; allowed: a torch.nn.Module" in str(caught.value)
    assert "allowed: what parallel.mesh(dp=2, tp=4) makes" in str(caught.value)


@pytest.mark.parametrize("target", [3, None])
def test_what_is_no_function_is_refused(target):
    with pytest.raises(StrategyError, match="shard: got a .*; allowed: a torch.nn.Module, or a function"):
        parallel.shard(target, (("dp", None),))
    with pytest.raises(StrategyError, match="a plan has rows by the paths of modules"):
        parallel.Plan.of(target)
