"""What ranks run: plain models under DistributedDataParallel and both FSDPs, with a plan and without."""

import contextlib
import copy
import gc

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import mindspeed_mem
from mindspeed_mem import parallel
from mindspeed_mem.activation.storage.ledger import LEDGER
from tests.attachment.plain_models import PLANS, STEPS, TEXT, Net, loss_of, results, same
from tests.models import DEVICE
from tests.parallel_models import MODELS


def ddp(model):
    return DistributedDataParallel(model)


def fsdp(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def nested(model):
    """Parts of blocks have parameters of their own to gather."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block.fc1, mesh=mesh)
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def operators(model):
    """Each operator with parameters gathers them by itself."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        for one in (block.norm, block.fc1, block.fc2):
            fully_shard(one, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp1(model, by_their_names=False):
    """The older one, which wraps modules."""
    policy, device = ModuleWrapPolicy({type(model.blocks[0])}), torch.device(DEVICE)
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device, use_orig_params=by_their_names)


def fsdp1_by_names(model):
    return fsdp1(model, by_their_names=True)


WRAPPERS = {one.__name__: one for one in (ddp, fsdp, nested, operators, fsdp1, fsdp1_by_names)}


def step(model):
    """Two micro-batches of this rank's own."""
    found = []
    for part in TEXT.roll(dist.get_rank(), 0).split(2):
        loss = loss_of(model, part)
        loss.backward()
        found.append(loss)
    return found


def local(tensors):
    return [one.to_local() if hasattr(one, "to_local") else one for one in tensors]


def equal(wrapper, plan, first):
    """Whether all is the same with a plan, and something was moved or made again; what is left. ``first``: attach
    before the model is wrapped."""
    torch.manual_seed(1)
    model = Net()
    plain = local(results(WRAPPERS[wrapper](copy.deepcopy(model)), step))
    if first:
        attached = mindspeed_mem.attach(model, PLANS[plan])
        wrapped = WRAPPERS[wrapper](model)
    else:
        wrapped = WRAPPERS[wrapper](model)
        attached = mindspeed_mem.attach(wrapped, PLANS[plan])
    with attached:
        found = local(results(wrapped, step))
        gc.collect()
        figures = attached.engine.report()
        names = list(attached.layers)
    left = LEDGER.held.now
    again = local(results(wrapped, step, times=1))
    return same(found, plain), bool(figures.bytes_out or figures.recomputed_bytes), left, names, len(again) > 0


@torch._dynamo.config.patch(disable=False)  # which ranks on a CPU set
def made_again_compiled(wrapper):
    """Whether all is the same where compiled layers are made again, how many of them were, and how often dynamo has
    compiled more than it does without."""
    counts, made = [], []
    for planned in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(1)
        model = Net()
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch._dynamo.optimize("aot_eager")(block)
        wrapped = WRAPPERS[wrapper](model)
        with mindspeed_mem.attach(model, PLANS["whole"]) if planned else contextlib.nullcontext() as plan:
            before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            made.append(local(results(wrapped, step, times=2)))
            counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)
            again = 0 if plan is None else len(plan.engine.report().recomputed_by_operator)
    torch._dynamo.reset()
    return same(*made), again, counts[1] - counts[0]


def split_steps(model, batches):
    """Losses, gradients and parameters of some steps, as this rank's parts."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        found += [loss.detach().clone(), *(one.grad.clone() for one in model.parameters())]
        optimizer.step()
    return local([*found, *(one.detach() for one in model.parameters())])


def equal_split(name, plan, layers, axes):
    """As `equal`, of a model split by strategies; bytes that were moved and made again, and the highest peak against
    that without a plan."""
    make, batch, rows = MODELS[name]
    torch.manual_seed(1)
    model, batches = make(), [batch(step, torch.float32) for step in range(4)]
    mesh = parallel.mesh("cpu", **axes)
    plain = split_steps(parallel.semi_auto(copy.deepcopy(model), mesh, rows(axes)), batches)
    model = parallel.semi_auto(model, mesh, rows(axes))
    with mindspeed_mem.attach(model, plan, layers=layers) as attached:
        found = split_steps(model, batches)
        reported = parallel.report(model) is not None
        gc.collect()
        figures = attached.engine.report()
    peak = figures.peak_bytes / max(figures.peak_bytes_without, 1)
    return same(found, plain) and reported, figures.bytes_out, figures.recomputed_bytes, peak, LEDGER.held.now


def on_device(plans):
    """The plans with which something differs on the accelerator of the tests."""
    wrong = []
    for plan in plans:
        torch.manual_seed(1)
        model = Net().to(DEVICE)
        plain = results(copy.deepcopy(model), STEPS["at_once"])
        with mindspeed_mem.attach(model, PLANS[plan]) as attached:
            found = results(model, STEPS["at_once"])
            figures = attached.engine.report()
        if not same(found, plain) or not (figures.bytes_out or figures.recomputed_bytes) or figures.held_bytes:
            wrong.append(plan)
    return wrong
