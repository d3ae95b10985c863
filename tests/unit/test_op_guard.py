"""The guard around single operators: memory runs out inside, room is made, and nothing is done twice."""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_mem.device import get_backend
from mindspeed_mem.device.cuda import CudaBackend
from mindspeed_mem.device.op_guard import OpGuard
from mindspeed_mem.device.op_rules import Rule, rule_of, why_not
from tests.guarding import GaveUp, N, Sandbag, guarded, limited_memory, numbers

aten = torch.ops.aten


@pytest.fixture
def memory():
    with limited_memory() as memory:
        yield memory


OPERATORS = {
    "new": lambda: numbers(64, 64) @ numbers(64, 64, seed=1),
    "several allocations": lambda: torch.linalg.svd(numbers(64, 64)),
    "views and copies": lambda: numbers(64, 64).t().contiguous() + 1,
    "backward": lambda: _gradient(),
    "in place": lambda: numbers(N).add_(numbers(N, seed=1, dtype=torch.float64)),
    "index_add_": lambda: numbers(64, 64).index_add_(0, torch.arange(64).flip(0), numbers(64, 64, seed=1)),
    "index_put_": lambda: numbers(N).index_put_((torch.arange(N) % 100,), numbers(N, seed=1), accumulate=True),
    "addmm_": lambda: numbers(64, 64).addmm_(numbers(64, 64, seed=1), numbers(64, 64, seed=2)),
    "out": lambda: torch.linalg.qr(numbers(64, 64), out=(torch.zeros(64, 64), torch.zeros(64, 64))),
    "lists": lambda: _lists(),
    "dropout": lambda: torch.nn.functional.dropout(numbers(N), 0.5),
    "native_dropout": lambda: torch.native_dropout(numbers(N), 0.5, True),
    "rand": lambda: torch.rand(N),
    "normal_": lambda: numbers(N).normal_(),
    "its own generator": lambda: torch.rand(N, generator=torch.Generator().manual_seed(7)),
    "randperm": lambda: torch.randperm(N),
}


def _gradient():
    leaf = numbers(64, 64).requires_grad_()
    (torch.tanh(leaf @ leaf).softmax(-1) ** 2).sum().backward()
    return leaf.grad


def _lists():
    targets = [numbers(N), numbers(N, seed=1), numbers(N, seed=2)]
    torch._foreach_add_(targets, [numbers(N, seed=3), numbers(N, seed=4, dtype=torch.float64), numbers(N, seed=5)])
    torch._foreach_addcdiv_(targets, [numbers(N, seed=6)] * 3, [numbers(N, seed=7)] * 3, [1.0, 2.0, 3.0])
    return targets


def tensors(result):
    return [result] if isinstance(result, torch.Tensor) else list(result)


@pytest.mark.parametrize("name", OPERATORS)
def test_wherever_memory_runs_out_the_result_is_the_same(memory, name):
    run = OPERATORS[name]
    torch.manual_seed(5)
    expected = [tensor.numpy().copy() for tensor in map(torch.Tensor.detach, tensors(run()))]
    after = torch.get_rng_state()
    retries = 0
    for room in range(0, 24 * N, N // 2 + 64):
        torch.manual_seed(5)
        sandbag = Sandbag(memory)
        guard = guarded(sandbag)
        memory.limit = memory.allocated + room
        try:
            with guard:
                result = run()
        finally:
            memory.limit = None
        for one, other in zip(tensors(result), expected, strict=True):
            assert one.detach().numpy().tobytes() == other.tobytes(), f"{room} bytes of room"
        assert torch.equal(torch.get_rng_state(), after), f"{room} bytes of room: the random state"
        retries += guard.retries
        del result, sandbag, guard
    assert retries


def test_without_the_guard_a_list_would_be_changed_in_part(memory):
    """What the rule for lists is there for."""
    targets = [numbers(N), numbers(N, seed=1)]
    before = [target.clone() for target in targets]
    others = [numbers(N, seed=2), numbers(N, seed=3, dtype=torch.float64)]
    memory.limit = memory.allocated + 100
    with pytest.raises(torch.OutOfMemoryError):
        torch._foreach_add_(targets, others)
    memory.limit = None
    assert [torch.equal(*pair) for pair in zip(targets, before, strict=True)] == [False, True]


def test_what_the_operator_works_on_is_pinned(memory):
    sandbag, one, other = Sandbag(memory), numbers(64, 64), numbers(64, 64, seed=1)
    memory.limit = memory.allocated
    with guarded(sandbag):
        one @ other
    memory.limit = None
    assert sandbag.asked == [64 * 64 * 4]
    assert {one.untyped_storage()._cdata, other.untyped_storage()._cdata} <= sandbag.pinned[0]


def test_each_time_more_is_asked_for(memory):
    """Free memory in pieces is of no use to a request that needs it in one."""
    sandbag = Sandbag(memory)

    def in_vain(nbytes, pinned):
        sandbag.asked.append(nbytes)
        return 1 if len(sandbag.asked) < 5 else sandbag.make_room(1 << 20, pinned)

    memory.limit = memory.allocated
    with OpGuard(get_backend("cpu"), in_vain, None):
        torch.empty(1000, dtype=torch.uint8)
    memory.limit = None
    assert sandbag.asked[:5] == [1000, 2000, 4000, 8000, 16000]


def test_when_nothing_is_left_the_error_says_so_and_holds_nothing(memory):
    one = numbers(64, 64)
    memory.limit = memory.allocated + 100
    with pytest.raises(GaveUp, match="aten.mm.default: 16384: $") as caught, guarded(Sandbag(memory, pieces=0)):
        one @ one
    memory.limit = None
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert torch.equal(one @ one, one.clone() @ one)


def test_errors_of_other_kinds_pass(memory):
    sandbag = Sandbag(memory)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), guarded(sandbag):
        numbers(3, 4) @ numbers(3, 4)
    assert not sandbag.asked


def test_a_request_that_is_not_urgent_fails_as_it_is(memory):
    memory.limit = memory.allocated
    with pytest.raises(torch.OutOfMemoryError) as caught, OpGuard(get_backend("cpu"), lambda *_: None, None):
        torch.empty(1000)
    memory.limit = None
    assert type(caught.value) is torch.OutOfMemoryError


def half_done(target: torch.Tensor) -> None:
    target.add_(1)
    torch.empty(target.numel())


def test_what_may_have_been_done_in_part_is_not_repeated(memory):
    with torch.library._scoped_library("mindspeed_mem_tests", "DEF") as library:
        library.define("half_done(Tensor(a!) x) -> ()")
        library.impl("half_done", half_done, "CPU")
        target, sandbag = torch.zeros(N), Sandbag(memory)
        images, statistics = numbers(8, 512), (torch.zeros(512), torch.ones(512))
        memory.limit = memory.allocated + 100
        with pytest.raises(GaveUp, match="may communicate"), guarded(sandbag):
            torch.ops.mindspeed_mem_tests.half_done(target)
        with pytest.raises(GaveUp, match="perhaps in part already"), guarded(sandbag):
            aten.native_batch_norm(images, None, None, *statistics, True, 0.1, 1e-5)
        memory.limit = None
        assert not sandbag.asked


class _Distributed(torch.Tensor):
    """As torch's DTensor: its operators may communicate inside."""

    __module__ = "torch.distributed.tensor"

    @staticmethod
    def __new__(cls, inner):
        outer = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        outer.inner = inner
        return outer

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        return op(*(arg.inner for arg in args))


def test_what_may_have_communicated_is_not_repeated(memory):
    tensor, sandbag = _Distributed(numbers(64, 64)), Sandbag(memory)
    memory.limit = memory.allocated + 100
    with pytest.raises(GaveUp, match="works on distributed tensors"), guarded(sandbag):
        torch.mm(tensor, tensor)
    memory.limit = None
    assert not sandbag.asked


def test_rules():
    assert rule_of(aten.mm.default) is Rule.AGAIN
    assert rule_of(aten.mul_.Tensor) is Rule.AGAIN
    assert rule_of(aten.copy_.default) is Rule.AGAIN
    assert rule_of(aten.native_dropout.default) is Rule.AGAIN
    assert rule_of(aten._foreach_add.List) is Rule.AGAIN
    assert rule_of(aten._foreach_add_.List) is Rule.APART
    assert rule_of(aten._fused_adamw_.default) is Rule.APART
    assert rule_of(aten._amp_foreach_non_finite_check_and_unscale_.default) is Rule.APART
    assert rule_of(aten.mm.out) is Rule.OVERWRITES
    assert rule_of(aten.rrelu_with_noise_.default) is Rule.UNSURE
    assert rule_of(torch.ops.c10d.allreduce_.default) is Rule.COLLECTIVE


def test_an_output_that_is_also_read_is_not_written_twice(memory):
    one, sandbag = numbers(64, 64), Sandbag(memory)
    memory.limit = memory.allocated
    with pytest.raises(GaveUp, match="changes its arguments"), guarded(sandbag):
        torch.linalg.qr(one, out=(torch.empty(0), one))
    memory.limit = None


def test_an_output_that_was_to_grow_is_left_alone(memory):
    """It has its new size but not the memory: a second run would write beyond its end."""
    one, out, sandbag = numbers(N), torch.empty(0), Sandbag(memory)
    memory.limit = memory.allocated
    with pytest.raises(GaveUp, match="changes its arguments"), guarded(sandbag):
        torch.cumsum(one, 0, out=out)
    memory.limit = None


def test_compiled_functions_stay_compiled_inside():
    assert OpGuard.ignore_compile_internals()


class FullDriver(TorchDispatchMode):
    """Products fail as where cuBLAS finds no memory at the driver, until torch's allocator has given some back."""

    def __init__(self):
        super().__init__()
        self.kept, self.free, self.failed = 3, 0, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op in (aten.mm.default, aten.addmm_.default) and not self.free:
            self.failed += 1
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        return op(*args, **kwargs or {})


class OnDriver(CudaBackend):
    """A GPU whose products need the driver; its tensors are the host's."""

    def __init__(self, driver):
        super().__init__()
        self._driver = driver

    def room(self):
        return None

    def rng_state(self, index=None):
        return torch.get_rng_state()

    def set_rng_state(self, state, index=None):
        torch.set_rng_state(state)

    def give_back(self):
        given, self._driver.kept = self._driver.kept, 0
        self._driver.free += given
        return given


def test_where_a_library_finds_no_memory_at_the_driver_the_allocator_gives_back_what_it_keeps():
    driver, asked = FullDriver(), []
    guard = OpGuard(OnDriver(driver), lambda nbytes, _: asked.append(nbytes) or 0, lambda *why: GaveUp(str(why)))
    one = numbers(8, 8)
    expected = one @ one
    with driver, guard:
        assert torch.equal(one @ one, expected)
    assert (driver.failed, len(asked), guard.retries, guard.lacks) == (1, 1, 1, 1)
    driver.free, driver.kept = 0, 3
    with driver, guard, pytest.raises(GaveUp, match="changes its arguments"):
        one.addmm_(one, one)  # it may have begun to
    assert driver.kept == 3
    driver.kept = 0  # nothing can leave, either
    with driver, guard, pytest.raises(GaveUp) as caught:
        one @ one
    assert "CUBLAS_STATUS_ALLOC_FAILED" in str(caught.value.__cause__) and driver.failed == 3


def test_what_may_add_twice_does_not_run_again():
    for op in (aten.scatter_reduce_.two, aten.index_reduce_.default, aten.addbmm_.default):
        assert rule_of(op) is Rule.UNSURE, op


class Kernel:
    """Imitates an operator of a GPU's: what it lacks is refused once, after it has run."""

    def __init__(self, name, function, error):
        self.calls, self._name, self._function, self._errors = 0, name, function, [error]

    def __enter__(self):
        self._scope = torch.library._scoped_library("aten", "IMPL")
        self._scope.__enter__().impl(self._name, self._call, "CPU")
        return self

    def __exit__(self, *error):
        self._scope.__exit__(*error)

    def _call(self, *args, **kwargs):
        self.calls += 1
        result = self._function(*args, **kwargs)
        if self._errors:
            raise self._errors.pop()
        return result


REFUSED = "CUDA out of memory. Tried to allocate 2.00 MiB."
X = torch.ones(2)
CELLS = ["_cudnn_rnn", "miopen_rnn"]


def of_cell(op, **values):
    """Arguments for it."""
    given = {"weight": [X], "weight_stride0": 4, "cx": None, "grad_hy": None, "grad_cy": None, "mode": 2}
    given |= dict.fromkeys(("hidden_size", "num_layers"), 2) | {"proj_size": 0, "batch_sizes": []}
    given |= dict.fromkeys(("batch_first", "bidirectional"), False) | {"train": True, "dropout": 0.0}
    given |= {"dropout_state": None, "output_mask": [True] * 4} | values
    return tuple(given.get(argument.name, X) for argument in op._schema.arguments)


def on_gpu(asked=None):
    """Room is made three times at most."""
    asked = [] if asked is None else asked
    return OpGuard(
        OnDriver(FullDriver()),
        lambda nbytes, _: asked.append(nbytes) or int(len(asked) <= 3),
        lambda op, nbytes, why: GaveUp(f"{op}: {nbytes}: {why}"),
    )


@pytest.mark.parametrize("name", CELLS)
def test_a_cells_backward_overwrites_what_forward_kept_for_it_and_does_not_run_again(name):
    reserve, asked = torch.ones(2), []
    op = getattr(aten, name + "_backward").default

    def overwrite(*args):
        return reserve.mul_(2).clone(), torch.ones(2), torch.ones(2), [torch.ones(2)]

    with Kernel(name + "_backward", overwrite, torch.OutOfMemoryError(REFUSED)), torch.no_grad():
        with pytest.raises(GaveUp, match="changes its arguments"), on_gpu(asked):
            op(*of_cell(op, reserve=reserve))
    assert reserve.tolist() == [2, 2] and not asked


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_cell_that_has_drawn_does_not_run_again_after_a_library_found_no_memory(name, dropout):
    """It draws from a state that is an argument; torch's own allocations come before that."""
    op = getattr(aten, name).default
    for error, again in (
        (torch.OutOfMemoryError(REFUSED), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), not dropout),
    ):
        fails = contextlib.nullcontext() if again else pytest.raises(GaveUp, match="changes its arguments")
        with Kernel(name, lambda *_: (torch.ones(2),) * 5, error) as kernel, torch.no_grad(), fails, on_gpu():
            op(*of_cell(op, dropout=dropout, dropout_state=torch.zeros(2)))
        assert kernel.calls == 1 + again, error


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_statistics_are_not_updated_twice():
    mean, var, counts = torch.zeros(3), torch.ones(3), torch.ones(1, 3)

    def updated(*args):
        mean.add_(1)
        return torch.zeros(3), torch.ones(3)

    images = numbers(4, 3)
    for name, args in {
        "batch_norm_gather_stats": (images, mean, var, mean, var, 0.1, 1e-5, 4),
        "batch_norm_gather_stats_with_counts": (images, counts, counts, mean, var, 0.1, 1e-5, counts),
        "batch_norm_update_stats": (images, mean, var, 0.1),
    }.items():
        mean.zero_()
        op = getattr(aten, name).default
        with Kernel(name, updated, torch.OutOfMemoryError(REFUSED)), pytest.raises(GaveUp), on_gpu():
            op(*args)
        assert mean.tolist() == [1] * 3, name
        place = [argument.name for argument in op._schema.arguments].index("running_mean")
        without = (*args[:place], None, None, *args[place + 2 :])
        with Kernel(name, updated, torch.OutOfMemoryError(REFUSED)) as kernel, on_gpu():
            op(*without)
        assert kernel.calls == 2, name


@pytest.mark.parametrize("inference", [False, True])
def test_batch_norm_runs_again_where_it_updates_nothing(memory, inference):
    """In inference mode it is seen as one operator."""
    layer, images, sandbag = torch.nn.BatchNorm1d(512), numbers(8, 512), Sandbag(memory)
    with torch.inference_mode(inference), torch.set_grad_enabled(False):
        expected = layer.eval()(images)
        memory.limit = memory.allocated + 100
        with guarded(sandbag):
            result = layer(images)
        memory.limit = memory.allocated + 100
        with pytest.raises(GaveUp, match="changes its arguments"), guarded(Sandbag(memory, pieces=0)):
            torch.nn.functional.batch_norm(images, layer.running_mean, layer.running_var, training=True)
        memory.limit = None
    assert sandbag.asked and torch.equal(result, expected)
    out = {"out": torch.empty(8, 512), "save_mean": torch.empty(512), "save_invstd": torch.empty(512)}
    assert why_not(aten.native_batch_norm.out, (images, None, None, X, X, True, 0.1, 1e-5), out)


class FullHost(TorchDispatchMode):
    """No page of host memory can be pinned any more: what cudaHostAlloc says of that."""

    def __init__(self):
        super().__init__()
        self.refused = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if (kwargs or {}).get("pin_memory") or op is aten._pin_memory.default:
            self.refused += 1
            raise RuntimeError("CUDA error: out of memory")
        return op(*args, **kwargs or {})


@pytest.mark.parametrize(
    "pin",
    [
        lambda: torch.empty(1000, pin_memory=True),
        lambda: torch.zeros(1000, pin_memory=True),
        lambda: aten._to_copy(X, device=torch.device("cpu"), pin_memory=True),
        lambda: aten._pin_memory(X),
    ],
)
def test_a_full_host_is_no_full_device(pin):
    host, asked = FullHost(), []
    with host, on_gpu(asked), pytest.raises(RuntimeError, match="^CUDA error: out of memory$"):
        pin()
    assert host.refused == 1 and not asked


@pytest.mark.needs_torch("2.7", "modes refuse higher-order operators")
def test_higher_order_operators_and_tensors_of_scalars_pass(memory):
    with guarded(Sandbag(memory)):
        taken = torch.cond(torch.tensor(True), torch.sin, torch.cos, (torch.zeros(3),))
        many = [torch.ones(2), torch.ones(3)]
        torch._foreach_addcdiv_(many, [t * 2 for t in many], [t * 4 for t in many], torch.tensor([1.0, 2.0]))
    assert torch.equal(taken, torch.zeros(3))
    assert [t.tolist() for t in many] == [[1.5] * 2, [2.0] * 3]
