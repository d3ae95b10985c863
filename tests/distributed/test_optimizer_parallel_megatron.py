"""--optimizer-parallel on Megatron's optimizers: losses, norms, parameters, masters and checkpoints to the bit."""

from __future__ import annotations

import contextlib

import pytest
import torch

from tests.worlds import applied, on_ranks, parallel

pytestmark = pytest.mark.distributed

MODES = (None, "grouping", "sharding")
STEPS = 3
BF16 = {"dtype": torch.bfloat16}
FP16 = {"dtype": torch.float16, "fp16": True, "ddp": {"grad_reduce_in_fp32": False}}
OVERFLOWS = {
    "fp16": True,
    "initial_loss_scale": 2.0**17,
    "min_loss_scale": 1.0,
    "hysteresis": 1,
    "loss_scale_window": 2,
}


# A checkpoint's metadata as examples/gpt_checkpoint.py has it.
METADATA = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}


@contextlib.contextmanager
def optimizer_parallel(mode):
    from mindspeed_mem.features import Settings, put_into_force

    put_into_force(Settings(optimizer_parallel=mode))
    try:
        with applied(*["optimizer_parallel"] * (mode is not None)):
            yield
    finally:
        put_into_force(Settings())


def build(model, optimizer):
    from tests.models import build_gpt, build_optimizer

    chunks = build_gpt(**{"layers": 2, "hidden": 32, **model})
    return chunks, build_optimizer(chunks, **{"lr": 0.01, **optimizer})


def run(chunks, optimizer, steps):
    """Per step: the loss, whether the optimizer moved, the norm before clipping and the loss scale."""
    from tests.models import train_step

    found = []
    for step in steps:
        optimizer.zero_grad()
        loss = train_step(chunks, step=step, micro_batches=6, micro_batch_size=1).loss
        scale = float(optimizer.get_loss_scale())
        moved, norm, zeros = optimizer.step()
        found.append((loss, moved, norm, zeros, scale))
    return found


def values(chunks, optimizer):
    """All that training changes on this rank, by name: parameters, and the optimizer's state dict."""
    from tests.models import global_parameters

    found = {name: parameter.detach().clone() for name, parameter in global_parameters(chunks)}
    whole = optimizer.state_dict()

    def flatten(name, value):
        if isinstance(value, dict | list | tuple):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, one in items:
                flatten(f"{name}.{key}", one)
        else:
            found[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value

    flatten("optimizer", whole)
    return found


def differences(one, other):
    """Names of what is not equal to the bit."""
    wrong = sorted(one.keys() ^ other.keys())
    for name in one.keys() & other.keys():
        a, b = one[name], other[name]
        same = torch.equal(a.cpu(), b.cpu()) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b
        wrong += [] if same else [name]
    return wrong


def held_bytes(optimizer):
    """Of states and masters on this rank: tensors with their storage."""
    total = 0
    for one in optimizer.chained_optimizers:
        storages = {}
        for state in one.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        for group in getattr(one, "fp32_from_float16_groups", ()):
            for master in group:
                storages[master.untyped_storage().data_ptr()] = master.untyped_storage().nbytes()
        for part in getattr(one.optimizer, "parts", ()):
            if part.has_master and part.piece is not None:
                storages[part.piece.untyped_storage().data_ptr()] = part.piece.untyped_storage().nbytes()
        total += sum(storages.values())
    return total


def compared(layout, model, optimizer):
    """Each mode's history and differences to Megatron without it, and the bytes of states and masters of this rank."""
    found, reference = [], None
    for mode in MODES:
        with optimizer_parallel(mode), parallel(**layout):
            chunks, made = build(model, optimizer)
            history = run(chunks, made, range(STEPS))
            state = values(chunks, made)
            held = held_bytes(made)
            made.reload_model_params()  # as after a checkpoint of the model alone
            history += run(chunks, made, [STEPS])
            state |= {f"{name} at the end": value for name, value in values(chunks, made).items()}
            del chunks, made
        reference = reference or (history, state)
        found.append((history, differences(reference[1], state), held))
    return found


@pytest.mark.parametrize(
    ("size", "layout", "model", "optimizer"),
    [
        pytest.param(2, {}, {}, {"log_num_zeros_in_grad": True}, id="fp32-dp2"),
        pytest.param(3, {}, BF16, {"log_num_zeros_in_grad": True}, id="bf16-dp3"),
        pytest.param(3, {}, BF16, {"optimizer": "sgd"}, id="sgd-dp3"),
        pytest.param(2, {}, FP16, OVERFLOWS, id="fp16-dp2"),
        pytest.param(4, {"tp": 2}, BF16, {}, id="tp2-dp2"),
        pytest.param(4, {"ep": 2}, BF16 | {"kind": "moe"}, {}, id="moe-ep2-dp4"),
    ],
)
def test_megatron_trains_to_the_same_bits(size, layout, model, optimizer):
    ranks = on_ranks(size, compared, layout, model, optimizer)
    for plain, *others in ranks:
        moved = [step[1] for step in plain[0]]
        assert set(moved) == ({True, False} if optimizer is OVERFLOWS else {True})
        assert len({step[0] for step in plain[0]}) == len(plain[0])
        for history, wrong, _ in others:
            assert history == plain[0] and wrong == []
    share = size // layout.get("tp", 1)
    for mode in (1, 2):
        held, full = [sum(rank[number][2] for rank in ranks) for number in (mode, 0)]
        if "kind" not in model:  # whose experts have other ranks to share with
            assert full / share <= held <= full / share * 1.05, (mode, held, full)
        assert max(rank[mode][2] for rank in ranks) < 0.9 * ranks[0][0][2]


def state_for(chunks, optimizer, is_loading):
    from megatron.core import parallel_state

    metadata = {**METADATA, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = {"model": chunks[0].module.sharded_state_dict(metadata=metadata)}
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
    return state


def saved(folders, layout, model):
    """Train and save as each mode does, in a folder of its own; returns what the next step gives."""
    from megatron.core import dist_checkpointing

    found = []
    for mode, folder in folders.items():
        with optimizer_parallel(mode), parallel(**layout):
            chunks, optimizer = build(model, {})
            run(chunks, optimizer, range(2))
            dist_checkpointing.save(state_for(chunks, optimizer, False), folder)
            found.append(run(chunks, optimizer, [2]))
            found.append(values(chunks, optimizer))
    return found


def loaded(folders, layout, model):
    """The next step after each mode has loaded the folder of the mode after it; the last one that of the first."""
    from megatron.core import dist_checkpointing

    found = []
    for mode, folder in zip(MODES, folders[1:] + folders[:1], strict=True):
        with optimizer_parallel(mode), parallel(**layout):
            chunks, optimizer = build(model, {})
            state = dist_checkpointing.load(state_for(chunks, optimizer, True), folder)
            chunks[0].module.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            found += [run(chunks, optimizer, [2]), values(chunks, optimizer)]
    return found


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(BF16, {}, id="bf16"),
        pytest.param({"kind": "moe"}, {"ep": 2}, id="fp32-moe", marks=pytest.mark.sweep),
    ],
)
def test_checkpoints_are_megatrons(model, layout, tmp_path):
    """Saved with and without, loaded with and without, at the same and at other numbers of data-parallel ranks."""
    folders = {mode: str(tmp_path / str(mode)) for mode in MODES}
    for folder in folders.values():
        (tmp_path / folder).mkdir()
    before = on_ranks(2, saved, folders, layout, model)
    for size in (2, 3) if not layout else (4,):
        for rank, results in enumerate(on_ranks(size, loaded, list(folders.values()), layout, model)):
            histories, states = results[::2], results[1::2]
            assert all(history == histories[0] for history in histories)
            assert [differences(states[0], state) for state in states] == [[]] * len(states)
            if size == 2:
                assert histories[0] == before[rank][0] and differences(states[0], before[rank][1]) == []


def squares(mode):
    """What Megatron-LM's --log-params-norm sums: of whole masters, and of those that it is told are parts."""
    with optimizer_parallel(mode), parallel():
        chunks, optimizer = build(BF16, {})
        run(chunks, optimizer, [0])
        found = {False: 0.0, True: 0.0}
        for parameter in chunks[0].parameters():
            if parameter.main_param is not None:
                is_part = getattr(parameter, "main_param_sharded", False)
                found[is_part] += float(parameter.main_param.double().square().sum())
    return found


def test_the_norm_of_parameters_is_that_of_the_masters():
    """It had been 0: what stands in the place of a whole master has no values."""
    whole = on_ranks(2, squares, None)[0][False]
    for mode in MODES[1:]:
        ranks = on_ranks(2, squares, mode)
        assert [rank[False] for rank in ranks] == [0.0, 0.0]
        assert sum(rank[True] for rank in ranks) == pytest.approx(whole, rel=1e-12) and whole > 1


def alone():
    with optimizer_parallel("grouping"), parallel():
        chunks, optimizer = build({}, {})
        return type(optimizer.chained_optimizers[0].optimizer).__name__, run(chunks, optimizer, [0])[0][1]


def test_one_rank_keeps_its_own_optimizer():
    assert on_ranks(1, alone) == [("AdamW", True)]


class Odd(torch.optim.SGD):
    """As of a library that nobody here has heard of."""

    def step(self, closure=None):
        return super().step(closure)


def refusal():
    import megatron.core.optimizer as theirs

    from mindspeed_mem.features import FeatureError

    own, theirs.SGD = theirs.SGD, Odd
    try:
        with parallel(), optimizer_parallel("sharding"), pytest.raises(FeatureError) as caught:
            build({}, {"optimizer": "sgd"})
    finally:
        theirs.SGD = own
    return list(caught.value.problems)


def test_an_unknown_optimizer_is_refused_with_what_to_do():
    for [problem] in on_ranks(2, refusal):
        assert problem.startswith(
            "--optimizer-parallel sharding cannot be combined with --optimizer sgd, whose Odd is "
        )
        assert problem.endswith("Leave one of them out")
