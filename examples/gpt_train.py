"""The training loop: Megatron's schedules over the samples, evaluation and checkpoints in between."""

import contextlib
import math
import time
from functools import partial
from pathlib import Path

import gpt_checkpoint
import torch
from gpt_data import microbatches
from gpt_metrics import Board, Metrics, log_line
from megatron.core import parallel_state
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.pipeline_parallel import get_forward_backward_func

import mindspeed_mem.megatron_adaptor as mem


class Trainer:
    """Holds what every iteration needs. On every rank there is one."""

    def __init__(self, args, backend, device, chunks, optimizer, schedule, samples):
        self.args, self.backend, self.device = args, backend, device
        self.chunks, self.optimizer, self.schedule = chunks, optimizer, schedule
        self.training_samples, self.validation_samples = samples
        self.meter = mem.activation_meter(backend)
        self.forward_backward = get_forward_backward_func()
        self.data_rank = parallel_state.get_data_parallel_rank()
        self.data_group = parallel_state.get_data_parallel_group(with_context_parallel=True)

    def run(self, start, consumed):
        """Train from iteration `start` + 1 on, `consumed` samples having been seen; returns the last iteration."""
        args = self.args
        self.consumed = consumed
        beside = args.memory_report and Path(args.memory_report) / "metrics.jsonl"
        metrics = Metrics(args.metrics_file or beside, start)
        board = Board(args.tensorboard_dir if torch.distributed.get_rank() == 0 else None, start)
        iteration = start
        skipped = 0
        self._train_mode(True)
        while iteration < args.train_iters:
            iteration += 1
            skipped += self._iteration(iteration, metrics)
            stop = iteration == args.train_iters or bool(args.exit_interval and iteration % args.exit_interval == 0)
            if stop or iteration % args.log_interval == 0:
                rows = metrics.flush()
                if rows:
                    print(log_line(rows, args, skipped), flush=True)
                    board.add(rows)
                skipped = 0
            if self.validation_samples and iteration % args.eval_interval == 0:
                self._evaluate(iteration)
            if args.save and (stop or (args.save_interval and iteration % args.save_interval == 0)):
                parts = self.chunks, self.optimizer, self.schedule, self.backend
                gpt_checkpoint.save(args, iteration, self.consumed, *parts)
                if torch.distributed.get_rank() == 0:
                    print(f" saved checkpoint of iteration {iteration} in {args.save}", flush=True)
            if stop:
                break
        return iteration

    def _iteration(self, iteration, metrics):
        """One optimizer step; returns 1 when it was skipped (fp16 overflow), else 0."""
        begin = time.perf_counter()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self._pass(self.training_samples, self.consumed, training=True)
        self.consumed += self.args.global_batch_size
        updated, grad_norm, _ = self.optimizer.step()
        if updated:
            self.schedule.step(self.args.global_batch_size)
        self.backend.synchronize()
        metrics.add(
            iteration=iteration,
            consumed=self.consumed,
            loss=self._mean_loss(losses),
            grad_norm=math.nan if grad_norm is None else float(grad_norm),
            step_ms=(time.perf_counter() - begin) * 1e3,
            lr=get_canonical_lr_for_logging(self.optimizer.param_groups) or 0.0,
            loss_scale=float(self.optimizer.get_loss_scale()),
            **self.meter.take(),
        )
        return 0 if updated else 1

    def _evaluate(self, iteration):
        """Print the loss over the first eval_iters global batches of the validation split, the same ones each time."""
        args = self.args
        hooks = args.overlap_param_gather
        if hooks:
            for chunk in self.chunks:
                chunk.disable_forward_pre_hook(param_sync=True)
        self._train_mode(False)
        total = 0.0
        with torch.no_grad():
            for i in range(args.eval_iters):
                losses = self._pass(self.validation_samples, i * args.global_batch_size, training=False)
                total += self._mean_loss(losses)
        self._train_mode(True)
        if hooks:
            for chunk in self.chunks:
                chunk.enable_forward_pre_hook()
        loss = total / args.eval_iters
        if torch.distributed.get_rank() == 0:
            perplexity = math.exp(min(20.0, loss))
            print(f" validation loss at iteration {iteration} | lm loss value: {loss:.6E} | ", end="")
            print(f"lm loss PPL: {perplexity:.6E} |", flush=True)

    def _pass(self, samples, first_sample, training):
        """All micro-batches of one global batch, forward and (in training) backward; the losses of the last stage."""
        batches = [microbatches(samples, first_sample, self.args, self.data_rank) for _ in self.chunks]
        one = len(self.chunks) == 1
        # Around backward, too: what a recomputation keeps meanwhile counts.
        with self.meter if training else contextlib.nullcontext():
            return self.forward_backward(
                forward_step_func=self._step,
                data_iterator=batches[0] if one else batches,
                model=self.chunks[0] if one else self.chunks,
                num_microbatches=self.args.num_microbatches,
                seq_length=self.args.seq_length,
                micro_batch_size=self.args.micro_batch_size,
                forward_only=not training,
            )

    def _step(self, batches, chunk):
        """What Megatron's schedules call per micro-batch and model chunk: (output, its loss function)."""
        batch = {key: value.to(self.device, non_blocking=True) for key, value in next(batches).items()}
        # No attention mask: the causal one is made, or built in, where attention runs.
        output = chunk(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        return output, partial(masked_loss, batch["loss_mask"])

    def _mean_loss(self, losses):
        """Loss per token over micro-batches and data-parallel ranks, as Megatron reports it; on every rank."""
        sums = torch.zeros(2, dtype=torch.float32, device=self.device)
        if losses:
            sums = torch.vstack([loss["lm loss"] for loss in losses]).sum(dim=0)
            torch.distributed.all_reduce(sums, group=self.data_group)
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            torch.distributed.broadcast(sums, last, group=parallel_state.get_pipeline_model_parallel_group())
        total, tokens = sums.tolist()
        return total / tokens

    def _train_mode(self, on):
        for chunk in self.chunks:
            chunk.train(on)


def masked_loss(loss_mask, losses):
    """(sum of the losses that count, their number, both for the report); Megatron divides the first by the second."""
    mask = loss_mask.view(-1)
    total = torch.sum(losses.float().view(-1) * mask)
    tokens = mask.sum()
    return total, tokens.int(), {"lm loss": torch.stack([total.detach(), tokens])}
