"""`python -m mindspeed_mem chunks`: what it prints, draws and refuses."""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

from mindspeed_mem.__main__ import main
from mindspeed_mem.command_line import NO_MATPLOTLIB
from mindspeed_mem.features import check, scan
from mindspeed_mem.model_sizes import PUBLISHED
from mindspeed_mem.zero.buffers.runtime import Runtime
from mindspeed_mem.zero.layout.cutting import ParameterSize, equal_chunks
from mindspeed_mem.zero.layout.model_tensors import GPTShape
from mindspeed_mem.zero.layout.shown import cycles, lines

SHAPE = "--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "


@pytest.fixture
def chunks(capsys):
    """Runs the command with these words; returns its status, output and errors."""

    def run(words):
        status = main(["chunks", *words.split()])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_it_prints_colossalais_chunks(chunks):
    status, out, err = chunks("--model gpt2-medium --compatible --data-parallel-size 8")
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "gpt2-medium with Hugging Face's tensors: 292 parameters, 354,823,168 elements, 676.77 MiB in bf16; "
        "8 data-parallel ranks",
        "chunks of 51,432,448 elements (98.10 MiB); 1 larger, for a parameter of its own",
        "searched over 64.00 MiB from 64.00 MiB or the largest parameter scored, in steps of 1,024 elements",
        "ColossalAI would report 1.454% padding",
        "",
        "chunk    elements  MiB bf16      used",
        "0      51,463,168     98.16  100.00 %  ########################",
        "  transformer.wte.weight",
        "1      51,432,448     98.10  100.00 %  ########################",
        "  transformer.wpe.weight to transformer.h.3.mlp.c_proj.weight (48 parameters)",
        "2      51,432,448     98.10   97.97 %  #######################.",
        "  transformer.h.3.mlp.c_proj.bias to transformer.h.8.ln_1.bias (51 parameters)",
        "3      51,432,448     98.10   97.96 %  #######################.",
        "  transformer.h.8.attn.c_attn.weight to transformer.h.12.ln_1.bias (48 parameters)",
        "  chunks 4 to 6: alike",
        "",
        "7 chunks, the largest 98.16 MiB; 85.84 MiB of shards on each rank; "
        "padding 1.4538% (5,234,688 elements, 9.98 MiB)",
    ]


@pytest.mark.parametrize(
    ("words", "chunk", "share"),
    [
        ("--model gpt2-xl --min-chunk-size-mib 16 --chunk-hidden-dim 1024", 20_496_384, 1.207),
        ("--model gpt2-xl", 51_236_800, 0.553),
        ("--model llama-7b --chunk-search-range-mib 128", 168_833_024, 4.972),
    ],
)
def test_the_compatible_search_counts_as_colossalai_does(chunks, words, chunk, share):
    _, out, _ = chunks(f"{words} --compatible --data-parallel-size 2 --json")
    found = json.loads(out)
    assert found["found"]["chunk_elements"] == chunk and round(100 * found["waste_fraction"], 3) == share


@pytest.mark.parametrize("model", ["gpt2-medium", "gpt2-xl", "llama-7b"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_its_own_chunks_waste_next_to_nothing(chunks, model, ranks):
    _, out, _ = chunks(f"--model {model} --data-parallel-size {ranks} --json")
    found = json.loads(out)
    held = sum(chunk["capacity"] for chunk in found["chunks"])
    used = sum(one["elements"] for chunk in found["chunks"] for one in chunk["parameters"])
    assert found["waste"] == held - used and found["waste_fraction"] == (held - used) / held < 0.001
    assert all(chunk["capacity"] % ranks == 0 for chunk in found["chunks"])


def test_it_plans_for_a_model_given_by_megatrons_options(chunks):
    status, out, _ = chunks(f"{SHAPE} --data-parallel-size 3")
    assert status == 0 and out.startswith("a GPT with 4 layers as Megatron builds it: 52 parameters, 102,946,816 ele")
    assert "searched from 64.00 to 128.00 MiB in steps of 1,024 elements\n" in out
    assert "  decoder.final_layernorm.bias to embedding.position_embeddings.weight (51 parameters)\n" in out
    assert "\nin Megatron-LM: --use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 50387968\n" in out


@pytest.mark.parametrize(
    "words",
    [
        "--data-parallel-size 3",
        "--data-parallel-size 4 --ddp-pad-buckets-for-high-nccl-busbw --chunk-hidden-dim 4096",
        "--min-chunk-size-mib 20.3 --chunk-search-range-mib 7.7 --tensor-model-parallel-size 2",
    ],
)
def test_the_options_for_this_package_make_the_same_chunks(chunks, words):
    found = json.loads(chunks(f"{SHAPE} {words} --json")[1])
    line = chunks(f"{SHAPE} {words}")[1].splitlines()[-1]
    start, _, options = line.partition(": ")
    assert start == "with this package, stage 3 or 2"
    asked = scan(options.split())
    asked.device = "cpu"
    training = Runtime(check(asked).chunk)
    parameters = [one["elements"] for chunk in found["chunks"] for one in chunk["parameters"]][::-1]
    tensors = [torch.empty(elements, device="meta") for elements in parameters]
    padded = "--ddp-pad-buckets-for-high-nccl-busbw" in options.split()
    assert padded == ("--ddp-pad-buckets-for-high-nccl-busbw" in words)
    assert training.cuts_buckets and training.hidden_size == 1024  # as in SHAPE
    target = training.bucket_size(tensors, found["data_parallel_size"], padded)
    assert target == found["found"]["target_elements"]


def test_no_option_makes_chunks_of_other_tensors_or_of_no_search(chunks):
    for words in ("--model gpt2-medium", f"{SHAPE} --chunk-search-range-mib 0"):
        assert chunks(words)[1].splitlines()[-1].startswith("in Megatron-LM: ")


def test_sizes_are_bytes_of_bf16(chunks):
    words = f"{SHAPE} --chunk-search-range-mib 0 --chunk-hidden-dim 1"
    _, out, _ = chunks(f"{words} --min-chunk-size-mib 40.5 --json")
    assert json.loads(out)["found"]["target_elements"] == 40.5 * 2**20 / 2
    _, out, _ = chunks(f"{words} --min-chunk-size-mib 500")
    assert "all parameters together are less than the minimum of 262,144,000 elements (500.00 MiB): one chunk\n" in out
    assert "\n1 chunk, the largest 196.36 MiB" in out


def test_padding_for_bus_bandwidth_is_megatrons(chunks):
    words = f"{SHAPE} --ddp-pad-buckets-for-high-nccl-busbw --data-parallel-size 3"
    _, out, _ = chunks(words + " --json")
    assert all(chunk["capacity"] % (3 * 2**16) == 0 for chunk in json.loads(out)["chunks"])
    _, out, _ = chunks(words)
    assert out.endswith(" --ddp-pad-buckets-for-high-nccl-busbw\n")


def test_options_of_the_model_are_megatrons(chunks):
    words = "--num-layers 3 --hidden-size 512 --num-attention-heads 8 --vocab-size 1000 --tensor-model-parallel-size 2 "
    words += "--swiglu --group-query-attention --num-query-groups 2 --disable-bias-linear --normalization RMSNorm "
    words += "--position-embedding-type rope --untie-embeddings-and-output-weights"
    status, out, _ = chunks(words + " --json")
    shape = GPTShape(
        num_layers=3,
        hidden_size=512,
        ffn_hidden_size=1344,  # 4 x 512 x 2/3, down to a multiple of 64
        num_attention_heads=8,
        num_query_groups=2,
        kv_channels=64,
        vocab_size=1024,  # up to a multiple of 128 x 2
        max_position_embeddings=0,
        swiglu=True,
        layer_norm=False,
        bias=False,
        untied=True,
        tensor_parallel=2,
    )
    listed = [one for chunk in json.loads(out)["chunks"] for one in chunk["parameters"]]
    assert [(one["name"], one["elements"]) for one in listed[::-1]] == [
        (x.name, x.elements) for x in shape.parameters()
    ]


@pytest.mark.parametrize(
    ("words", "reasons"),
    [
        (
            "--model gpt3 --hidden-size 8 --swiglu --data-parallel-size 0 --chunk-search-range-mib -1 "
            "--min-chunk-size-mib x --chunk-hidden-dim 1.5 --compatible --ddp-pad-buckets-for-high-nccl-busbw "
            "--picture no/such.gif",
            [
                "--model says what --hidden-size, --swiglu would; give either",
                f"--model takes {', '.join(PUBLISHED)}, not 'gpt3'",
                "--data-parallel-size takes a whole number of at least 1, not '0'",
                "--chunk-search-range-mib takes a number of at least 0, not '-1'",
                "--min-chunk-size-mib takes a number of at least 0, not 'x'",
                "--chunk-hidden-dim takes a whole number of at least 1, not '1.5'",
                "--ddp-pad-buckets-for-high-nccl-busbw is about Megatron's buckets: not with --compatible",
                "--picture takes a file that ends in .svg, .png, .pdf, not 'no/such.gif'",
                "--picture: there is no folder no",
            ],
        ),
        (
            "--num-layers 100001 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --min-chunk-size-mib 1e300",
            [
                "--num-layers takes a whole number of at most 100000, not 100001",
                "--min-chunk-size-mib takes a number of at most 1e+09, not '1e300'",
            ],
        ),
        (
            "--num-layers 0 --normalization L",
            [
                "--hidden-size, --num-attention-heads, --max-position-embeddings (for learned positions): missing; "
                "without --model the model's shape is needed",
                "--num-layers takes a whole number of at least 1, not '0'",
                "--normalization takes LayerNorm, RMSNorm, not 'L'",
            ],
        ),
        (
            "--num-layers 2 --hidden-size 100 --num-attention-heads 3 --seq-length 8 --num-query-groups 2 "
            "--tensor-model-parallel-size 2 --ffn-hidden-size 101 --data-parallel-size x",
            [
                "--hidden-size 100 is no multiple of --num-attention-heads 3; give --kv-channels",
                "--num-attention-heads 3 is no multiple of --num-query-groups 2",
                "--num-attention-heads 3 is no multiple of --tensor-model-parallel-size 2",
                "--ffn-hidden-size 101 is no multiple of --tensor-model-parallel-size 2",
                "--data-parallel-size takes a whole number of at least 1, not 'x'",
            ],
        ),
    ],
)
def test_bad_input_is_refused_with_all_reasons(chunks, words, reasons):
    status, out, err = chunks(words)
    first, *text = [line for line in err.splitlines() if NO_MATPLOTLIB not in line]  # one more where it is absent
    assert (status, out, first) == (2, "", "mindspeed_mem chunks:")
    assert text == ["  " + reason for reason in reasons]


@pytest.mark.parametrize(("ending", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_it_draws_a_picture(chunks, tmp_path, ending, start):
    pytest.importorskip("matplotlib")
    target = tmp_path / f"chunks.{ending}"
    status, out, _ = chunks(f"--model gpt2-medium --compatible --picture {target}")
    assert status == 0 and f"drawn to {target}" in out
    assert target.read_bytes().startswith(start)
    if ending == "svg":
        text = target.read_text()
        assert "padding (1.4538%)" in text and "7 chunks, the largest 98.16 MiB" in text


def test_the_picture_does_not_mix_with_json(chunks, tmp_path):
    pytest.importorskip("matplotlib")
    _, out, err = chunks(f"{SHAPE} --json --picture {tmp_path / 'chunks.svg'}")
    assert json.loads(out)["count"] == 2 and "drawn to" in err


def test_without_matplotlib_it_says_how_to_install_it(chunks, tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    status, out, err = chunks(f"--model gpt2-medium --picture {tmp_path / 'a.svg'}")
    assert (status, out) == (2, "") and "pip install matplotlib" in err


def test_it_needs_neither_torch_nor_megatron_nor_matplotlib():
    code = (
        "import sys; from mindspeed_mem.__main__ import main; main(['chunks', '--model', 'gpt2-medium']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'megatron', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_what_repeats_is_shown_once():
    assert cycles("aaaa") == [(0, 1, 4)]
    assert cycles("xababababy") == [(0, 1, 1), (1, 2, 4), (9, 1, 1)]
    assert cycles("abcd") == [(0, 4, 1)] and cycles("") == []


def test_a_long_layout_that_does_not_repeat_is_cut():
    layout = equal_chunks([ParameterSize(f"p{place}", 1000 + place) for place in range(60)], 1060, 1)
    text = lines(layout)
    assert len(text) == 1 + 2 * 40 + 1 and text[-1] == "  (and 20 chunks more)"
    layout = equal_chunks([ParameterSize("a", 7), *(ParameterSize("b", 9) for _ in range(60))], 9, 1)
    assert [line for line in lines(layout) if line.startswith("  ")] == ["  a", "  b", "  chunks 2 to 60: alike"]
