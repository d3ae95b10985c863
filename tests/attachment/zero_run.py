"""What a process of its own runs under DeepSpeed's ZeRO, which changes torch.nn.functional for good.

Steps without a plan and with one. Prints which of the plans on the command line change a bit, move or make again
nothing, or leave something.
"""

import os
import sys

os.environ.update(
    DS_ACCELERATOR="cpu",
    RANK="0",
    LOCAL_RANK="0",
    WORLD_SIZE="1",
    MASTER_ADDR="localhost",
)

import contextlib
import copy
import gc

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

import mindspeed_mem
from mindspeed_mem.activation.storage.ledger import LEDGER
from tests.attachment.plain_models import PLANS, TEXT, Net, loss_of


def steps(model, plan, stage):
    zero = {"stage": stage, "reduce_bucket_size": 10000, "stage3_param_persistence_threshold": 0}
    optimizer = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "zero_optimization": zero}
    config.update(zero_force_ds_cpu_optimizer=False, optimizer=optimizer)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    found = []
    torch.manual_seed(3)
    with contextlib.nullcontext() if plan is None else mindspeed_mem.attach(engine, plan) as attached:
        for _ in range(4):  # from the third on it knows what comes, and gathers ahead
            for part in TEXT.split(2):
                loss = loss_of(engine, part)
                engine.backward(loss)
                found.append(loss.detach().clone())
                del loss
                if engine.is_gradient_accumulation_boundary():
                    found += [safe_get_full_grad(one).clone() for one in model.parameters()]
                engine.step()
        found += [safe_get_full_fp32_param(one).clone() for one in model.parameters()]
        gc.collect()
        figures = None if attached is None else attached.engine.report()
    engine.destroy()
    return found, figures


if __name__ == "__main__":
    os.environ["MASTER_PORT"], stage, *plans = sys.argv[1:]
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(1)
    model, wrong = Net(), []
    expected, _ = steps(copy.deepcopy(model), None, int(stage))
    for plan in plans:
        found, figures = steps(copy.deepcopy(model), PLANS[plan], int(stage))
        same = len(found) == len(expected) and all(map(torch.equal, found, expected))
        done = [bool(figures.bytes_out), bool(figures.recomputed_bytes)]
        if (
            not same
            or done != [plan in ("swap", "saved", "mixed"), plan in ("whole", "parts", "mixed")]
            or LEDGER.held.now
        ):
            wrong.append((plan, same, *done, LEDGER.held.now))
    print("wrong:", wrong)
