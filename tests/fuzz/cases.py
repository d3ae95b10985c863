"""Random training runs: a model with users' code in its layers, a memory plan, and what a training loop does with it.

`differences(case)` trains twice from the same start, without and with the plan, and tells what is not equal bit for bit
or was left over. Import this where the CPU patches are applied (see `tests.worlds`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from tests import models, swap_runs
from tests.fuzz import user_code
from tests.fuzz.user_code import PIECES
from tests.worlds import parallel

LAYERS = 3
_DENSE = """input_layernorm self_attention self_attention.linear_qkv self_attention.core_attention
self_attention.linear_proj self_attn_bda pre_mlp_layernorm mlp mlp.linear_fc1 mlp.linear_fc2 mlp.activation_func
mlp_bda .*norm mlp\\..* .*""".split()
_LATENT = [name for name in _DENSE if "qkv" not in name] + ["self_attention.linear_kv_up_proj"]
_EXPERTS = [name for name in _DENSE if not name.startswith("mlp.")] + ["mlp.router", "mlp.experts", "mlp\\.experts.*"]
OPERATORS = {"dense": _DENSE, "dropout": _DENSE, "swiglu_gqa_rope": _DENSE, "mla": _LATENT, "moe": _EXPERTS}
PLACES = ("layer", "attention", "mlp")


class Interrupted(RuntimeError):
    """What a step fails with."""


@dataclass(frozen=True)
class Step:
    """One thing that the training loop does.

    kind: "schedule" (Megatron's, then the optimizer's step), "in flight" (all forwards, then backwards in `order`),
    "evaluation", "abandoned" (a forward whose graph is dropped), "twice" (backward with retain_graph, then again),
    "switched" (forward in evaluation mode, backward in training mode), "fails in forward", "fails in backward".
    """

    kind: str
    micro_batches: int = 2
    order: tuple[int, ...] = (1, 0)


@dataclass(frozen=True)
class Case:
    model: dict[str, Any]
    plan: dict[str, Any]
    sdpa: bool = True
    layout: dict[str, Any] = field(default_factory=dict)
    code: tuple[tuple[int, str, bool, str], ...] = ()  # layer, where, before it or after, which piece
    hooks: tuple[tuple[str, str], ...] = ()  # which hook, on modules of this name
    frozen: tuple[str, ...] = ()
    steps: tuple[Step, ...] = (Step("schedule"), Step("schedule"))


# ---- drawing
@st.composite
def cases(draw: Any, pipeline: bool = False) -> Case:
    kind = draw(st.sampled_from(models.KINDS))
    layers = LAYERS + 1 if pipeline else draw(st.integers(1, LAYERS))
    layout = draw(st.sampled_from([{"pp": 2}, {"pp": 2, "vpp": 2}, {"tp": 2}])) if pipeline else {}
    steps = [Step("schedule", draw(st.sampled_from((2, 4))))] * 2 if pipeline else draw(st.lists(_steps(), max_size=2))
    return Case(
        model={
            "kind": kind,
            "layers": layers,
            "hidden": 32,
            "heads": draw(st.sampled_from((2, 4))) if kind != "swiglu_gqa_rope" else 4,
            "dtype": draw(st.sampled_from((torch.float32, torch.bfloat16))),
            "tied": draw(st.booleans()),
            "hidden_dropout": draw(st.sampled_from((0.0, 0.1))),
            **({"attention_dropout": 0.1} if draw(st.booleans()) else {}),
            "sequence_parallel": "tp" in layout and (kind == "moe" or draw(st.booleans())),
            **({"gradient_accumulation_fusion": False, "add_bias_linear": False} if draw(st.booleans()) else {}),
        },
        plan=draw(_plans(OPERATORS[kind], layers)),
        sdpa=kind == "mla" or draw(st.booleans()),
        layout=layout,
        code=tuple(draw(st.lists(_code(layers), max_size=3))),
        hooks=tuple(draw(st.lists(st.tuples(st.sampled_from(sorted(HOOKS)), st.sampled_from(_HOOKED)), max_size=2))),
        frozen=tuple(draw(st.lists(st.sampled_from(_FROZEN), max_size=1))),
        steps=(*steps, Step("schedule")),
    )


def _code(layers: int) -> st.SearchStrategy:
    where = st.sampled_from(PLACES)
    return st.tuples(st.integers(0, layers - 1), where, st.booleans(), st.sampled_from(sorted(PIECES)))


@st.composite
def _steps(draw: Any) -> Step:
    kind = draw(
        st.sampled_from(
            ["schedule", "in flight", "evaluation", "abandoned", "twice", "switched"]
            + ["fails in forward", "fails in backward"]
        )
    )
    count = draw(st.integers(1, 3))
    return Step(kind, count, tuple(draw(st.permutations(range(count)))))


@st.composite
def _plans(draw: Any, operators: list[str], layers: int) -> dict[str, Any]:
    which = st.one_of(st.just(True), st.lists(st.integers(0, layers - 1), min_size=1, unique=True).map(sorted))
    names = st.sampled_from(operators).map(lambda name: name if "*" in name else name.replace(".", r"\."))
    far = st.just(draw(st.sampled_from((1, 2, 3, 5, 40))))  # one for all: different ones for an operator are refused
    held = st.sampled_from(("produced", "saved", "both"))
    entries = st.builds(swap_runs.op, names, far, which, activations=held)
    swap = draw(st.booleans())
    section: dict[str, Any] = {"swap": swap}
    if swap:
        if draw(st.booleans()):
            section["op_swap"] = draw(st.lists(entries, max_size=4))
        if "op_swap" not in section or draw(st.booleans()):
            section["layer_swap"] = [{"backward_prefetch": draw(far), "layers": draw(which)}]
        section["swap_recompute_inputs"] = draw(st.booleans())
    again: dict[str, Any] = {}
    if not swap or draw(st.booleans()):
        # layers and counts: lists only beside swap, as MindFormers reads them
        layers_again = which if swap else st.just(True)
        if draw(st.booleans()):
            again["recompute"] = draw(layers_again)
        if not again or draw(st.booleans()):
            again["select_recompute"] = draw(st.dictionaries(names, layers_again, min_size=1, max_size=3))
    return {"swap_config": section, **({"recompute_config": again} if again else {})}


# ---- hooks of users
_FROZEN = ("layernorm", "linear_fc1", "embedding", "layers.0.")
_HOOKED = ("linear_fc2", "mlp", "self_attention", "input_layernorm", "layers.0")


def _scaled(value: Any, factor: float) -> Any:
    if isinstance(value, tuple) and value:
        return (_scaled(value[0], factor), *value[1:])
    return value * factor if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _scale_in_place(module: Any, args: Any, output: Any) -> None:
    first = output[0] if isinstance(output, tuple) else output
    if isinstance(first, torch.Tensor) and first.grad_fn is not None and first._base is None:
        first.mul_(1.01)


def _scale_gradient(module: Any, args: Any, output: Any) -> None:
    first = output[0] if isinstance(output, tuple) else output
    if isinstance(first, torch.Tensor) and first.requires_grad:
        first.register_hook(lambda gradient: gradient * 1.02)


HOOKS = {
    "looks at the output": lambda module: module.register_forward_hook(lambda m, args, output: None),
    "changes the output": lambda module: module.register_forward_hook(lambda m, args, output: _scaled(output, 1.01)),
    "writes the output": lambda module: module.register_forward_hook(_scale_in_place),
    "hooks the output's gradient": lambda module: module.register_forward_hook(_scale_gradient),
    "changes the input": lambda module: module.register_forward_pre_hook(lambda m, args: _scaled(args, 1.0) or None),
    "changes the gradient": lambda module: module.register_full_backward_hook(
        lambda m, of_input, of_output: tuple(_scaled(one, 1.01) for one in of_input)
    ),
    "changes the incoming gradient": lambda module: module.register_full_backward_pre_hook(
        lambda m, of_output: tuple(_scaled(one, 1.01) for one in of_output)
    ),
}


# ---- models
class _Around:
    """A module with users' code before and after it; `fails` makes its next forward or backward raise."""

    pieces: dict[bool, list[str]]
    fails = ""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        pieces = self.__dict__.get("pieces", {})
        for name in pieces.get(True, ()):
            hidden_states = PIECES[name](hidden_states)
        output, other = super().forward(hidden_states, *args, **kwargs)
        for name in pieces.get(False, ()):
            output = PIECES[name](output)
        if self.fails == "fails in forward" and torch._C._current_graph_task_id() == -1:
            raise Interrupted
        if self.fails == "fails in backward" and output.requires_grad:
            output.register_hook(functools.partial(_interrupt, self))
        return output, other


def _interrupt(module: Any, gradient: torch.Tensor) -> None:
    if module.fails:
        raise Interrupted


@functools.cache
def _with_code(kind: type) -> type:
    return type(f"User{kind.__name__}", (_Around, kind), {})


def _change(spec: Any) -> None:
    """Let layer, attention and MLP run users' code."""
    spec.module = _with_code(spec.module)
    inside = spec.submodules
    inside.self_attention.module = _with_code(inside.self_attention.module)
    if isinstance(inside.mlp, functools.partial):  # from 0.19 on, of a class or of one of its methods
        of = inside.mlp.func
        of = _with_code(of) if isinstance(of, type) else getattr(_with_code(of.__self__), of.__name__)
        inside.mlp = functools.partial(of, *inside.mlp.args, **inside.mlp.keywords)
    else:
        inside.mlp.module = _with_code(inside.mlp.module)


def _layers(chunks: list[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "layer_number") and hasattr(module, "mlp_bda"):
                yield module


def _build(case: Case) -> list[torch.nn.Module]:
    chunks = models.build_gpt(**case.model, change_spec=_change)
    layers = {layer.layer_number - 1: layer for layer in _layers(chunks)}
    for number, where, before, name in case.code:
        if number in layers:
            layer = layers[number]
            module = {"layer": layer, "attention": layer.self_attention, "mlp": layer.mlp}[where]
            module.__dict__.setdefault("pieces", {}).setdefault(before, []).append(name)
    for chunk in chunks:
        for name, module in list(chunk.named_modules()):
            for which, part in case.hooks:
                if name.endswith(part):
                    HOOKS[which](module)
        for name, parameter in chunk.named_parameters():
            if any(part in name for part in case.frozen):
                parameter.requires_grad_(False)
    return chunks


# ---- training
def _forward(chunks: list[torch.nn.Module], number: int) -> torch.Tensor:
    (text,) = models._texts(range(number, number + 1), 2)
    positions = torch.arange(models.SEQUENCE, device=models.DEVICE).unsqueeze(0).expand(2, -1)
    return chunks[0](text[:, :-1].contiguous(), positions, None, labels=text[:, 1:].contiguous()).float().mean()


def _take(step: Step, number: int, chunks: list[torch.nn.Module], optimizer: Any) -> list[torch.Tensor]:
    """Take one step; returns its losses."""
    if step.kind in ("schedule", "evaluation"):
        run = functools.partial(models.train_step, chunks, micro_batches=step.micro_batches, step=number)
        if step.kind == "evaluation":
            return run(forward_only=True).losses
        return run(optimizer=optimizer).losses
    for chunk in chunks:
        chunk.zero_grad_buffer()
    first = 10 * number
    if step.kind == "in flight":
        losses = [_forward(chunks, first + one) for one in range(step.micro_batches)]
        for one in step.order:
            losses[one].backward()
    elif step.kind == "abandoned":
        losses = [_forward(chunks, first).detach()]
    elif step.kind == "twice":
        losses = [_forward(chunks, first)]
        losses[0].backward(retain_graph=True)
        losses[0].backward()
    elif step.kind == "switched":
        for chunk in chunks:
            chunk.eval()
        losses = [_forward(chunks, first)]
        for chunk in chunks:
            chunk.train()
        losses[0].backward()
    else:
        losses = _fail(step, number, chunks)
    return [loss.detach().clone() for loss in losses]


def _fail(step: Step, number: int, chunks: list[torch.nn.Module]) -> list[torch.Tensor]:
    target = next(_layers(chunks)).mlp
    target.fails = step.kind
    try:
        models.train_step(chunks, micro_batches=step.micro_batches, step=number)
    except Interrupted:
        pass
    finally:
        target.fails = ""
    return []


def _state(chunks: list[torch.nn.Module]) -> dict[str, torch.Tensor]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from tests.models import expert_losses

    found = {"torch's generator": torch.get_rng_state(), "users' own": user_code.own()}
    if models.DEVICE != "cpu":
        found["the device's generator"] = torch.get_device_module(models.DEVICE).get_rng_state()
    found |= {f"generator {name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    found |= {name: (one if isinstance(one, dict) else vars(one))["values"] for name, one in expert_losses().items()}
    for index, chunk in enumerate(chunks):
        found |= {f"{index}.{name}": one for name, one in torch.nn.Module.named_buffers(chunk)}
        found |= {f"{index}.{name}": one for name, one in chunk.named_parameters()}
        found |= {
            f"gradient of {index}.{name}": one.main_grad
            for name, one in chunk.named_parameters()
            if getattr(one, "main_grad", None) is not None
        }
    return {name: one.detach().clone() for name, one in found.items()}


def _trained(case: Case, engine: Any = None) -> tuple[list[dict[str, torch.Tensor]], list[str]]:
    """The state after each step, and what was left over."""
    states, left = [], []
    user_code.start_again()
    with parallel(**case.layout):
        chunks = _build(case)
        optimizer = models.build_optimizer(chunks)
        as_built = [dict(one) for one in _dispatchers(chunks)]
        try:
            for number, step in enumerate(case.steps):
                losses = _take(step, number, chunks, optimizer)
                states.append(_state(chunks) | {f"loss {i}": loss for i, loss in enumerate(losses)})
                for attributes, before in zip(_dispatchers(chunks), as_built, strict=True):
                    attributes.clear()
                    attributes.update(before)
                if engine is not None and any((over := swap_runs.left_over(engine)).values()):
                    left.append(f"left over after step {number} ({step.kind}): {over}")
        finally:
            models.forget_routing(chunks)
            _forget_tables()
    return states, left


def _dispatchers(chunks: list[torch.nn.Module]) -> list[dict[str, Any]]:
    """The attributes of experts' token dispatchers, which keep tensors of the last micro-batch, also without us."""
    found = [getattr(module, "token_dispatcher", None) for chunk in chunks for module in chunk.modules()]
    return [vars(one) for one in found if one is not None]


def _forget_tables() -> None:
    """Megatron keeps the tables of rotary embeddings that layers of latent attention make."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    RotaryEmbedding.forward.cache_clear()


def differences(case: Case) -> list[str]:
    """What differs in any bit between training without and with the plan, and what was left over after a step.

    Where plain training raises (users' code that autograd refuses), training with the plan must raise as well.
    """
    with swap_runs.patched(swap_runs.SDPA) if case.sdpa else contextlib.nullcontext():
        try:
            plain, _ = _trained(case)
            refused = None
        except RuntimeError as error:
            refused = str(error)
        gc.collect()
        try:
            with swap_runs.swap(case.plan) as engine:
                states, found = _trained(case, engine)
        except RuntimeError:
            if refused is None:
                raise
            return []
    if refused is not None:
        return [f"plain training raises {refused!r}, with the plan it does not"]
    for number, (one, other) in enumerate(zip(states, plain, strict=True)):
        step = f"step {number} ({case.steps[number].kind})"
        if one.keys() != other.keys():
            found.append(f"{step}: {sorted(one.keys() ^ other.keys())}")
        names = [name for name in one if not _equal(one[name], other.get(name))]
        found += [f"{step}: {len(names)} differ: {', '.join(names[:5])}"] if names else []
    return found


def _equal(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Bit for bit, NaN included."""
    if other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
