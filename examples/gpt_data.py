"""Which samples an iteration sees: a function of the number of samples consumed so far, and of nothing else."""

import numpy
import torch
from gpt_arguments import UsageError
from gpt_corpus import locked, prepare_corpus
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
from torch.utils.data import ConcatDataset


class Samples:
    """An endless sequence of samples over one epoch of Megatron datasets: each later epoch is shuffled anew.

    Megatron has shuffled the first one within each dataset; several are mixed here from the start. So the order does
    not depend on how many iterations are planned, and a run that is extended goes on as if it had been planned longer.
    """

    def __init__(self, datasets, seed):
        self._dataset, self._seed = ConcatDataset(datasets), seed
        self._shuffled_from = 0 if len(datasets) > 1 else 1
        self._epoch, self._order = None, None

    def __len__(self):
        return len(self._dataset)

    def __getitem__(self, number):
        epoch, place = divmod(number, len(self._dataset))
        if epoch >= self._shuffled_from:
            if epoch != self._epoch:
                self._epoch = epoch
                self._order = numpy.random.RandomState([self._seed, epoch]).permutation(len(self._dataset))
            place = int(self._order[place])
        return self._dataset[place]


def build_datasets(args):
    """(training Samples, validation Samples or None). To be called before the ranks meet.

    Sets args.padded_vocab_size and args.train_samples (in one epoch). Raises UsageError.
    """
    prefixes, tokenizer, indices = prepare_corpus(args)
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-tokenizer.vocab_size // multiple) * multiple
    weights = [float(weight) for weight in args.split.split(",")]
    weights += [0.0] * (3 - len(weights))
    if args.eval_iters and not weights[1]:
        raise UsageError(f"--eval-iters {args.eval_iters}, but --split {args.split} has no weight for validation")
    train, valid = [], []
    with locked(indices):
        configs = [_config(args, prefix, ",".join(map(str, weights)), tokenizer, indices) for prefix in prefixes]
        _check_sizes(configs)
        for config in configs:
            # Sizes None: one epoch. Without a process group every rank builds, or finds, for itself.
            builder = BlendedMegatronDatasetBuilder(GPTDataset, (None, None, None), lambda: True, config)
            for found, dataset in zip((train, valid), builder.build(), strict=False):
                found.append(dataset)
    train = Samples(train, args.seed)
    args.train_samples = len(train)
    return train, Samples(valid, args.seed) if args.eval_iters else None


def _config(args, prefix, split, tokenizer, indices):
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=([prefix], None),
        split=split,
        path_to_cache=str(indices),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    if not args.eval_iters:
        config.split_matrix[Split.valid.value] = None
    config.split_matrix[Split.test.value] = None  # kept apart from training, but nobody reads it here
    return config


def _check_sizes(configs):
    """Refuse a split that holds no whole sample: Megatron would fail on it, or search for ever, without a word."""
    problems = []
    for config in configs:
        prefix = config.blend[0][0]
        dataset = IndexedDataset(prefix)  # a name of its own: the lengths are unmapped when it dies
        lengths = dataset.sequence_lengths
        for split in Split:
            bounds = config.split_matrix[split.value]
            if bounds is None:
                continue
            begin, end = (int(round(bound * len(lengths))) for bound in bounds)
            tokens = int(lengths[begin:end].sum())
            if tokens <= config.sequence_length:
                problems.append(
                    f"{prefix}: the {split.name} split has {tokens} tokens, one sample needs "
                    f"{config.sequence_length + 1}; give more text, a shorter --seq-length or other weights (--split)"
                )
    if problems:
        raise UsageError("\n".join(problems))


def microbatches(samples, start, args, data_parallel_rank):
    """Yields the micro-batches of this data-parallel rank for the samples from number `start` on.

    Each is a dict of int64 tensors [micro-batch, sequence] tokens, labels and position_ids and float32 loss_mask.
    Whatever the layout, the ranks together walk the samples in the same order.
    """
    start += data_parallel_rank * args.micro_batch_size
    while True:
        batch = [samples[start + i] for i in range(args.micro_batch_size)]
        yield {key: torch.stack([sample[key] for sample in batch]) for key in batch[0]}
        start += args.micro_batch_size * args.data_parallel_size
