"""What ranks run: plain models under DistributedDataParallel and FSDP2, with a plan and without."""

import copy
import gc

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mindspeed_mem
from mindspeed_mem.activation.storage.ledger import LEDGER
from tests.attachment.plain_models import PLANS, TEXT, Net, loss_of, results, same


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


WRAPPERS = {one.__name__: one for one in (ddp, fsdp, nested)}


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
