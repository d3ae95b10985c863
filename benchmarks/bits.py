"""Each feature beside stock Megatron on one device, bit for bit: losses, gradients and norms of a few training steps.

    python benchmarks/bits.py activations                   # swap, recompute, both, survival, the adaptive plan
    python benchmarks/bits.py transformer-engine            # with TransformerEngine's layers; takes a GPU
    python benchmarks/bits.py chunks --device cuda          # chunk ZeRO: stages, placements, where Adam steps
    python benchmarks/bits.py gemini --json results.json    # the same for plain torch modules
    python benchmarks/bits.py pipeline                      # a cap on micro-batches in flight; takes two devices

Kernels are made reproducible as far as they can be. Stock runs twice first: a device that does not repeat its own bits
is named, and nothing is compared on it. That each feature did something is looked at as well. The exit status is 0 also
if something differs: the results say it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
from timing import bits, machine, reproducible  # noqa: E402

import mindspeed_mem.megatron_adaptor as mem  # noqa: E402  before megatron
from mindspeed_mem.activation import engine as engines  # noqa: E402
from mindspeed_mem.device import Backend, get_backend  # noqa: E402
from mindspeed_mem.zero.core.shard_memory import device_of  # noqa: E402

SHAPES = {  # layers, hidden, heads, ffn, sequence, micro-batch, micro-batches, vocabulary
    "small": (4, 1024, 8, 2816, 2048, 2, 2, 4096),
    "tiny": (3, 32, 2, 64, 256, 1, 2, 64),
}
NAMES = ("layers", "hidden", "heads", "ffn", "seq_length", "micro_batch_size", "micro_batches", "vocab")
EQUAL, DIFFERS, IDLE, FAILED = "equal", "DIFFERS", "equal, but it did nothing", "FAILED"
STEPS, MOST_STEPS = 3, 28
"""Of a comparison; until the adaptive run has settled."""
CLOSE = 1e-3
"""Between losses with Adam stepped on the host and on the device: they round otherwise."""


@dataclasses.dataclass
class Numbers:
    """What some steps computed: the losses of each, then its gradient norm (0: none), and the bits of its gradients."""

    losses: list[list[float]] = dataclasses.field(default_factory=list)
    gradients: list[list[int]] = dataclasses.field(default_factory=list)
    did: dict[str, int] = dataclasses.field(default_factory=dict)
    """Figures that say that a feature was at work: none of them is 0 if it was."""

    def differences(self, other: Numbers) -> list[str]:
        """Of the steps that both have."""
        found = []
        for number, (mine, others) in enumerate(zip(self.losses, other.losses, strict=False)):
            found += [f"step {number}: losses"] if mine[:-1] != others[:-1] else []
            found += (
                [f"step {number}: the norm, by {abs(mine[-1] / others[-1] - 1):.0e}"]
                if mine[-1:] != others[-1:]
                else []
            )
        for number, (mine, others) in enumerate(zip(self.gradients, other.gradients, strict=False)):
            wrong = sum(a != b for a, b in zip(mine, others, strict=True))
            found += [f"step {number}: {wrong} of {len(mine)} gradients"] if wrong else []
        return found


class Findings:
    """One row for each thing compared."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

    def note(self, name: str, result: str, **more: Any) -> None:
        """Keep it, and print it at once: what comes next may end this process."""
        self.rows[name] = {"result": result, **more}
        told = "; ".join(f"{key}: {value}" for key, value in more.items() if value not in ("", [], {}))
        print(f"{name:46} {result}" + (f" ({told})" if told else ""), flush=True)

    @contextlib.contextmanager
    def about(self, name: str) -> Iterator[None]:
        """What is raised inside is the result; the next comparison goes on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.note(name, FAILED, error=f"{type(error).__name__}: {error}".strip().splitlines()[0])
        mem.configure(STOCK)
        gc.collect()

    def compare(self, name: str, mine: Numbers, stock: Numbers) -> None:
        """Step by step."""
        wrong = mine.differences(stock)
        result = DIFFERS if wrong else EQUAL if all(mine.did.values()) else IDLE
        self.note(name, result, differences=wrong[:6], steps=len(mine.losses), did=mine.did)

    def repeats(self, one: Numbers, again: Numbers, kind: str = "") -> bool:
        """Whether the device gives the same bits twice; otherwise nothing can be compared on it."""
        wrong = one.differences(again)
        self.note(
            f"stock, twice{kind}", "not reproducible: nothing compared" if wrong else EQUAL, differences=wrong[:6]
        )
        return not wrong


STOCK: dict[str, Any] = {"device": "auto", "sdpa_attention": True}
"""Settings: torch's attention, without the quadratic matrix; Megatron alone otherwise."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "npu"), default="auto")
    parser.add_argument("--tiny", action="store_true", help="a model of a few kilobytes")
    parser.add_argument("--json", type=Path, help="write the results there")
    given = parser.parse_args()
    logging.getLogger("mindspeed_mem").setLevel(logging.ERROR)
    backend = get_backend(given.device)
    STOCK["device"] = backend.type
    mem.configure(STOCK)
    if backend.is_host:
        torch.set_num_threads(1)
    shape = dict(zip(NAMES, SHAPES["tiny" if given.tiny else "small"], strict=True))
    findings = Findings()
    with reproducible(backend.type):
        GROUPS[given.group](backend, shape, findings)
    if given.json:
        record = {"benchmark": f"bits-{given.group}", "machine": machine(backend.type), "shape": shape}
        given.json.write_text(json.dumps(record | {"rows": findings.rows}, indent=1) + "\n")


# ---- activations
MOVED = 2**12
"""Bytes from which on what a plan selects is to move, even where such copies are not worth it: what it does is shown
at any size of the model."""
EVERYTHING = {"swap_config": {"swap": True, "layer_swap": {"backward_prefetch": 2, "layers": True}}}
CHEAP = [r".*norm", r"mlp\.activation_func", r"self_attention\.rotary_pos_emb"]
PLANS: dict[str, dict[str, Any]] = {
    "swap core attention": {"swap_config": {"swap": True}},
    "swap everything": EVERYTHING,
    "recompute whole layers": {"recompute_config": {"recompute": True}},
    "recompute norms, activation and rotary": {"recompute_config": {"select_recompute": CHEAP}},
    "swap attention, recompute mlp and norms": {
        "swap_config": {
            "swap": True,
            "op_swap": [{"op_name": "self_attention", "backward_prefetch": 2, "layers": True}],
        },
        "recompute_config": {"select_recompute": ["mlp", r".*norm"]},
    },
    "recompute whole layers, inputs swapped": {
        "swap_config": {"swap": True, "op_swap": [], "swap_recompute_inputs": True, "default_prefetch": 1},
        "recompute_config": {"recompute": True},
    },
}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
WITH_DROPOUT = ("swap everything", "recompute whole layers", "swap attention, recompute mlp and norms")


def activations(backend: Backend, shape: dict[str, int], findings: Findings) -> None:
    from gpt import start_one_rank

    start_one_rank(backend.type)
    _by_plans("", job_for(backend, shape), PLANS, findings)
    with_dropout = job_for(backend, shape, config=DROPOUT)
    _by_plans(", dropout", with_dropout, {name: PLANS[name] for name in WITH_DROPOUT}, findings)
    with findings.about("memory"):
        _short_of_memory(backend, job_for(backend, shape), findings)


def _by_plans(kind: str, job: Any, plans: dict[str, dict[str, Any]], findings: Findings) -> None:
    """Training of `job` under each plan, beside stock."""
    stock, again = (trained(job, STEPS)[0] for _ in range(2))
    if not findings.repeats(stock, again, kind):
        return
    for name, plan in plans.items():
        with findings.about(name + kind):
            mem.configure({**STOCK, "memory_config": _moving(plan)})
            did = {"swap_config": "bytes_out", "recompute_config": "recomputed_bytes"}
            findings.compare(name + kind, _followed(job, STEPS, *(did[part] for part in plan)), stock)


# ---- TransformerEngine
FUSED = {"gradient_accumulation_fusion": True, "bias_dropout_fusion": True}
FP8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
DELAYED = FP8 | {"fp8_recipe": "delayed", "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max"}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_grouped_gemm": True}
ATTENTION = {"op_name": "self_attention", "backward_prefetch": 2, "layers": True}
SWAPS = {name: PLANS[name] for name in ("swap core attention", "swap everything")}
ITS_PLANS: dict[str, dict[str, Any]] = {  # its norms are part of linears
    **SWAPS,
    "recompute whole layers": PLANS["recompute whole layers"],
    "recompute activation and rotary": {"recompute_config": {"select_recompute": CHEAP[1:]}},
    "swap attention, recompute mlp": {
        "swap_config": {"swap": True, "op_swap": [ATTENTION]},
        "recompute_config": {"select_recompute": ["mlp"]},
    },
    "recompute whole layers, inputs swapped": PLANS["recompute whole layers, inputs swapped"],
}
OF_EXPERTS = ITS_PLANS | {
    "recompute activation and rotary": {
        "recompute_config": {"select_recompute": [r"mlp\.experts\.activation_func", *CHEAP[2:]]}
    }
}


def transformer_engine(backend: Backend, shape: dict[str, int], findings: Findings) -> None:
    """Its layers; in fp8 swap alone, recompute being refused there."""
    from gpt import start_one_rank

    STOCK["sdpa_attention"] = False
    mem.configure(STOCK)
    start_one_rank(backend.type)
    job = functools.partial(job_for, backend, shape)
    layers = {"transformer_impl": "transformer_engine"}
    some = {name: ITS_PLANS[name] for name in ("swap everything", "recompute whole layers")}
    for kind, config, plans in (
        ("", FUSED, ITS_PLANS),
        (", dropout", DROPOUT, some),
        (", experts", FUSED | EXPERTS, OF_EXPERTS),
        (", fp8", FUSED | FP8, SWAPS),
        (", fp8, delayed scaling", FUSED | DELAYED, SWAPS),
    ):
        with findings.about(f"stock{kind}"):  # no kernel for one of them is no reason to leave out the others
            _by_plans(kind, job(config=layers | config), plans, findings)
    with findings.about("memory"):
        _short_of_memory(backend, job(config=layers | FUSED), findings)


def _moving(plan: dict[str, Any]) -> dict[str, Any]:
    swap = {"swap_config": plan["swap_config"] | {"smallest_bytes": MOVED}} if "swap_config" in plan else {}
    return plan | swap


def _followed(job: Any, steps: int, *did: str) -> Numbers:
    """Of training under the settings in force; `did`: the figures of the engine that say that they were."""
    mine, _ = trained(job, steps, until=_settled)
    figures = engines.current().report()
    mine.did = {name: getattr(figures, name) for name in did}
    return mine


def _short_of_memory(backend: Backend, job: Any, findings: Findings) -> None:
    """Survival and the adaptive run: under a limit that Megatron alone exceeds."""
    if backend.is_host:
        from capped import count_memory

        count_memory(backend)
    stock, (static, peak) = trained(job, MOST_STEPS, measured=True)
    for name, share, flag in (
        ("survive with 80 % of the memory", 0.8, "survive_oom"),
        ("survive with 60 % of the memory", 0.6, "survive_oom"),
        ("adaptive plan with 70 % of the memory", 0.7, "adaptive_memory_optimization"),
    ):
        with findings.about(name):
            gc.collect()
            backend.give_back()
            limit = (backend.allocated() or 0) + static + round(share * (peak - static))
            mem.configure({**STOCK, flag: True, "device_memory_gib": limit / 2**30})
            mine = _followed(job, STEPS if flag == "survive_oom" else MOST_STEPS, "bytes_out")
            if flag != "survive_oom":
                mine.did = {"settled after steps": len(mine.losses) if _settled() else 0}
            findings.compare(name, mine, stock)


def _settled() -> bool:
    """Whether there is an adaptive run, and it has ended with a plan."""
    return getattr(getattr(engines.current(), "adaptation", None), "state", "") == "settled"


# ---- chunks
def chunks(backend: Backend, shape: dict[str, int], findings: Findings) -> None:
    from gpt import start_one_rank

    from mindspeed_mem.zero.buffers.settings import ChunkSettings
    from mindspeed_mem.zero.core.placement import Placement

    start_one_rank(backend.type)
    if backend.is_host:
        backend.limit = lambda: 256 * 2**20  # the pack's buffers are small beside a device's memory
    elements = -(-(4 * shape["hidden"] + 3 * shape["ffn"]) // 4) * shape["hidden"]
    job = job_for(backend, shape, chunk_elements=elements)
    stock, again = (trained(job, STEPS, gradients=False)[0] for _ in range(2))
    if not findings.repeats(stock, again):
        return
    asked = {"min_chunk_size": elements, "search_range": 0, "hidden_size": shape["hidden"], "backend": backend}
    on_host: Numbers | None = None
    for stage in (1, 2, 3):
        for name, placement in {
            "device": Placement(),
            "host, its states swapped for the step": Placement("host"),
            "half on the host": Placement("static", None, 0.5),
            "auto": Placement("auto"),
        }.items():
            with findings.about(f"stage {stage}, {name}"):
                settings = ChunkSettings(stage=stage, placement=placement, **asked)
                mine, _ = trained(job, STEPS, gradients=False, chunks=settings)
                if "host" not in name:
                    mine.did.pop("host_bytes")
                if placement.policy != "device" and _one_norm_of_all():
                    _close(findings, f"stage {stage}, {name}", mine, None, stock)
                else:
                    findings.compare(f"stage {stage}, {name}", mine, stock)
        name = f"stage {stage}, host, stepped there"
        with findings.about(name):
            settings = ChunkSettings(stage=stage, placement=Placement("host"), step_on_host=True, **asked)
            mine, _ = trained(job, STEPS, gradients=False, chunks=settings)
            _close(findings, name, mine, on_host, stock)
            on_host = on_host or mine


def _one_norm_of_all() -> bool:
    """Whether Megatron takes the gradients' norm by a kernel that adds up over all of them at once (TransformerEngine
    and Apex have one): what is on the host cannot be part of that, and the norm is one of norms."""
    from megatron.core.optimizer import clip_grads

    return "local" not in getattr(clip_grads.l2_norm_impl, "__name__", "")


def _close(findings: Findings, name: str, mine: Numbers, before: Numbers | None, stock: Numbers) -> None:
    """Equal among each other; as close to stock as another order of additions, or Adam on another processor, can be."""
    pairs = [(a, b) for x, y in zip(mine.losses, stock.losses, strict=True) for a, b in zip(x, y, strict=True)]
    off = max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)
    wrong = [] if before is None else mine.differences(before)
    wrong += [f"{off:.1e} off stock"] if off > CLOSE else []
    findings.note(name, DIFFERS if wrong else EQUAL if not off else "close", differences=wrong, off=off)


# ---- plain modules
def gemini(backend: Backend, shape: dict[str, int], findings: Findings) -> None:
    import torch.distributed as dist

    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend.collectives, store=dist.HashStore(), rank=0, world_size=1)
    generator = torch.Generator().manual_seed(7)
    size = (STEPS, shape["micro_batch_size"], shape["seq_length"] + 1)
    batches = list(torch.randint(0, shape["vocab"], size, generator=generator).to(device_of(backend)))
    stock, again = (_plain(backend, shape, batches) for _ in range(2))
    if not findings.repeats(stock, again):
        return
    half = {"shard_param_frac": 1.0, "offload_optim_frac": 0.5, "offload_param_frac": 0.5}
    for name, options, on_host in (
        ("gemini, device", {"placement_policy": "device"}, False),
        ("gemini, host, swapped for the step", {"placement_policy": "host"}, False),
        ("gemini, half on the host", {"placement_policy": "static", **half}, False),
        ("gemini, host, stepped there", {"placement_policy": "host"}, True),
    ):
        with findings.about(name):
            mine = _in_chunks(backend, shape, batches, options, on_host)
            if on_host:
                _close(findings, name, mine, None, stock)
            else:
                findings.compare(name, mine, stock)


ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def _network(shape: dict[str, int]) -> torch.nn.Module:
    """Residual blocks of two matrices, between tied embeddings; on the host."""
    torch.manual_seed(5)
    hidden, vocab = shape["hidden"], shape["vocab"]

    class Block(torch.nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + super().forward(x)

    def block() -> Block:
        return Block(torch.nn.Linear(hidden, shape["ffn"]), torch.nn.GELU(), torch.nn.Linear(shape["ffn"], hidden))

    embedding, head = torch.nn.Embedding(vocab, hidden), torch.nn.Linear(hidden, vocab, bias=False)
    head.weight = embedding.weight
    return torch.nn.Sequential(embedding, *(block() for _ in range(shape["layers"])), head)


def _loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


def _plain(backend: Backend, shape: dict[str, int], batches: list[torch.Tensor]) -> Numbers:
    """Parameters in bf16, masters in fp32, all of it on the device."""
    model = _network(shape).to(device_of(backend))
    masters = {parameter: parameter.detach().clone() for parameter in model.parameters()}
    optimizer = torch.optim.AdamW(masters.values(), **ADAM, fused=backend.fuses_adam or None)
    model.bfloat16()
    found = Numbers()
    for batch in batches:
        model.zero_grad()
        loss = _loss(model, batch)
        loss.backward()
        for parameter, master in masters.items():
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for parameter, master in masters.items():
                parameter.copy_(master)
        found.losses.append([float(loss), 0.0])
    found.gradients.append([bits(parameter) for parameter in model.parameters()])
    return found


def _in_chunks(
    backend: Backend, shape: dict[str, int], batches: list[torch.Tensor], options: dict[str, Any], on_host: bool
) -> Numbers:
    from mindspeed_mem.gemini import GeminiAdamOptimizer, GeminiDDP

    small = {"search_range_mb": 0.001, "min_chunk_size_mb": shape["hidden"] ** 2 / 2**20, "hidden_dim": shape["hidden"]}
    model = GeminiDDP(_network(shape), device_of(backend), mixed_precision=torch.bfloat16, **small, **options)
    optimizer = GeminiAdamOptimizer(model, **ADAM, step_on_host=on_host)
    found = Numbers()
    for batch in batches:
        optimizer.zero_grad()
        loss = _loss(model, batch)
        optimizer.backward(loss)
        optimizer.step()
        found.losses.append([float(loss.detach()), 0.0])
    state = model.state_dict()
    names = [name for name, _ in model.named_parameters()]
    found.gradients.append([bits(state[name].bfloat16()) for name in names])
    return found


# ---- a pipeline
def pipeline(backend: Backend, shape: dict[str, int], findings: Findings) -> None:
    from chunk_zero import on_ranks

    devices = 2 if backend.is_host else int(str(backend.describe()["count"]))
    if devices < 2:
        findings.note("cap on micro-batches in flight", "not run", reason="it takes two devices")
        return
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "found.json"
        on_ranks(2, stage_of_two, backend.type, shape | {"layers": 4, "micro_batches": 4}, target)
        findings.rows |= json.loads(target.read_text())


def stage_of_two(rank: int, ranks: int, meeting: str, device: str, shape: dict[str, int], target: Path) -> None:
    """One of two pipeline stages: trained with a cap and without."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch.distributed as dist

    backend = get_backend(device)
    backend.use_device_of_rank()
    STOCK["device"] = device
    mem.configure(STOCK)
    if backend.is_host:
        torch.set_num_threads(1)
    dist.init_process_group(backend.collectives, init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    job = job_for(backend, shape, config={"pipeline_model_parallel_size": 2})
    findings = Findings()
    with reproducible(device):
        stock, again = (trained(job, STEPS)[0] for _ in range(2))
        if findings.repeats(stock, again):
            name = "cap on micro-batches in flight: 1"
            with findings.about(name):
                mem.configure({**STOCK, "max_inflight_microbatches": 1})
                findings.compare(name, trained(job, STEPS)[0], stock)
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, findings.rows)
    if rank == 0:
        rows = {f"rank {n}, {name}": row for n, found in enumerate(everyone) for name, row in found.items()}
        target.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


# ---- training
def job_for(backend: Backend, shape: dict[str, int], config: dict[str, Any] | None = None, **more: Any) -> Any:
    from sharded_gpt import Job
    from two_memories import TwoMemories

    memories = TwoMemories(backend)
    more = {"chunk_elements": 2**40, **more}
    return Job(backend=backend, device=device_of(backend), memories=memories, shape=shape, config=config or {}, **more)


def trained(
    job: Any,
    steps: int,
    *,
    gradients: bool = True,
    measured: bool = False,
    until: Callable[[], bool] = lambda: False,
    **how: Any,
) -> tuple[Numbers, tuple[int, int]]:
    """What a new model computes in so many steps, or until; if measured, bytes between its steps, and at their peak.

    ``how``: of `sharded_gpt.Megatron`. ``gradients``: they lie in Megatron's buffers.
    """
    from sharded_gpt import Megatron

    backend, found, static, peak = job.backend, Numbers(), 0, 0
    before = backend.allocated() or 0
    training = Megatron(job, overlap="chunks" in how, **how)
    with training.active():
        for number in range(steps):
            if measured and number == 1:  # the optimizer has its states
                gc.collect()
                static = backend.allocated() - before
                backend.reset_peak()
            found.losses.append(training.step())
            if measured and number == 1:
                backend.synchronize()
                peak = backend.peak() - before
            if gradients:
                found.gradients.append([bits(parameter.main_grad) for parameter in training.model.parameters()])
            if until():
                break
    if training.runtime is not None:
        figures = training.runtime.report()
        found.did = {"chunks": figures.chunks, "host_bytes": figures.host_bytes}
        if how["chunks"].stage == 1:
            del found.did["chunks"]  # Megatron's own buckets
    del training
    gc.collect()
    _freeze()
    return found, (static, peak)


_freeze = functools.cache(gc.freeze)
"""Once, when all is imported: afterwards a collection has little to look through."""


GROUPS = {
    "activations": activations,
    "transformer-engine": transformer_engine,
    "chunks": chunks,
    "gemini": gemini,
    "pipeline": pipeline,
}

if __name__ == "__main__":
    main()
