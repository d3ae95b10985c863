"""Train a ResNet in each of the parallel modes, without Megatron.

    python examples/train_resnet_parallel.py                                                    # one device
    torchrun --nproc-per-node 2 examples/train_resnet_parallel.py --mode semi_auto --tp 2
    torchrun --nproc-per-node 4 examples/train_resnet_parallel.py --mode pipeline --pp 2 --micro-batches 4 --recompute

It learns to tell what 3072 bytes are, shown as a picture of 32 by 32: source text, bytecode, compressed data or base64,
of Python's standard library. All modes but the pipeline, whose batch norms see micro-batches, print the losses of one
device, up to rounding.
"""

import argparse
import base64
import contextlib
import itertools
import marshal
import os
import sys
import time
import warnings
import zlib

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt_corpus import documents, stdlib_files
from torch import nn

from mindspeed_mem import parallel, ranks
from mindspeed_mem.device import get_backend
from mindspeed_mem.interruption import in_one_line

MODES = ("single", "data", "semi_auto", "auto", "hybrid", "pipeline")
KINDS = ("source", "bytecode", "compressed", "base64")
PICTURE = (3, 32, 32)
BYTES = 3 * 32 * 32
FILES = 50
"""Of the library: to compile all of it takes longer than to train."""


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--mode", choices=MODES, default="single")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the classifier; the rest: the batch")
    parser.add_argument("--pp", type=int, default=2, help="pipeline stages (--mode pipeline); the rest: the batch")
    parser.add_argument("--micro-batches", type=int, default=4, help="of --mode pipeline")
    parser.add_argument("--max-inflight-micro-batches", type=int, help="that a pipeline rank may hold")
    parser.add_argument("--recompute", action="store_true", help="run each bottleneck again in backward")
    parser.add_argument("--plan", help="a YAML file for --mode semi_auto; --mode auto writes one there")
    parser.add_argument("--device-memory-gib", type=float, default=16.0, help="that --mode auto may plan with")
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 1, 1], help="bottlenecks of each width")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=64, help="over all ranks")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or npu")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    if min(args.tp, args.pp, args.micro_batches, args.batch_size, args.steps, args.width, *args.blocks) < 1:
        parser.error("all sizes are at least 1")
    if args.mode != "single" and "RANK" not in os.environ:
        parser.error(f"--mode {args.mode} needs ranks: torchrun --nproc-per-node 2 {sys.argv[0]} --mode {args.mode}")
    return args


# ---- the model
class Bottleneck(nn.Module):
    def __init__(self, inputs, inner, stride, norm):
        super().__init__()
        outputs = 4 * inner
        self.conv1, self.bn1 = nn.Conv2d(inputs, inner, 1, bias=False), norm(inner)
        self.conv2, self.bn2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False), norm(inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, outputs, 1, bias=False), norm(outputs)
        self.short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))
        if inputs == outputs and stride == 1:
            self.short = nn.Identity()

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.short(x))


class ResNet(nn.Module):
    """He et al., "Deep Residual Learning for Image Recognition": stem, bottlenecks, average, classifier."""

    def __init__(self, blocks, width, classes, norm=nn.BatchNorm2d, classifier=nn.Linear):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), norm(width)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.layers, inputs = nn.ModuleList(), width
        for number, count in enumerate(blocks):
            inner = width * 2**number
            for place in range(count):
                self.layers.append(Bottleneck(inputs, inner, 2 if number and not place else 1, norm))
                inputs = 4 * inner
        self.fc = classifier(inputs, classes)

    def forward(self, x):
        x = self.pool(F.relu(self.bn1(self.conv1(x))))
        for layer in self.layers:
            x = layer(x)
        return self.fc(x.mean((2, 3)))


# ---- what it learns from
def pictures(args, device):
    """Yields (pictures, kinds): float32 [batch, 3, 32, 32] and int64 [batch], the same on all ranks."""
    data = {kind: [] for kind in KINDS}
    for source in itertools.islice(documents(stdlib_files()), FILES):
        with contextlib.suppress(SyntaxError, ValueError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            data["bytecode"].append(marshal.dumps(compile(source, "a module", "exec")))
            data["source"].append(source)
            data["compressed"].append(zlib.compress(source))
            data["base64"].append(base64.b64encode(data["compressed"][-1]))
    data = [numpy.frombuffer(b"".join(data[kind]), dtype=numpy.uint8) for kind in KINDS]
    random = numpy.random.default_rng(args.seed)
    while True:
        kinds = random.integers(len(KINDS), size=args.batch_size)
        starts = [random.integers(len(data[kind]) - BYTES) for kind in kinds]
        found = numpy.stack([data[kind][start : start + BYTES] for kind, start in zip(kinds, starts, strict=True)])
        found = torch.from_numpy(found.astype(numpy.float32)).reshape(-1, *PICTURE) / 127.5 - 1
        yield found.to(device), torch.from_numpy(kinds).to(device)


# ---- the modes: each returns what makes a step's gradients and its loss, and the parameters
def plain(args, device):
    torch.manual_seed(args.seed)
    model = ResNet(args.blocks, args.width, len(KINDS)).to(device)
    for layer in model.layers if args.recompute else ():
        layer.recompute()
    return model


def alone(args, device):
    return whole(plain(args, device))


def whole(model):
    """Every rank computes the same loss of the whole batch."""

    def step(x, kinds):
        loss = F.cross_entropy(model(x), kinds)
        loss.backward()
        return loss.detach()

    return step, model.parameters()


def data(args, device):
    return whole(parallel.semi_auto(plain(args, device), parallel.mesh(args.device, dp=-1), {"": BATCH}))


BATCH = {"in_strategy": (("dp", None, None, None),)}


def semi_auto(args, device):
    mesh = parallel.mesh(args.device, dp=-1, tp=args.tp)
    columns = {"parameter_plan": {"weight": ("tp", None), "bias": ("tp",)}}
    return whole(parallel.semi_auto(plain(args, device), mesh, args.plan or {"": BATCH, "fc": columns}))


def auto(args, device):
    mesh = parallel.mesh(args.device, dp=-1, tp=args.tp)
    model = plain(args, device)
    example = (torch.zeros(args.batch_size, *PICTURE, device=device),)
    plan = parallel.auto(model, example, mesh, device_memory_gib=args.device_memory_gib)
    if args.plan and dist.get_rank() == 0:
        plan.save(args.plan)
    return whole(parallel.semi_auto(model, mesh, plan))


class NormOfAllRanks(nn.BatchNorm2d):
    """Batch norm by hand: two sums over all ranks, which then do different things with them."""

    def forward(self, x):
        count = x.numel() // x.shape[1] * dist.get_world_size(parallel_batch())
        mean = everyones(x.sum((0, 2, 3))) / count
        spread = everyones((x - mean[:, None, None]).square().sum((0, 2, 3))) / count
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(spread * count / (count - 1), self.momentum)
        x = (x - mean[:, None, None]) * torch.rsqrt(spread + self.eps)[:, None, None]
        return x * self.weight[:, None, None] + self.bias[:, None, None]


def everyones(part):
    return parallel.copy(parallel.all_reduce(part, axis="dp"), axis="dp")


class Columns(nn.Linear):
    """A linear layer of which each rank has some columns, and all get the whole output."""

    def forward(self, x):
        own = F.linear(parallel.copy(x, axis="tp"), self.weight, self.bias)
        return parallel.all_gather(own, dim=-1, axis="tp", alike=True)


_mesh = []


def parallel_batch():
    return _mesh[0].get_group("dp")


def hybrid(args, device):
    """The batch over dp and the classifier's columns over tp, with each collective placed by hand."""
    mesh = parallel.mesh(args.device, dp=-1, tp=args.tp)
    _mesh[:] = [mesh]
    model = plain(args, device)
    state, place = model.state_dict(), mesh.get_local_rank("tp")
    for name in ("fc.weight", "fc.bias"):
        state[name] = state[name].chunk(args.tp)[place]
    model = ResNet(args.blocks, args.width, len(state["fc.bias"]), NormOfAllRanks, Columns).to(device)
    model.load_state_dict(state)
    for layer in model.layers if args.recompute else ():
        layer.recompute()
    parameters, count, rank = list(model.parameters()), mesh["dp"].size(), mesh.get_local_rank("dp")

    def step(x, kinds):
        loss = F.cross_entropy(model(x.chunk(count)[rank]), kinds.chunk(count)[rank]) / count
        loss.backward()
        loss = loss.detach()
        for tensor in (loss, *(one.grad for one in parameters)):
            dist.all_reduce(tensor, group=parallel_batch())
        return loss

    return step, parameters


def pipeline(args, device):
    mesh = parallel.mesh(args.device, dp=-1, pp=args.pp)
    model = plain(args, device)
    for number, layer in enumerate(model.layers):  # the stem is of the first stage, the classifier of the last
        layer.pipeline_stage = number * args.pp // len(model.layers)
    more = {"max_inflight_micro_batches": args.max_inflight_micro_batches}
    pipe = parallel.pipeline(model, mesh, args.micro_batches, loss=F.cross_entropy, **more)
    return lambda x, kinds: pipe.step(x, target=kinds), pipe.parameters()


RUN = {"single": alone, "data": data, "semi_auto": semi_auto, "auto": auto, "hybrid": hybrid, "pipeline": pipeline}


def train(args):
    backend = get_backend(args.device)
    args.device = backend.type
    device = torch.device(backend.tensor_type)
    if device.type != "cpu":
        torch.get_device_module(device.type).set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group(backend.collectives)
    first = not dist.is_initialized() or dist.get_rank() == 0
    step, parameters = RUN[args.mode](args, device)
    optimizer = torch.optim.SGD(list(parameters), args.learning_rate, momentum=0.9)
    for number, (x, kinds) in zip(range(args.steps), pictures(args, device), strict=False):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = step(x, kinds)
        optimizer.step()
        backend.synchronize()
        if first:
            print(f"step {number + 1}: loss {loss.item():.6f}, {time.perf_counter() - begin:.3f} s", flush=True)
    if first and args.mode in ("data", "semi_auto", "auto"):
        print("\n".join(["redistributed in the first step:", *str(parallel.report()).splitlines()[-12:]]))
    ranks.leave()


def main():
    args = parse()
    try:
        with in_one_line("train_resnet_parallel.py"):  # Ctrl-C
            train(args)
    except ValueError as error:
        if type(error) is ValueError:
            raise
        sys.exit(f"train_resnet_parallel.py: error: {error}")


if __name__ == "__main__":
    main()
