"""Train a Hugging Face Llama under FSDP2 with a memory plan, in a loop of its own.

    torchrun --nproc-per-node 2 examples/fsdp2_llama.py --plan examples/configs/llama_plan.yaml

Parameters, gradients and optimizer states are split over the ranks by torch's `fully_shard`, activations leave by the
plan. With and without a plan it prints the same losses.
"""

import contextlib
import sys

import torch
import torch.distributed as dist
from hf_llama import attach, llama, parser, texts
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mindspeed_mem import ranks
from mindspeed_mem.device import get_backend
from mindspeed_mem.interruption import in_one_line


def main():
    args = parser(__doc__.splitlines()[0]).parse_args()
    if not dist.is_torchelastic_launched():
        sys.exit("error: it needs ranks: torchrun --nproc-per-node 2 examples/fsdp2_llama.py")
    backend = get_backend("cpu" if args.cpu else None)
    backend.use_device_of_rank()
    dist.init_process_group(backend.collectives)
    device = torch.device(backend.tensor_type, backend.index())
    model = llama(args).to(device)
    mesh = init_device_mesh(backend.tensor_type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    attached = attach(model, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    data = iter(texts(args.seq_length)[dist.get_rank() :: dist.get_world_size()].split(args.batch_size))
    for step in range(1, args.steps + 1):
        total = torch.zeros((), device=device)
        with contextlib.nullcontext() if attached is None else attached.step():
            for _ in range(args.micro_batches):
                ids = next(data).to(device)
                loss = model(input_ids=ids, labels=ids).loss / args.micro_batches
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {total.item() / dist.get_world_size():.4f}", flush=True)
    if attached is not None:
        report = attached.report()  # on all ranks
        if report:
            print(report, flush=True)
        attached.detach()
    ranks.leave()


if __name__ == "__main__":
    with in_one_line("fsdp2_llama.py"):  # Ctrl-C
        main()
