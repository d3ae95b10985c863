"""Megatron's own schedule loops, run by one thread for each stage, without a model: which order they take, and whether
they end.

The loops, their fused calls and what is sent to whom are Megatron's; only the two step functions and the transport
below ``P2PCommunicator._communicate`` are replaced. A call waits until all it posted is done, and a send is done only
when it was received, so that a pairing which does not match between neighbours shows as `Stuck`.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

from mindspeed_mem.passes import BACKWARD, FORWARD


class Stuck(RuntimeError):
    """All stages that have not ended wait for each other."""


class Wires:
    """Sends and receives between the stages; the n-th send from a stage to another meets the n-th receive there.

    ``streams`` None: whatever is posted can meet, as on gloo. "batched": what one call posted is one operation of the
    stage, and these come one after the other, as NCCL's groups on a communicator. "pairs": each send or receive waits
    for those before it between the same two stages, as on NCCL without groups.
    """

    def __init__(self, stages: int, streams: str | None = None) -> None:
        self.changed = threading.Condition()
        self.running, self.dead, self.streams = stages, False, streams
        self.blocked: dict[int, list[SimpleNamespace]] = {}
        self.queues: dict[tuple, list[list[SimpleNamespace]]] = {}
        self.open: list[SimpleNamespace] = []

    def post(self, wanted: list[tuple[str, int, int, object]]) -> list[SimpleNamespace]:
        """Post one call's (direction, stage, peer, value); returns its operations."""
        with self.changed:
            ops = [SimpleNamespace(kind=k, stage=s, peer=p, value=v, done=False) for k, s, p, v in wanted]
            if self.streams == "batched" and ops:
                self.queues.setdefault((ops[0].stage,), []).append(ops)
            elif self.streams == "pairs":
                for op in ops:
                    self.queues.setdefault((op.stage, op.peer), []).append([op])
            self.open += ops
            while self._meet():
                self.changed.notify_all()
            return ops

    def _free(self, op: SimpleNamespace) -> bool:
        if self.streams is None:
            return True
        queue = self.queues[(op.stage,) if self.streams == "batched" else (op.stage, op.peer)]
        return any(op is other for other in queue[0])

    def _meet(self) -> bool:
        firsts: dict[tuple, SimpleNamespace] = {}
        for op in self.open:
            firsts.setdefault((op.kind, op.stage, op.peer), op)
        for (kind, stage, peer), op in firsts.items():
            other = firsts.get(("recv", peer, stage))
            if kind == "send" and other is not None and self._free(op) and self._free(other):
                other.value, op.done, other.done = op.value, True, True
                self.open = [one for one in self.open if not one.done]
                for queue in self.queues.values():
                    while queue and all(one.done for one in queue[0]):
                        queue.pop(0)
                return True
        return False

    def wait(self, ops: list[SimpleNamespace]) -> None:
        with self.changed:
            self.blocked[threading.get_ident()] = ops
            self._watch()
            self.changed.wait_for(lambda: self.dead or all(op.done for op in ops))
            del self.blocked[threading.get_ident()]
            if not all(op.done for op in ops):
                raise Stuck

    def leave(self) -> None:
        with self.changed:
            self.running -= 1
            self._watch()

    def _watch(self) -> None:
        """When every stage that runs waits for something, nobody is left who could bring it."""
        stuck = [ops for ops in self.blocked.values() if not all(op.done for op in ops)]
        if self.running and len(stuck) == self.running:
            self.dead = True
            self.changed.notify_all()


class Group:
    """A process group of the pipeline as the loops see it. `size` may be less than the truth: that caps 1F1B."""

    def __init__(self, stage: int, stages: int, size: int | None = None) -> None:
        self.stage, self.stages, self.seen = stage, stages, stages if size is None else size

    def rank(self) -> int:
        return self.stage

    def size(self) -> int:
        return self.seen


class Config:
    """Megatron's configuration: what is not given is off."""

    def __init__(self, **given: object) -> None:
        self.__dict__.update(given)

    def __getattr__(self, name: str) -> None:
        return None


def run_loops(
    stages: int,
    virtual_stages: int,
    micro_batches: int,
    *,
    group_size: int | None = None,
    warm_ups: list[int] | None = None,
    forward_only: bool = False,
    overlap: bool = False,
    streams: str | None = None,
) -> list[list[tuple]]:
    """The passes of each stage as Megatron's loop runs them; with `warm_ups`, told that number of warm-up forwards.

    Raises Stuck, and AssertionError when a pass gets a tensor that is not its own. Call it with the CPU patches
    applied and a process group of one rank.
    """
    import torch
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    wires = Wires(stages, streams)
    passes: list[list[tuple]] = [[] for _ in range(stages)]
    errors: list[BaseException] = []
    last_part = stages * virtual_stages - 1

    class Communicator(P2PCommunicator):
        def __init__(self, config, group):
            self.config, self.pp_group, self.stage = config, group, group.rank()
            self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size

        def _communicate(
            self, *, tensor_send_next, tensor_send_prev, recv_prev, recv_next, tensor_shape, wait_on_reqs=True
        ):
            after, ahead = (self.stage + 1) % stages, (self.stage - 1) % stages
            wanted = {
                "send_prev": tensor_send_prev is not None and ("send", self.stage, ahead, tensor_send_prev),
                "recv_prev": recv_prev and ("recv", self.stage, ahead, None),
                "send_next": tensor_send_next is not None and ("send", self.stage, after, tensor_send_next),
                "recv_next": recv_next and ("recv", self.stage, after, None),
            }
            if streams == "pairs":  # Megatron's order without groups: even ranks send first, odd ones receive first
                even = ("send_next", "recv_prev", "send_prev", "recv_next")
                odd = ("recv_prev", "send_next", "recv_next", "send_prev")
                wanted = {name: wanted[name] for name in (odd if self.stage % 2 else even)}
            names = [name for name in wanted if wanted[name]]
            ops = dict(zip(names, wires.post([wanted[name] for name in names]), strict=True))
            reqs = {name: SimpleNamespace(wait=lambda op=op: wires.wait([op])) for name, op in ops.items()}
            if wait_on_reqs:
                wires.wait(list(ops.values()))
                reqs = None
            # A receive that goes on is a promise: the operation, whose value comes before anyone looks at it.
            return ops.get("recv_prev"), ops.get("recv_next"), reqs

    def value(tensor):
        tensor = tensor[0] if isinstance(tensor, list) else tensor
        if isinstance(tensor, SimpleNamespace):
            assert tensor.done, "a tensor was used before it had arrived"
            return tensor.value
        return tensor

    def forward_step(_func, _data, model, _number, input_tensor, *_, current_microbatch, vp_stage=0, **__):
        stage, chunk = model.config.stage, vp_stage or 0
        part = chunk * stages + stage
        wanted = (FORWARD, current_microbatch, part - 1) if part else None
        assert value(input_tensor) == wanted, (stage, value(input_tensor), wanted)
        passes[stage].append((FORWARD, current_microbatch, chunk))
        output = (FORWARD, current_microbatch, part)
        return ([output] if virtual_stages == 1 else output), 0

    def backward_step(input_tensor, output_tensor, output_tensor_grad, _type, config, *_):
        _, micro_batch, part = value(output_tensor)
        assert value(output_tensor_grad) == ((BACKWARD, micro_batch, part + 1) if part < last_part else None)
        assert value(input_tensor) == ((FORWARD, micro_batch, part - 1) if part else None)
        passes[config.stage].append((BACKWARD, micro_batch, part // stages))
        gradient = (BACKWARD, micro_batch, part)
        return [gradient] if virtual_stages == 1 else gradient

    def told(number, chunks, group, forward_only=False, p2p_communicator=None, **__):
        total, warm_up = number * chunks, warm_ups[p2p_communicator.pp_group.rank()]
        return total, warm_up == total, warm_up, total - warm_up

    def stage_loop(stage):
        config = Config(
            stage=stage,
            hidden_size=1,
            overlap_p2p_comm=overlap,
            microbatch_group_size_per_vp_stage=group_size or stages,
            virtual_pipeline_model_parallel_size=virtual_stages if virtual_stages > 1 else None,
        )
        models = [torch.nn.Module() for _ in range(virtual_stages)]
        for model in models:
            model.config, model.model_type = config, ModelType.encoder_or_decoder
        one, group = Group(0, 1), Group(stage, stages)
        groups = SimpleNamespace(tp=one, cp=one, embd=None, pos_embd=None, pp=group, dp_cp=one)
        if virtual_stages == 1 and warm_ups is not None:
            group = Group(stage, stages, stage + 1 + warm_ups[stage])
        loop = schedules.get_forward_backward_func(stages, config.virtual_pipeline_model_parallel_size)
        try:
            loop(
                forward_step_func=None,
                data_iterator=[None] * virtual_stages,
                model=models,
                num_microbatches=micro_batches,
                seq_length=1,
                micro_batch_size=1,
                forward_only=forward_only,
                p2p_communicator=Communicator(config, group),
                pg_collection=groups,
            )
        except BaseException as error:
            errors.append(error)
        finally:
            wires.leave()

    replaced = {"forward_step": forward_step, "backward_step": backward_step}
    if warm_ups is not None:
        replaced |= {
            "get_pp_rank_microbatches": told,
            "is_pp_last_stage": lambda group: group.rank() == group.stages - 1,
        }
    originals = {name: getattr(schedules, name) for name in replaced}
    vars(schedules).update(replaced)
    try:
        threads = [threading.Thread(target=stage_loop, args=(stage,), daemon=True) for stage in range(stages)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        vars(schedules).update(originals)
    for error in sorted(errors, key=lambda error: isinstance(error, Stuck)):
        raise error
    return passes


def outcome(*sizes: int, **more: object) -> object:
    """What `run_loops` returns, or the word "stuck": the case for `on_ranks`."""
    try:
        return run_loops(*sizes, **more)
    except Stuck:
        return "stuck"


def outcomes(cases: list[tuple[tuple, dict]]) -> list:
    """`outcome` of each (sizes, more)."""
    return [outcome(*sizes, **more) for sizes, more in cases]


class Communicated:
    """As much of a communicator as Megatron's count of warm-up forwards asks for."""

    def __init__(self, stage: int, stages: int, virtual_stages: int) -> None:
        self.pp_group, self.virtual_pipeline_model_parallel_size = Group(stage, stages), virtual_stages
