"""Train a Hugging Face Llama with its own Trainer and a memory plan, without Megatron.

    python examples/hf_llama.py --plan examples/configs/llama_plan.yaml
    torchrun --nproc-per-node 2 examples/hf_llama.py --plan examples/configs/llama_plan.yaml

The model is made from a configuration and learns the bytes of Python's standard library: nothing is downloaded. With
and without a plan it prints the same losses. `parser`, `attach`, `llama` and `texts` are used by fsdp2_llama.py, too.
"""

import argparse
import itertools
import sys
import tempfile

import torch
from gpt_corpus import documents, stdlib_files

import mindspeed_mem
from mindspeed_mem import ranks
from mindspeed_mem.interruption import in_one_line

FILES = 40
"""Of the library."""


def parser(description):
    made = argparse.ArgumentParser(description=description, allow_abbrev=False)
    made.add_argument(
        "--plan",
        help="a YAML file with swap_config and recompute_config; its layers are the decoder's. auto: one is found",
    )
    made.add_argument("--survive", action="store_true", help="go on where device memory runs out")
    made.add_argument("--device-memory-gib", type=float, help="device memory that a rank may use")
    made.add_argument("--hidden-size", type=int, default=128)
    made.add_argument("--num-layers", type=int, default=4)
    made.add_argument("--seq-length", type=int, default=128)
    made.add_argument("--batch-size", type=int, default=4, help="of a rank, in a micro-batch")
    made.add_argument("--micro-batches", type=int, default=2, help="in a step")
    made.add_argument("--steps", type=int, default=10)
    made.add_argument("--learning-rate", type=float, default=1e-3)
    made.add_argument("--cpu", action="store_true", help="also where there is an accelerator")
    return made


def attach(model, args):
    """Put the plan into force, if there is one; to be called when the model is on its device."""
    return mindspeed_mem.attach(model, args.plan, **limits(args)) if wanted(args) else None


def wanted(args):
    return args.plan or args.survive or args.device_memory_gib


def limits(args):
    return {"survive": args.survive, "device_memory_gib": args.device_memory_gib}


def llama(args):
    """A Llama of bytes."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        sys.exit('error: it needs transformers: pip install "mindspeed-mem[huggingface]"')
    torch.manual_seed(42)
    sizes = {"hidden_size": args.hidden_size, "intermediate_size": 3 * args.hidden_size, "vocab_size": 256}
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=args.num_layers, num_attention_heads=4, use_cache=False
    )
    return transformers.LlamaForCausalLM(config)


def texts(length):
    """Pieces of text: int64[length] each."""
    text = b"".join(itertools.islice(documents(stdlib_files()), FILES))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return tokens[: len(tokens) // length * length].view(-1, length)


def main():
    args = parser(__doc__.splitlines()[0]).parse_args()
    model = llama(args)
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            per_device_train_batch_size=args.batch_size,
            gradient_accumulation_steps=args.micro_batches,
            max_steps=args.steps,
            learning_rate=args.learning_rate,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=args.cpu,
            disable_tqdm=True,
        )
        data = [{"input_ids": piece, "labels": piece} for piece in texts(args.seq_length)]
        callbacks = [mindspeed_mem.trainer_callback(args.plan, **limits(args))] if wanted(args) else None
        Trainer(model=model, args=settings, train_dataset=data, callbacks=callbacks).train()
    ranks.leave()


if __name__ == "__main__":
    with in_one_line("hf_llama.py"):  # Ctrl-C
        main()
