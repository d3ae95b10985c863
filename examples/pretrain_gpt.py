"""Train a GPT on megatron.core, with this pack's features by their flags.

    torchrun --nproc-per-node 2 examples/pretrain_gpt.py --device cpu --pipeline-model-parallel-size 2

Without torchrun it trains on one rank. `--help` lists all arguments. Without --data-path the text is the source of
Python's standard library.
"""

import mindspeed_mem.megatron_adaptor as mem  # isort: skip  first, as in any Megatron script

import contextlib
import logging
import os
import random
import sys
import time
import warnings
from datetime import timedelta

import numpy
import torch
from gpt_arguments import UsageError, make_parser
from gpt_validation import complete
from torch.distributed.elastic.multiprocessing.errors import record

from mindspeed_mem import ranks
from mindspeed_mem.device import DeviceError, get_backend
from mindspeed_mem.interruption import in_one_line
from mindspeed_mem.plan import MemoryConfigError


@record
def main():
    try:
        with in_one_line("pretrain_gpt.py"):  # Ctrl-C
            train(parse())
    except (UsageError, mem.FeatureError, MemoryConfigError) as error:  # the last: a pattern that fits no operator
        fail(error)


def parse():
    """The arguments, complete and checked, with the pack configured by them. Raises UsageError."""
    parser = make_parser()
    mem.add_arguments(parser)
    args = parser.parse_args()
    args.world_size = int(os.environ.get("WORLD_SIZE", "1"))
    problems = []
    for check in (complete, configure):
        try:
            check(args)
        except ValueError as error:
            problems += getattr(error, "problems", [str(error)])
    if problems:
        raise UsageError("\n".join(problems))
    return args


def configure(args):
    """Choose the device and put the pack's own arguments into force. Raises ValueError with all problems."""
    with contextlib.suppress(DeviceError):  # the pack says what is wrong with it, together with the rest
        args.device = get_backend(args.device).type
        set_device(args)  # limits and the like are set for it
    mem.configure(args)


def train(args):
    """The whole job."""
    if os.environ.get("RANK", "0") != "0" or args.transformer_impl == "local":
        warnings.filterwarnings("ignore", category=UserWarning, module="megatron")  # what it does without TE and Apex
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # names that Megatron uses
    logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)
    # Not at the top: what the pack repairs in megatron.core for this device must be known before it is imported.
    from gpt_checkpoint import find, load
    from gpt_data import build_datasets
    from gpt_model import build_model, build_optimizer, model_config
    from gpt_train import Trainer
    from megatron.core import parallel_state

    backend = get_backend(args.device)
    start = find(args)
    samples = build_datasets(args)
    device = set_device(args)
    join_ranks(args)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
    )
    set_seed(args)
    config = model_config(args, device)
    chunks = build_model(args, config, device)
    optimizer, schedule = build_optimizer(args, config, chunks)
    log(f" {sum(p.numel() for c in chunks for p in c.parameters()):,} parameters on rank 0")
    consumed = 0
    if start:
        consumed, remarks = load(args, start, chunks, optimizer, schedule, backend)
        for remark in remarks:
            log(f" {remark}")
        log(f" continuing after iteration {start} of {args.load}")
    Trainer(args, backend, device, chunks, optimizer, schedule, samples).run(start, consumed)
    mem.report()
    ranks.leave()  # only here: after an error the process just ends, and torchrun ends the others


def set_device(args):
    """This rank's torch.device, made the current one."""
    if args.device == "cpu":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    torch.get_device_module(args.device).set_device(index)
    if args.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # it would write over every empty tensor
    return torch.device(args.device, index)


def join_ranks(args):
    """The process group of all ranks; a process that was started without torchrun is alone in it."""
    alone = {} if "RANK" in os.environ else {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    torch.distributed.init_process_group(get_backend(args.device).collectives, timeout=timeout, **alone)


def set_seed(args):
    """As Megatron does: stages differ, data-parallel replicas do not."""
    from megatron.core import parallel_state, tensor_parallel

    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def log(text):
    if torch.distributed.get_rank() == 0:
        print(text, flush=True)


def fail(error):
    """Say what is wrong once, and exit with status 2."""
    if os.environ.get("RANK", "0") != "0":
        # All ranks see the same problem. torchrun ends the others as soon as one has exited: leave rank 0 the time to
        # speak. A rank that is still here after that has a problem of its own.
        time.sleep(60)
    print(f"pretrain_gpt.py: error: {error}", file=sys.stderr, flush=True)
    sys.exit(2)


if __name__ == "__main__":  # dist_checkpointing starts a process that imports this file again
    main()
