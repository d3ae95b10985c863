"""The adaptor as scripts use it, each in a fresh interpreter on the installed megatron-core."""

import json
import os
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests import warm
from tests.sweeping import but

ROOT = Path(__file__).parents[2]
SWAP = {"swap_config": {"swap": True, "op_swap": {"op_name": r"self_attention\.linear_qkv", "layers": True}}}
SWAP["swap_config"]["op_swap"]["backward_prefetch"] = 1

# One training step of a tiny GPT on one rank, in place of a user's training loop.
TRAIN = """
import atexit
import torch
import tests.models
from tests.models import build_gpt, train_step
from megatron.core import parallel_state, tensor_parallel

def train(steps=1):
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        # A thread of gloo's that lets go of a tensor while Python shuts down would end the process.
        atexit.register(torch.distributed.destroy_process_group)
        parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    chunks = build_gpt("dropout", layers=2)
    return [train_step(chunks, micro_batches=2, step=step).loss for step in range(steps)]
"""


@pytest.fixture
def swap_file(tmp_path):
    path = tmp_path / "swap.yaml"
    path.write_text(json.dumps(SWAP))
    return str(path)


def python(code, *arguments, status=0, environment=(), path=()):
    """Run `code` with these arguments in ``sys.argv``; returns (what it printed, its errors)."""
    clean = {k: v for k, v in os.environ.items() if k not in ("MINDSPEED_MEM_DEVICE", "RANK", "LOCAL_RANK")}
    search = os.pathsep.join([str(ROOT), *map(str, path)])
    clean |= {"PYTHONPATH": search, "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": "", **dict(environment)}
    command = [warm.python(), "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stderr
    return done.stdout, done.stderr


NOTHING = """
    import argparse, importlib, json, sys
    import mindspeed_mem.megatron_adaptor as mem
    before_use = [m for m in sys.modules if m.startswith("mindspeed_mem.patches.")]

    import wrapt
    from mindspeed_mem.patching import REGISTRY
    for module in mem.patch_modules(["*"]):
        importlib.import_module(module)  # declares
    targets = {}
    for patch in list(REGISTRY.patches):
        try:
            importlib.import_module(patch.module)
            targets[patch.target] = wrapt.resolve_path(sys.modules[patch.module], patch.target.partition(":")[2])[2]
        except (ImportError, AttributeError):
            pass
    ours = [t for t, v in targets.items() if getattr(getattr(v, "__func__", v), "__globals__", {}).get("__name__", "")
            .startswith("mindspeed_mem") and not t.startswith("mindspeed_mem.")]

    mem.configure({})
    mem.configure(mem.add_arguments(argparse.ArgumentParser()).parse_args([]))
    mem.report()
    import megatron.core.models.gpt.gpt_model
    changed = [t for t, v in targets.items()
               if wrapt.resolve_path(sys.modules[t.partition(":")[0]], t.partition(":")[2])[2] is not v]
    print(json.dumps([before_use, len(targets), ours, changed, sorted({p.status for p in REGISTRY.patches})]))
"""


def test_with_no_flag_nothing_is_imported_and_no_symbol_replaced():
    """By identity over all declared targets, from before the use of the package until after it."""
    out, _ = python(NOTHING)
    before_use, count, ours, changed, statuses = json.loads(out)
    assert before_use == [] and ours == [] and changed == []
    assert count > 50 and statuses == ["declared"]


CPU = """
    import json, sys
    if sys.argv.pop(1) == "late":
        import megatron.core.pipeline_parallel.schedules, megatron.core.models.gpt.gpt_model
    import mindspeed_mem.megatron_adaptor as mem
    from mindspeed_mem.patching import REGISTRY
    import mindspeed_mem.megatron_adaptor
    train = sys.argv.pop(1)
    exec(train)
    losses = train(2)
    statuses = REGISTRY.verify(mem.patch_modules(["cpu_*"]))
    print(json.dumps([losses, sorted({*statuses.values()}), REGISTRY.verify_once()]))
"""


@pytest.fixture(scope="module")
def by_environment():
    """What training prints where only the environment names the device."""
    return json.loads(python(CPU, "early", TRAIN, environment={"MINDSPEED_MEM_DEVICE": "cpu"})[0])


def test_the_device_cpu_of_the_environment_makes_megatron_train(by_environment):
    trains(by_environment)


@pytest.mark.parametrize("flag", but(["--device=cpu", "--sdpa-attention"], "--device=cpu"))
def test_the_device_cpu_makes_megatron_train(flag):
    """Named in one word, or found where a feature is on."""
    trains(json.loads(python(CPU, "early", TRAIN, flag)[0]))


def trains(found):
    losses, statuses, lost = found
    assert len(losses) == 2 and losses[0] > 4 and losses[0] != losses[1]
    assert set(statuses) <= {"applied", "waiting", "absent"} and lost == []


def test_megatron_may_be_imported_before(by_environment):
    late = json.loads(python(CPU, "late", TRAIN, "--device", "cpu")[0])
    trains(late)
    assert late[0] == by_environment[0]


BOUND = """
    import json, logging, sys
    import mindspeed_mem.megatron_adaptor as mem
    said = []
    class Listener(logging.Handler):
        def emit(self, record):
            said.append("NUMA" in record.getMessage() or "bound to" in record.getMessage())
    logging.getLogger("mindspeed_mem").addHandler(Listener())
    logging.getLogger("mindspeed_mem").setLevel(logging.INFO)
    found = []
    for flags in ({"memory_config": sys.argv.pop(1)}, {"recompute_layers": [0]}, {"survive_oom": True}, {}):
        said.clear()
        mem.configure(flags | ({"device": "cpu"} if flags else {}))
        found.append(sum(said))
    print(json.dumps(found))
"""


def test_whoever_copies_to_the_host_is_bound_to_a_numa_node(swap_file):
    """With swap, without any (recompute alone), with eviction, with nothing."""
    out, _ = python(BOUND, swap_file)
    assert json.loads(out) == [1, 0, 1, 0]


CONFIGURE = """
    import argparse, json, sys
    import mindspeed_mem.megatron_adaptor as mem
    from mindspeed_mem.activation import engine
    from mindspeed_mem.patching import REGISTRY
    from mindspeed_mem.report.scalars import Scalars
    exec(sys.argv.pop(1))
    file = sys.argv.pop(1)
    applied = lambda: sorted({p.declared_by.rpartition(".")[2] for p in REGISTRY.patches if p.status == "applied"})
    plain = train()
    found = [engine.current() is None, applied()]
    parser = mem.add_arguments(argparse.ArgumentParser())
    mem.configure(parser.parse_args(["--device", "cpu", "--memory-config", file]))
    first = engine.current()
    mem.configure({"memory_config": file})
    found += [engine.current() is first is not None, train() == plain, first.report().bytes_out > 0, applied()]
    text = mem.report()
    found.append("activation memory, per rank" in text)
    mem.configure({"memory_config": file, "swap_host_memory_gib": 1.5})
    found += [engine.current() is not first, train() == plain]
    try:
        mem.configure({"memory_config": file, "recompute_granularity": "full"})
    except mem.FeatureError as error:
        found.append("--recompute-granularity full" in str(error))
    found.append(engine.current() is not None)
    mem.configure({"memory_config": None, "memory_trace": "trace.json"})
    found += [engine.current() is not None, train() == plain, mem.report() == "", Scalars().take(1) == {}]
    mem.configure({"memory_config": None})
    found += [engine.current() is None, applied() == found[1], train() == plain, mem.report() == ""]
    print(json.dumps(found))
"""


def test_configure_starts_replaces_and_stops_the_engine(swap_file):
    out, _ = python(CONFIGURE, TRAIN, swap_file, "--device", "cpu")
    found = json.loads(out.splitlines()[-1])
    assert found[0] and "activation_passes" not in found[1] and "cpu_torch_rng" in found[1]
    assert found[2:5] == [True, True, True]
    assert {"activation_passes", "pass_events", "first_step"} <= set(found[5])
    assert found[6:] == [True] * 13


LISTENING = """
    import json, sys
    import mindspeed_mem.megatron_adaptor as mem
    from mindspeed_mem import passes
    from mindspeed_mem.patches import first_step
    from megatron.core.pipeline_parallel import schedules
    function = lambda: schedules.forward_backward_pipelining_without_interleaving
    native = function().__wrapped__
    def state():
        wrappers, link = 0, function()
        while link is not native:
            wrappers, link = wrappers + 1, link.__wrapped__
        return [wrappers, [one.precedence.name for one in passes.listening()], len(first_step._waiting)]
    found = [state()]
    for settings in (
        {"max_inflight_microbatches": 2},
        {"max_inflight_microbatches": None},
        {"memory_config": None, "adaptive_memory_optimization": True, "chunk_zero_stage": 1},
        {"memory_config": None, "device": "auto"},
    ):
        mem.configure(settings)
        found.append(state())
    print(json.dumps(found))
"""


def test_who_listens_is_in_the_same_order_however_it_came_and_gone_when_off(swap_file):
    out, errors = python(LISTENING, "--device", "cpu", "--memory-config", swap_file)
    swaps = ["FIRST_STEP", "OWN_CONFIGS", "ACTIVATION", "LEFT_OVER"]
    adapts = ["FIRST_STEP", "OWN_CONFIGS", "ADAPTIVE", "SURVIVE", "CHUNKS", "ACTIVATION", "LEFT_OVER"]
    on = [[1, who, 1] for who in (swaps, [*swaps, "LOOP"], swaps, adapts)]
    assert json.loads(out.splitlines()[-1]) == [*on, [0, [], 0]]
    assert "cannot be undone" not in errors


REFUSED = """
    import megatron.core.pipeline_parallel.schedules
    import mindspeed_mem.megatron_adaptor as mem
    from mindspeed_mem import features
    from mindspeed_mem.passes import LISTENERS
    from mindspeed_mem.patching import PatchError, around
    mem.configure({"device": "cpu", "max_inflight_microbatches": 4})
    before = list(LISTENERS)
    import mindspeed_mem.patches.pipeline_stages as patches
    gone = lambda original: None
    gone.__module__ = patches.__name__
    around("megatron.core.pipeline_parallel.schedules:gone")(gone)
    try:
        mem.configure({"device": "cpu", "max_inflight_microbatches": 2, "pipeline_stages": "1,2"})
    except PatchError:
        print(features.in_force().max_inflight, features.in_force().pipeline_stages, len(before), LISTENERS == before)
"""


def test_settings_that_cannot_be_applied_leave_the_earlier_ones_in_force():
    assert python(REFUSED)[0] == "4 None 3 True\n"


FORGOTTEN = """
    import sys
    import mindspeed_mem.megatron_adaptor
    exec(sys.argv.pop(1))
    train(2)
"""


def test_a_script_that_forgets_to_configure_is_told_so(swap_file):
    _, errors = python(FORGOTTEN, TRAIN, "--memory-config", swap_file, "--device", "cpu")
    assert errors.count("the script never called megatron_adaptor.configure(args)") == 1


def test_a_mapping_without_a_setting_of_ours_is_told_once_on_rank_0():
    code = """
        import mindspeed_mem.megatron_adaptor as mem
        mem.configure({"max_in_flight": 2})
        mem.configure({"device": "cpu", "hidden_size": 64})  # may hold what is another's, too
        mem.configure({})
    """
    said = "configure: none of the keys given ('max_in_flight') is a setting of mindspeed_mem; allowed: device, "
    for rank in ("0", "1"):
        assert python(code, environment={"RANK": rank})[1].count(said) == (rank == "0")


LOST = """
    import sys
    import mindspeed_mem.megatron_adaptor
    exec(sys.argv.pop(1))
    from megatron.core import utils
    utils.nvtx_range_push = lambda msg=None, suffix=None: None  # another package, later
    train(2)
"""


def test_a_patch_that_another_package_dropped_is_named_after_the_first_step(swap_file):
    _, errors = python(LOST, TRAIN, "--memory-config", swap_file, "--device", "cpu")
    assert errors.count("megatron.core.utils:nvtx_range_push (mindspeed_mem.patches.activation_markers): LOST to") == 1


IMPORT = "import mindspeed_mem.megatron_adaptor"


def test_a_wrong_command_line_ends_every_rank_with_status_2_and_one_message():
    wrong = ["--memory-config", "/no/such.yaml", "--device", "cuda", "--smart-swap"]
    texts = [python(IMPORT, *wrong, status=2, environment={"RANK": rank, "LOCAL_RANK": rank})[1] for rank in ("0", "1")]
    assert "Traceback" not in texts[0] and texts[1] == ""
    assert texts[0].startswith("mindspeed_mem: 3 problems with the options\n")
    for part in ("/no/such.yaml", "'cuda' is not available", "--memory-config cannot be combined with --smart-swap"):
        assert part in texts[0]


def test_a_wrong_log_level_is_such_an_error_too():
    _, errors = python(IMPORT, status=2, environment={"MINDSPEED_MEM_LOG": "loud"})
    assert errors == "mindspeed_mem: MINDSPEED_MEM_LOG: got 'loud'; allowed: debug, info, warning, error\n"


def test_log_lines_of_rank_0_alone(swap_file):
    code = """
        import sys
        import mindspeed_mem.megatron_adaptor as mem
        exec(sys.argv.pop(1))
        mem.configure({})
        train()
    """
    line = "Set op_swap at layer 1: self_attention.linear_qkv, value=1"
    for rank in ("0", "1"):
        arguments = ["--memory-config", swap_file, "--device", "cpu"]
        _, errors = python(code, TRAIN, *arguments, environment={"RANK": rank, "MINDSPEED_MEM_LOG": "info"})
        assert errors.splitlines().count(line) == (rank == "0")


MEGATRON_LM = pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM names no checkout of Megatron-LM")
ARGUMENTS = """
    import sys
    import mindspeed_mem.megatron_adaptor
    from megatron.training.arguments import parse_args, validate_args
    args = validate_args(parse_args(), {})
    from mindspeed_mem.activation import engine
    print("engine", engine.current() is not None, args.memory_config)
"""
SIZES = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 1 --transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm "
    "--eval-interval 1 --lr 1"
).split()


@MEGATRON_LM
def test_megatron_lms_parser_shows_our_flags_in_its_help():
    out, _ = python(ARGUMENTS, "--help", path=[os.environ["MEGATRON_LM"]])
    assert out.count("\nmindspeed_mem:") == 1 and "  --memory-config FILE" in out and "--num-layers" in out


@MEGATRON_LM
def test_megatron_lms_arguments_start_the_engine(swap_file):
    given = [*SIZES, "--memory-config", swap_file]
    out, _ = python(ARGUMENTS, *given, path=[os.environ["MEGATRON_LM"]])
    assert f"engine True {swap_file}" in out.splitlines()


@MEGATRON_LM
def test_what_megatron_lm_made_of_its_arguments_is_checked_again(tmp_path):
    """Layers out of range, when the number of layers is known only from Megatron's own sources."""
    swap_file = tmp_path / "swap.yaml"
    swap_file.write_text("swap_config: {swap: True, layer_swap: {layers: [5], backward_prefetch: 1}}")
    given = [*SIZES[2:], "--encoder-num-layers", "2", "--memory-config", str(swap_file)]
    _, errors = python(ARGUMENTS, *given, status=2, path=[os.environ["MEGATRON_LM"]])
    assert "mindspeed_mem: 1 problem with the options" in errors and "swap_config.layer_swap" in errors


@MEGATRON_LM
def test_megatron_lms_parser_does_not_know_our_flags_unless_one_is_given():
    code = """
        import argparse
        import mindspeed_mem.megatron_adaptor as mem
        from mindspeed_mem.patching import REGISTRY
        print(len(REGISTRY.patches))
    """
    out, _ = python(code, *SIZES, path=[os.environ["MEGATRON_LM"]])
    assert out == "0\n"


OTHER_MEGATRON = """
    import wrapt

    def other(schedules):
        del schedules.backward_step

    wrapt.register_post_import_hook(other, "megatron.core.pipeline_parallel.schedules")
    import mindspeed_mem.megatron_adaptor
    import megatron.core.pipeline_parallel.schedules
"""


def test_a_symbol_that_is_gone_is_told_with_the_flag_that_needs_it():
    _, errors = python(OTHER_MEGATRON, "--device", "cpu", "--survive-oom", status=1)
    assert "backward_step does not exist in the installed version, or leave --survive-oom out" in errors


ATTACHED = """
    import json, torch, mindspeed_mem
    import mindspeed_mem.megatron_adaptor as mem
    from mindspeed_mem.patching import REGISTRY

    def attached():
        layers = [torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()) for _ in range(2)]
        return mindspeed_mem.attach(torch.nn.Sequential(*layers), {"recompute_config": {"recompute": True}})

    def configured():
        try:
            mem.configure({})
            return "in force"
        except mem.FeatureError as error:
            return str(error)

    found = attached()
    said = [configured()]
    found.detach()
    undone = [patch.target for patch in REGISTRY.patches if patch.status == "undone"]
    found = attached()
    del found
    said.append(configured())
    print(json.dumps([said, undone]))
"""


def test_an_attached_model_and_the_plan_of_a_flag_do_not_take_each_others_place(swap_file):
    """Whichever came last had been in force, and what the first is detached of had gone for both."""
    (said, undone) = json.loads(python(ATTACHED, "--device", "cpu", "--memory-config", swap_file)[0].splitlines()[-1])
    assert "another memory plan is in force, of an attached model (a Sequential): detach it first" in said[0]
    assert undone == [] and said[1] == "in force"


def test_a_rank_that_is_no_number_is_named():
    _, err = python("import mindspeed_mem.megatron_adaptor", status=2, environment={"RANK": ""})
    assert "RANK: got ''; allowed: a whole number" in err
