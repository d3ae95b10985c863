"""Train a Hugging Face GPT-2 in chunks, without Megatron: the API is that of ColossalAI's Gemini.

    torchrun --nproc-per-node 2 examples/train_gpt_gemini.py --model_type gpt2_medium --placement auto

Without torchrun it trains on one rank. The model is built from its configuration, chunk by chunk: nothing is
downloaded, and no rank ever holds all of it. The text is the source of Python's standard library, byte by byte.

With --tp_degree N each layer is split over N ranks next to each other, which take the same batches; so many such groups
as there are share the chunks.
"""

import argparse
import os
import sys
import time
import warnings

import numpy
import torch
import torch.distributed as dist
from gpt2_tensor_parallel import problems, split_layers
from gpt_arguments import UsageError
from gpt_corpus import ByteTokenizer, documents, stdlib_files

from mindspeed_mem.device import get_backend
from mindspeed_mem.gemini import GeminiAdamOptimizer, GeminiDDP, OptionError, ProcessGroup, lazy_init
from mindspeed_mem.interruption import in_one_line
from mindspeed_mem.ranks import leave

MODELS = {  # hidden size, layers, heads
    "gpt2_tiny": (64, 2, 2),
    "gpt2_small": (768, 12, 12),
    "gpt2_medium": (1024, 24, 16),
    "gpt2_large": (1280, 36, 20),
    "gpt2_xl": (1600, 48, 25),
    "gpt2_10b": (4096, 50, 16),
}
VOCABULARY = 50257
PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model_type", choices=MODELS, default="gpt2_medium")
    parser.add_argument("--batch_size", type=int, default=8, help="sequences per rank, or tensor-parallel group")
    parser.add_argument("--tp_degree", type=int, default=1, help="ranks that each layer is split over")
    parser.add_argument("--num_steps", type=int, default=10)
    parser.add_argument("--sequence_length", type=int, default=1024)
    parser.add_argument("--vocab_size", type=int, default=VOCABULARY, help="at least 257, one for each byte")
    parser.add_argument("--placement", default="auto", help="device, host, static or auto (or cuda, cpu)")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    parser.add_argument("--checkpoint_activations", action="store_true", help="recompute each layer in backward")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--max_norm", type=float, default=1.0, help="clip gradients to this norm; 0: do not")
    parser.add_argument("--search_range_mb", type=float, default=32, help="of chunk sizes, in 2^20 elements")
    parser.add_argument("--min_chunk_size_mb", type=float, default=32, help="in 2^20 elements")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or npu")
    parser.add_argument("--memory_limit_gib", type=float, help="of device memory that this process may use")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    wrong = []
    if args.vocab_size <= ByteTokenizer.eod or min(args.batch_size, args.num_steps, args.sequence_length) < 1:
        wrong.append("--vocab_size is at least 257; --batch_size, --num_steps and --sequence_length are at least 1")
    hidden, _, heads = MODELS[args.model_type]
    launched = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 1
    sizes = [("attention heads", heads), ("feed-forward columns", 4 * hidden), ("ranks", launched)]
    wrong += [f"--{problem}" for problem in problems(args.tp_degree, sizes)]
    if wrong:
        parser.error("; ".join(wrong))
    return args


def build_model(args, tensor_parallel_group):
    """(the model with this rank's part of each layer, the number of elements of the whole)."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    hidden, layers, heads = MODELS[args.model_type]
    config = GPT2Config(
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        n_positions=args.sequence_length,
        vocab_size=args.vocab_size,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    with lazy_init():
        model = GPT2LMHeadModel(config)
        elements = sum(param.numel() for param in model.parameters())
        split_layers(model, tensor_parallel_group)
    if args.checkpoint_activations:
        newest = getattr(model, "activation_checkpointing_enable", None)
        (newest or model.gradient_checkpointing_enable)()
    return model.train(), elements


def batches(args, device, ranks, rank):
    """Yields tokens, int64 [batch, sequence], of this one of the data-parallel `ranks`, in the order of the text."""
    tokenizer = ByteTokenizer()
    text = numpy.concatenate([numpy.append(tokenizer.encode(t), tokenizer.eod) for t in documents(stdlib_files())])
    length, place = args.sequence_length, rank
    while True:
        starts = [(place + ranks * i) * length % (len(text) - length) for i in range(args.batch_size)]
        place += ranks * args.batch_size
        yield torch.from_numpy(numpy.stack([text[start : start + length] for start in starts])).to(device)


def train(args):
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # old names of collectives
    backend = get_backend(args.device)
    device = torch.device(backend.type)
    if device.type != "cpu":
        torch.get_device_module(device.type).set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if args.memory_limit_gib:
        backend.limit_memory(int(args.memory_limit_gib * 2**30))
    if "RANK" in os.environ:
        dist.init_process_group(backend.collectives)
    rank = dist.get_rank() if dist.is_initialized() else 0
    group = ProcessGroup(tp_degree=args.tp_degree)
    replicas = group.dp_process_group()

    torch.manual_seed(args.seed)  # the same on all ranks: they split one model
    model, elements = build_model(args, group.tp_process_group())
    model = GeminiDDP(
        model,
        device,
        placement_policy=args.placement,
        mixed_precision=PRECISIONS[args.precision],
        hidden_dim=MODELS[args.model_type][0],
        search_range_mb=args.search_range_mb,
        min_chunk_size_mb=args.min_chunk_size_mb,
        process_group=group,
    )
    optimizer = GeminiAdamOptimizer(model, lr=args.learning_rate, weight_decay=0.01, max_norm=args.max_norm)
    if rank == 0:
        ranks = f"{args.tp_degree * replicas.size()} ranks"
        if args.tp_degree > 1:
            ranks += f": {args.tp_degree} tensor-parallel x {replicas.size()} data-parallel"
        print(f"{args.model_type}: {elements:,} parameters in {len(model.chunk_manager.built)} chunks, {ranks}")

    data = batches(args, device, replicas.size(), replicas.rank())
    for step in range(args.num_steps):
        begin = time.perf_counter()
        tokens = next(data)
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.backward(loss)
        optimizer.step()
        backend.synchronize()
        seconds = time.perf_counter() - begin
        # As ColossalAI's demo counts: forward, backward and recomputation, 2 operations per element and token each way.
        work = elements * args.batch_size * args.sequence_length * 8 / args.tp_degree
        tflops = work / seconds / 1e12
        if rank == 0:
            print(
                f"step {step + 1}: loss {loss.item():.4f}, {seconds:.3f} s, {tflops:.3f} TFLOP/s per rank", flush=True
            )

    counts, peak = model.chunk_manager.gathering.counts, backend.peak()
    if rank == 0:
        memory = "not counted on this device (--memory_limit_gib counts)" if peak is None else f"{peak:,} bytes"
        print(
            f"peak device memory {memory}; {counts.gathers / args.num_steps:.1f} gathers per step, "
            f"at most {counts.peak_bytes:,} bytes gathered at once"
        )
    leave()


def main():
    args = parse()
    try:
        with in_one_line("train_gpt_gemini.py"):  # Ctrl-C
            train(args)
    except (UsageError, OptionError) as error:
        sys.exit(f"train_gpt_gemini.py: error: {error}")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        sys.exit('train_gpt_gemini.py: error: it needs transformers: pip install "mindspeed-mem[gemini]"')


if __name__ == "__main__":
    main()
