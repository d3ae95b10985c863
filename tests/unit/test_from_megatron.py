"""Megatron's names of modules in plans, and its flags as a plan: what becomes of each operator."""

import pytest
import yaml

from mindspeed_mem.__main__ import main
from mindspeed_mem.plan import load_memory_config, resolve
from mindspeed_mem.plan.operators import MEGATRON_MODULES, match, with_inline
from tests.operators import DENSE

NORMS = {"input_layernorm", "pre_mlp_layernorm"}
CORE, PROJ, QKV = (f"self_attention.{name}" for name in ("core_attention", "linear_proj", "linear_qkv"))
EXPERTS = (
    *(op for op in DENSE if not op.startswith("mlp.")),
    *("mlp.router", "mlp.experts", "mlp.shared_experts", "mlp.shared_experts.linear_fc1"),
    *(f"mlp.experts.local_experts.{i}.linear_fc{k}" for i in (0, 11) for k in (1, 2)),
)
GROUPED = ("mlp", "mlp.router", "mlp.experts", "mlp.experts.linear_fc1", "mlp.experts.linear_fc2")
LATENT = tuple(f"self_attention.{name}" for name in ("linear_q_down_proj", "q_layernorm", "linear_q_up_proj"))


def nodes(name, operators):
    return {hit.node for hit in match(name, with_inline(operators))}


@pytest.mark.parametrize(
    ("name", "operators", "expected"),
    [
        ("core_attn", DENSE, {CORE}),
        ("core_attn", ("cross_attention.core_attention",), {"cross_attention.core_attention"}),
        ("attn_proj", DENSE, {PROJ}),
        ("qkv_linear", DENSE, {QKV}),
        ("qkv_linear", LATENT, set(LATENT)),
        ("mla_up_proj", LATENT, {LATENT[-1]}),
        ("attn_norm", DENSE, {"input_layernorm"}),
        ("mlp_norm", DENSE, {"pre_mlp_layernorm"}),
        ("layernorm", DENSE, NORMS),
        ("moe", DENSE, set()),
        ("moe", EXPERTS, {"mlp.router", "mlp.dispatch", "mlp.experts", "mlp.shared_experts"}),
        ("shared_experts", EXPERTS, {"mlp.shared_experts"}),
        ("expert_fc1", EXPERTS, {f"mlp.experts.local_experts.{i}.linear_fc1" for i in (0, 11)}),
        ("moe_act", EXPERTS, {f"mlp.experts.local_experts.{i}.activation_func" for i in (0, 11)}),
        ("expert_fc1", GROUPED, {"mlp.experts.linear_fc1"}),
        ("moe_act", GROUPED, {"mlp.experts.activation_func"}),
        ("fused_group_mlp", GROUPED, {"mlp.experts"}),
    ],
)
def test_megatrons_names_stand_for_operators(name, operators, expected):
    assert nodes(name, operators) == expected


def test_a_regular_expression_does_not_reach_them():
    """What a pattern selects has not become more by names that it happens to match."""
    assert nodes(".*attn.*", DENSE) == {"self_attn_bda"}
    assert nodes("(core_attn|attn_norm)", DENSE) == nodes(".*_proj", DENSE) == set()
    assert not MEGATRON_MODULES.keys() & set(with_inline(EXPERTS))


@pytest.fixture
def translated(capsys):
    def run(flags, *more):
        status = main(["plan", f"--from-megatron={flags}", *more])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


FOUR = dict.fromkeys(range(4), DENSE)


def decisions(text, layers=FOUR):
    """By layer, what moves (with what of it) and what runs again; the layer itself is ``""``."""
    config = load_memory_config(yaml.safe_load(text), num_layers=len(layers))
    plan = resolve(config, layers, len(layers))
    found = {}
    for layer, operators in layers.items():
        known = with_inline(operators)
        swaps = ((op, plan.decision(layer, op)) for op in known)
        found[layer] = (
            {op: swap.activations for op, swap in swaps if swap is not None},
            {op for op in ("", *known) if plan.recompute(layer, op) is not None},
        )
    return found


def below(node, operators=DENSE):
    return {op for op in with_inline(operators) if op == node or op.startswith(node + ".")}


@pytest.mark.parametrize(
    ("flags", "moved", "again"),
    [
        ("--recompute-activations --bf16 --lr 1e-4", {}, {CORE}),
        ("--recompute-granularity selective", {}, {CORE}),
        ("--recompute-granularity selective --recompute-modules layernorm mlp", {}, NORMS | below("mlp")),
        ("--fine-grained-activation-offloading --offload-modules qkv_linear mlp_norm", {QKV, "pre_mlp_layernorm"}, {}),
        (
            "--fine-grained-activation-offloading --offload-modules core_attn attn_proj "
            "--recompute-granularity selective --recompute-modules layernorm",
            {CORE, PROJ},
            NORMS,
        ),
    ],
)
def test_flags_become_the_plan_that_does_the_same(translated, flags, moved, again):
    status, out, err = translated(flags)
    assert (status, err) == (0, "")
    for swapped, recomputed in decisions(out).values():
        assert (swapped, recomputed) == (dict.fromkeys(moved, "saved"), set(again))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--recompute-method uniform --recompute-num-layers 1", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("--recompute-method block --recompute-num-layers 3", [0, 1, 2]),
        ("--recompute-method block --recompute-num-layers 1 --pipeline-model-parallel-size 2", [0, 4]),
        (
            "--recompute-method block --recompute-num-layers 1 --pipeline-model-parallel-size 2 "
            "--num-layers-per-virtual-pipeline-stage 2",
            [0, 2, 4, 6],
        ),
    ],
)
def test_full_recompute_is_of_the_same_layers(translated, flags, expected):
    status, out, _ = translated(f"--num-layers 8 --recompute-granularity full {flags}")
    found = decisions(out, dict.fromkeys(range(8), DENSE))
    assert status == 0 and [layer for layer, (_, again) in found.items() if "" in again] == expected


@pytest.mark.parametrize(("modules", "expected"), [("moe", [1, 2]), ("mlp", [0, 3]), ("mlp moe", [0, 1, 2, 3])])
def test_experts_are_not_dense_layers(translated, modules, expected):
    flags = "--num-layers 4 --num-experts 8 --moe-layer-freq ([0]+[1]*2)+[0] --recompute-granularity selective"
    _, out, _ = translated(f"{flags} --recompute-modules {modules}")
    layers = {layer: EXPERTS if layer in (1, 2) else DENSE for layer in range(4)}
    assert [layer for layer, (_, again) in decisions(out, layers).items() if "mlp" in again] == expected
    _, out, _ = translated("--num-layers 4 --num-experts 8 --moe-layer-freq 2 --moe-layer-recompute")
    assert [layer for layer, (_, again) in decisions(out).items() if "mlp" in again] == [0, 2]


def test_inputs_of_what_runs_again_move(translated, tmp_path):
    """Megatron moves them where a module is in both lists."""
    target = tmp_path / "plan.yaml"
    flags = "--fine-grained-activation-offloading --offload-modules attn_norm mlp_norm --min-offloaded-tensor-size 5"
    flags += " --recompute-granularity selective --recompute-modules layernorm"
    status, out, _ = translated(flags, "--output", str(target))
    swap = yaml.safe_load(target.read_text())["swap_config"]
    assert status == 0 and f"--memory-config {target}" in out
    assert swap == {"swap": True, "op_swap": [], "smallest_bytes": 5, "swap_recompute_inputs": True}
    status, _, err = translated(flags + " core_attn")
    assert status == 2 and "attn_norm mlp_norm: a plan moves the inputs of all that runs again" in err


def test_whole_layers_that_transformer_engine_moves(translated):
    _, out, _ = translated("--cpu-offloading-num-layers 2 --num-layers 4")
    found = decisions(out)
    assert [layer for layer, (swapped, _) in found.items() if swapped] == [0, 1]
    assert set(found[0][0].values()) == {"saved"} and set(found[0][0]) == set(with_inline(DENSE))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--bf16 --lr 1", "nothing in it recomputes or offloads"),
        ("--recompute-granularity half", "full or selective, not 'half'"),
        ("--recompute-granularity full", "needs --recompute-method uniform"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2", "one input for 2 layers"),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 2", "needs --num-layers"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers x", "not 'x'"),
        ("--recompute-granularity selective --recompute-modules gdn_norm_out foo", "not 'foo'"),
        ("--recompute-granularity selective --recompute-modules mla_up_proj", "rotated queries and keys"),
        ("--recompute-granularity selective --recompute-modules moe", "moe: no layer has one"),
        ("--recompute-modules mlp", "nothing is recomputed without"),
        ("--recompute-activations --distribute-saved-activations", "--distribute-saved-activations: "),
        ("--offload-modules core_attn", "nothing is offloaded without"),
        (
            "--fine-grained-activation-offloading --offload-modules core_attn --activation-offload-fraction 0.5",
            "--activation-offload-fraction: a plan names what moves",
        ),
        ("--num-experts 8 --moe-layer-recompute --moe-layer-freq [x]", "--moe-layer-freq takes a number of at least"),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 1 --num-layers 2 "
            "--pipeline-model-parallel-size 4",
            "--num-layers 2 leaves parts without layers: 4 stages, virtual ones counted",
        ),
        ("--cpu-offloading-num-layers 2000000000", "takes a whole number of at most 100000, not '2000000000'"),
        ("--recompute-modules 'x", "No closing quotation"),
    ],
)
def test_what_has_no_equal_is_refused_by_name(translated, flags, said):
    status, out, err = translated(flags)
    assert (status, out) == (2, "") and said in err


def test_it_stands_alone(translated):
    status, _, err = translated("--recompute-activations", "--trace", "x", "--num-layers", "3")
    assert status == 2 and "--from-megatron says what --num-layers, --trace would" in err
