"""A settled plan is kept in a file, used again for the same job only, and never half written."""

from __future__ import annotations

import os

import pytest

from mindspeed_mem.adaptive.run import kept_plan
from mindspeed_mem.plan import load_memory_config

CONFIG = load_memory_config(
    {
        "swap_config": {
            "swap": True,
            "pp_aware": False,
            "op_swap": [{"op_name": r"mlp\.linear_fc1", "backward_prefetch": 3, "layers": [0, 1]}],
        },
        "recompute_config": {"select_recompute": {r"mlp\.activation_func": [2]}},
    }
)
FACTS = {"layers": 4, "seq_length": 128, "cap": None, "dtype": "torch.bfloat16", "model": "0123abcd", "torch": "2.13"}


def test_what_is_kept_is_used_by_the_same_job(tmp_path):
    target = tmp_path / "new" / "plan.yaml"
    kept_plan.write(target, CONFIG, FACTS, ["predicted 1 s, measured 1.01 s"])
    config, why = kept_plan.read(target, dict(FACTS))
    assert config == CONFIG and "is used" in why
    assert load_memory_config(str(target)) is not None  # as --memory-config, too
    assert target.read_text().startswith("# mindspeed_mem: the plan")
    assert os.listdir(target.parent) == ["plan.yaml"]


@pytest.mark.parametrize(("name", "value"), [("seq_length", 256), ("torch", "2.14"), ("cap", 2), ("host_limit", 5)])
def test_another_job_is_told_what_differs(tmp_path, name, value):
    target = tmp_path / "plan.yaml"
    kept_plan.write(target, CONFIG, FACTS)
    config, why = kept_plan.read(target, {**FACTS, name: value})
    assert config is None and f"{name} was {FACTS.get(name)} and is {value}" in why


def test_a_model_of_fewer_layers_is_told_so(tmp_path):
    """Not that its layers are out of range."""
    target = tmp_path / "plan.yaml"
    kept_plan.write(target, CONFIG, FACTS)
    config, why = kept_plan.read(target, {**FACTS, "layers": 2})
    assert config is None and why.endswith("is not used: layers was 4 and is 2")


def test_a_file_without_a_version_is_of_the_first(tmp_path):
    target = tmp_path / "plan.yaml"
    kept_plan.write(target, CONFIG, FACTS)
    text = target.read_text()
    target.write_text(text.replace('"torch": "2.13", "version": 1}', '"torch": "2.13"}'))
    assert target.read_text() != text and kept_plan.read(target, FACTS)[0] == CONFIG


def test_a_key_that_is_gone_differs_too(tmp_path):
    target = tmp_path / "plan.yaml"
    kept_plan.write(target, CONFIG, FACTS)
    config, why = kept_plan.read(target, {key: value for key, value in FACTS.items() if key != "layers"})
    assert config is None and "layers was 4" in why


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('# made for: {"version": 2, "layers": 4}\nswap_config: {swap: true}\n', "of version 2, and this"),
        ("swap_config: {swap: true}\n", "does not say what it was made for"),
        ("# made for: [1]\nswap_config: {swap: true}\n", "does not say what it was made for"),
        ("# made for: {\nswap_config: {swap: true}\n", "not used"),
        ('# made for: {"layers": 4}\nswap_config: {swapp: true}\n', "swapp"),
        ('# made for: {"layers": 4}\nswap_config: [\n', "not used"),
    ],
)
def test_a_file_that_is_no_plan_is_not_used(tmp_path, text, expected):
    target = tmp_path / "plan.yaml"
    target.write_text(text)
    config, why = kept_plan.read(target, FACTS)
    assert config is None and expected in why and str(target) in why


def test_nothing_else_is_written_over(tmp_path):
    for name, content in {"weights": bytes(range(256)), "own.yaml": b"swap_config: {swap: true}\n"}.items():
        (tmp_path / name).write_bytes(content)
        assert kept_plan.why_not(tmp_path / name) == "there is another file"
    assert "directory" in kept_plan.why_not(tmp_path)
    (tmp_path / "empty").touch()
    kept_plan.write(tmp_path / "another job's", CONFIG, FACTS)
    for name in ("empty", "another job's", "new/folder/plan.yaml"):
        assert kept_plan.why_not(tmp_path / name) == ""


def test_no_file_is_no_news(tmp_path):
    assert kept_plan.read(tmp_path / "plan.yaml", FACTS) == (None, "")
    config, why = kept_plan.read(tmp_path, FACTS)
    assert config is None and "cannot be read" in why


def test_a_write_that_fails_leaves_the_earlier_plan(tmp_path):
    target = tmp_path / "plan.yaml"
    kept_plan.write(target, CONFIG, FACTS)
    with pytest.raises(TypeError):
        kept_plan.write(target, CONFIG, {"layers": object()})
    assert kept_plan.read(target, FACTS)[0] == CONFIG
    assert os.listdir(tmp_path) == ["plan.yaml"]
