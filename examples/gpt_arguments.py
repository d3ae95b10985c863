"""The arguments of pretrain_gpt.py: Megatron's names and, where there is one, Megatron's default."""

import argparse
import os


class UsageError(ValueError):
    """The job cannot run as asked for. The message holds every problem found, one per line."""


class Parser(argparse.ArgumentParser):
    """Raises instead of exiting, and only rank 0 prints the help."""

    def error(self, message):
        raise UsageError(message)

    def _print_message(self, message, file=None):
        if os.environ.get("RANK", "0") == "0":
            super()._print_message(message, file)


def make_parser():
    """The parser without the pack's own group, which `mem.add_arguments` adds."""
    parser = Parser(
        description="Train a GPT on megatron.core, on cpu, cuda or npu; start it with torchrun.", allow_abbrev=False
    )
    for add in (_network, _attention, _experts, _training, _optimizer, _recompute, _parallel, _data, _files):
        add(parser)
    return parser


def _network(parser):
    add = parser.add_argument_group("network").add_argument
    add("--num-layers", type=int, default=4)
    add("--hidden-size", type=int, default=128)
    add("--ffn-hidden-size", type=int, help="default: 4 x hidden size, with --swiglu 8/3 of it in multiples of 64")
    add("--max-position-embeddings", type=int, help="default: the sequence length")
    add("--position-embedding-type", choices=["learned_absolute", "rope", "none"], default="learned_absolute")
    add("--rotary-base", type=int, default=10000)
    add("--rotary-percent", type=float, default=1.0)
    add("--normalization", choices=["LayerNorm", "RMSNorm"], default="LayerNorm")
    add("--norm-epsilon", type=float, default=1e-5)
    add("--swiglu", action="store_true")
    add("--disable-bias-linear", action="store_false", dest="add_bias_linear")
    add("--untie-embeddings-and-output-weights", action="store_true")
    add("--make-vocab-size-divisible-by", type=int, default=128)
    add("--init-method-std", type=float, default=0.02)
    add("--attention-dropout", type=float, default=0.1)
    add("--hidden-dropout", type=float, default=0.1)
    add("--transformer-impl", choices=["local", "transformer_engine"], default="local")
    for fusion in ("masked-softmax", "bias-gelu", "bias-swiglu", "bias-dropout", "gradient-accumulation"):
        add(f"--no-{fusion}-fusion", action="store_false", dest=f"{fusion.replace('-', '_')}_fusion")
    add("--no-persist-layer-norm", action="store_false", dest="persist_layer_norm")


def _attention(parser):
    add = parser.add_argument_group("attention").add_argument
    add("--num-attention-heads", type=int, default=4)
    add("--kv-channels", type=int, help="default: hidden size / attention heads")
    add("--group-query-attention", action="store_true")
    add("--num-query-groups", type=int, default=1)
    add("--add-qkv-bias", action="store_true")
    add("--qk-layernorm", action="store_true")
    add("--multi-latent-attention", action="store_true")
    add("--q-lora-rank", type=int, help="default: queries are not compressed")
    add("--kv-lora-rank", type=int, default=32)
    add("--qk-head-dim", type=int, default=128)
    add("--qk-pos-emb-head-dim", type=int, default=64)
    add("--v-head-dim", type=int, default=128)


def _experts(parser):
    add = parser.add_argument_group("mixture of experts").add_argument
    add("--num-experts", type=int, help="experts in every layer; default: none")
    add("--moe-router-topk", type=int, default=2)
    add("--moe-ffn-hidden-size", type=int)
    add("--moe-shared-expert-intermediate-size", type=int)
    add("--moe-router-load-balancing-type", choices=["aux_loss", "seq_aux_loss", "none"], default="aux_loss")
    add("--moe-aux-loss-coeff", type=float, default=0.0)
    add("--moe-token-dispatcher-type", choices=["allgather", "alltoall"], default="allgather")
    add("--moe-grouped-gemm", action="store_true")


def _training(parser):
    add = parser.add_argument_group("training").add_argument
    add("--seq-length", type=int, default=128)
    add("--micro-batch-size", type=int, default=2)
    add("--global-batch-size", type=int, help="default: micro-batch size x data-parallel size")
    add("--train-iters", type=int, default=100)
    add("--exit-interval", type=int, help="stop after an iteration that is a multiple of this, as if interrupted")
    add("--seed", type=int, default=1234)
    add("--bf16", action="store_true")
    add("--fp16", action="store_true")
    add("--loss-scale", type=float, help="a fixed one, with --fp16; default: dynamic")
    add("--initial-loss-scale", type=float, default=2.0**32)
    add("--loss-scale-window", type=float, default=1000)
    add(
        "--deterministic-mode",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="two runs give the same numbers, also on an accelerator",
    )


def _optimizer(parser):
    add = parser.add_argument_group("optimizer").add_argument
    add("--optimizer", choices=["adam", "sgd"], default="adam")
    add("--lr", type=float, default=1e-3)
    add("--min-lr", type=float, default=0.0)
    add("--lr-decay-style", choices=["constant", "linear", "cosine", "inverse-square-root"], default="linear")
    add("--lr-decay-iters", type=int, help="default: all of --train-iters; a resumed run takes these flags anew")
    add("--lr-warmup-iters", type=int, default=0)
    add("--lr-warmup-fraction", type=float, help="of the decay iterations, instead of --lr-warmup-iters")
    add("--weight-decay", type=float, default=0.01)
    add("--clip-grad", type=float, default=1.0)
    add("--adam-beta1", type=float, default=0.9)
    add("--adam-beta2", type=float, default=0.999)
    add("--adam-eps", type=float, default=1e-8)
    add("--sgd-momentum", type=float, default=0.9)


def _recompute(parser):
    add = parser.add_argument_group("recompute").add_argument
    add("--recompute-granularity", choices=["full", "selective"])
    add("--recompute-activations", action="store_true", help="the same as --recompute-granularity selective")
    add("--recompute-method", choices=["uniform", "block"])
    add("--recompute-num-layers", type=int)
    add("--recompute-modules", nargs="*", help="with selective; default: core_attn")
    add("--distribute-saved-activations", action="store_true")


def _parallel(parser):
    add = parser.add_argument_group("parallel").add_argument
    add("--tensor-model-parallel-size", type=int, default=1)
    add("--pipeline-model-parallel-size", type=int, default=1)
    add("--num-layers-per-virtual-pipeline-stage", type=int)
    add("--expert-model-parallel-size", type=int, default=1)
    add("--sequence-parallel", action="store_true")
    add("--use-distributed-optimizer", action="store_true")
    add("--overlap-grad-reduce", action="store_true")
    add("--overlap-param-gather", action="store_true")
    add("--no-overlap-p2p-communication", action="store_false", dest="overlap_p2p_comm")
    add("--ddp-bucket-size", type=int, help="parameters per bucket of gradients")
    add("--distributed-timeout-minutes", type=int, default=10)


def _data(parser):
    add = parser.add_argument_group("data").add_argument
    add(
        "--data-path",
        nargs="*",
        metavar="PATH",
        help="text files, .jsonl files with a key text, folders of these, or one or more prefixes of indexed datasets "
        "(without .bin and .idx); default: the source text of Python's standard library",
    )
    add("--split", default="969,30,1", help="weights of training, validation and test (default %(default)s)")
    add("--tokenizer-model", metavar="FILE", help="a Hugging Face tokenizer.json; default: one token per byte")
    add("--vocab-size", type=int, help="for indexed datasets made elsewhere, when there is no --tokenizer-model")
    add("--data-cache-path", metavar="DIR", help="default: mindspeed_mem in $XDG_CACHE_HOME or ~/.cache")


def _files(parser):
    add = parser.add_argument_group("checkpoints, evaluation, logs").add_argument
    add("--save", metavar="DIR")
    add("--save-interval", type=int, help="iterations; default: only at the end")
    add("--load", metavar="DIR", help="continue from here; DIR may be empty only if it is also --save")
    add("--eval-interval", type=int, default=1000)
    add("--eval-iters", type=int, default=0, help="global batches per evaluation, always the same ones; 0: none")
    add("--log-interval", type=int, default=10)
    add(
        "--metrics-file",
        metavar="FILE",
        help="one JSON object per iteration and rank, from all ranks, written by rank 0; a run that resumes at "
        "iteration n keeps the lines up to n",
    )
    add("--tensorboard-dir", metavar="DIR", help="TensorBoard's events, with the names that Megatron's have, by rank 0")
