"""README and docs: what they show runs, what they name exists, what they link to is there."""

import argparse
import ast
import doctest
import functools
import importlib
import importlib.util
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mindspeed_mem import features
from mindspeed_mem.__main__ import main
from mindspeed_mem.plan import load_memory_config, resolve
from mindspeed_mem.tools.main import parser
from tests import warm
from tests.documented import DOCS, FENCED, README, ROOT, TASKS, blocks, blocks_of, commands, prints, program, why_not
from tests.operators import DENSE

CHANGELOG, RESULTS = (ROOT / name for name in ("CHANGELOG.md", "benchmarks/results/README.md"))
PAGES = [README, *DOCS, ROOT / "CONTRIBUTING.md", CHANGELOG, RESULTS]
OURS = {"schedule", "chunks", "plan", "layout"}  # quick, and without a model
EXPERTS = [f"mlp.experts.local_experts.0{part}" for part in ("", ".linear_fc1", ".activation_func", ".linear_fc2")]
SHELL = {"cut", "sed"}  # tests/examples/test_pages.py runs them, like the others
OTHERS = {
    *("--nproc-per-node", "--shardinit"),
    *("--decoupled-lr", "--dist-ckpt-optim-fully-reshardable", "--moe-shared-expert-overlap", "--mtp-num-layers"),
    *("--tensorboard-log-interval", "--wandb-project", "--moe-expert-capacity-factor", "--deterministic-mode"),
    *("--callbacks", "--external_plugins", "--gradient_checkpointing", "--recompute_granularity"),
    "--stage",
}
"""Of torchrun and ColossalAI's example; of Megatron-LM; of ms-swift; of MindSpeed-LLM."""


def each(items):
    return pytest.mark.parametrize("item", items, ids=lambda item: getattr(item, "block", item).place)


def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_stays_short():
    assert len(README.read_bytes()) <= 9000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or anchor and anchor not in anchors(target):
            broken.append(link)
    assert not broken


def test_the_start_page_leads_to_every_page():
    start = ROOT / "docs/README.md"
    assert "](docs/README.md)" in README.read_text()
    assert not [page.name for page in DOCS if page != start and f"]({page.name})" not in start.read_text()]


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_every_page_has_an_example(page):
    assert [block for block in blocks_of(page) if block.language in ("yaml", "console", "python", "pycon")]


@each(blocks("yaml"))
def test_plans_fit_a_model(item):
    plan = load_memory_config(yaml.safe_load(item.text), num_layers=4)
    operators = (*DENSE, *EXPERTS) if item.page.stem == "moe" else DENSE
    resolved = resolve(plan, dict.fromkeys(range(4), operators), 4)
    assert not plan.notices and not resolved.notices and resolved.layers_touched()


@each(commands())
def test_commands_do_what_is_shown(item, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    words = shlex.split(item.text, comments=True)
    while re.fullmatch(r"\w+=.*", words[0]):
        words.pop(0)
    if words[:3] == ["python", "-m", "mindspeed_mem"]:
        measured = "adaptive_plan.profile.json" in words  # by the command before
        if words[3] not in OURS or measured or item.block.page in TASKS and words[3] in ("plan", "layout"):
            assert parser().parse_args(words[3:])  # tests/examples/test_pages.py runs them
            return
        words = [str(ROOT / word) if (ROOT / word).is_file() else word for word in words]
        monkeypatch.chdir(tmp_path)  # what they write
        assert main(words[3:]) == 0
        printed = capsys.readouterr().out
        assert printed
        assert not item.shown or prints(item.shown, printed), printed
        return
    if words[0] in SHELL:
        return
    assert not item.shown or not why_not(item), "this is run nowhere, so what it prints may have changed"
    if words[0] == "make":
        assert re.search(rf"^(?!\.)[^:=\n]*\b{words[1]}\b[^:=\n]*:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    if words[0] in ("torchrun", "python"):
        script = next(number for number, word in enumerate(words) if word.endswith(".py"))
        beside = {program(block) for block in blocks_of(item.block.page)}
        own = {words[script]} & {"pretrain_gpt.py", *beside}
        assert own or (ROOT / words[script]).is_file()
        if "run" in words[:script]:
            parser().parse_args(words[words.index("run") :])
    else:
        script = 0
        assert os.access(ROOT / words[0], os.X_OK)
    ours = features.add_arguments(argparse.ArgumentParser(exit_on_error=False))
    ours.parse_known_args([word.replace("examples/", f"{ROOT}/examples/") for word in words[script + 1 :]])


@each([block for block in blocks("python") if program(block) is None])
def test_names_that_are_imported_exist(item):
    for node in ast.walk(ast.parse(item.text)):
        if isinstance(node, ast.Import):
            assert all(importlib.util.find_spec(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            assert not [alias.name for alias in node.names if not hasattr(module, alias.name)]


@each(blocks("pycon"))
def test_sessions_print_what_is_shown(item):
    test = doctest.DocTestParser().get_doctest(item.text, {}, item.place, item.place, item.line)
    said = []
    assert test.examples
    assert not doctest.DocTestRunner(verbose=False).run(test, out=said.append).failed, "".join(said)


@pytest.mark.needs_torch("2.13", "DTensor's rules")
def test_programs_train(tmp_path):
    """One after the other in one interpreter, on one rank, with the arguments that the page gives them."""
    calls = []
    for number, block in enumerate(block for block in blocks("python") if program(block)):
        name = program(block)
        (given,) = {
            command.text.split(f" {name}", 1)[1]
            for command in commands()
            if command.block.page == block.page and f" {name}" in command.text
        }
        script = tmp_path / f"{number}_{block.page.stem}_{name}"
        script.write_text(block.text)
        calls.append([str(script), *shlex.split(given)])
    # The adaptor, and what it patches, come last: the others are for torch alone.
    calls.sort(key=lambda call: "megatron_adaptor" in Path(call[0]).read_text())
    assert len(calls) == 6
    driver = "import runpy, sys\nfor sys.argv in {}:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("MINDSPEED_MEM")}
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    alone = {**clean, **rank, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    command = [warm.python(), "-c", driver.format(calls)]
    done = subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^ +0( +\d+\.\d+){5}", done.stdout + done.stderr, re.MULTILINE), done.stdout + done.stderr


def parser_flags(one: argparse.ArgumentParser) -> set[str]:
    flags = set(one._option_string_actions)
    for action in one._actions:
        if isinstance(action, argparse._SubParsersAction):
            flags = flags.union(*map(parser_flags, action.choices.values()))
    return flags


@functools.cache
def known_flags() -> set[str]:
    """Of our parsers, and what examples, benchmarks and the code that reads other people's options name."""
    ours = parser_flags(parser()) | parser_flags(features.add_arguments(argparse.ArgumentParser()))
    others = (ROOT / "mindspeed_mem" / name for name in ("features/incompatible.py", "tools/from_megatron.py"))
    files = [*ROOT.glob("examples/*.*"), *ROOT.glob("benchmarks/*.py"), *others]
    return ours.union(OTHERS, *(named_flags(path.read_text()) for path in files))


def named_flags(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*[a-z0-9]", text))


def test_the_readme_names_every_flag_of_the_table():
    table = {flag for line in README.read_text().splitlines() if line.startswith("| `--") for flag in named_flags(line)}
    assert table == {feature.flag for feature in features.FEATURES}


@pytest.mark.parametrize("page", [README, *DOCS], ids=lambda page: page.name)
def test_flags_that_are_named_exist(page):
    assert not named_flags(page.read_text()) - known_flags()


@pytest.mark.parametrize("page", [README, *DOCS], ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    text = page.read_text().replace("examples/language/gpt/", "")  # ColossalAI's
    named = re.findall(
        r"\b(?:tests|examples|benchmarks|docs|patches|mindspeed_mem)/[\w/.]*\.(?:py|sh|yaml|md|json)", text
    )
    assert not [name for name in named if not (ROOT / name).is_file()]


def test_pages_that_the_code_names_exist():
    folders = ("mindspeed_mem", "patches", "examples", "benchmarks", "tests")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if path != Path(__file__)]
    named = {(path.name, page) for path in sources for page in re.findall(r"\bdocs/\w[\w-]*\.md\b", path.read_text())}
    assert not [pair for pair in named if not (ROOT / pair[1]).is_file()]


def test_figures_are_those_of_the_benchmarks():
    def rows(page):
        return [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in page.read_text().splitlines()
            if re.match(r"\|.*\| \d+\.\d+ \|", line)
        ]

    measured = [row for page in (RESULTS, *RESULTS.parent.glob("*/README.md")) for row in rows(page)]
    shown = rows(ROOT / "docs/benchmarks.md")
    assert len(shown) > 20
    assert not [row for row in shown if not any(set(row[1:]) <= set(line) for line in measured)]


@pytest.mark.slow
@pytest.mark.sweep
def test_the_site_builds_without_a_warning():
    done = subprocess.run(
        [ROOT / ".ci/docs"],
        env=os.environ | {"PYTHON": sys.executable, "VENV": ".venv-docs"},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    site = ROOT / "build/docs/docs"
    assert {page.stem for page in DOCS} <= {page.stem for page in site.glob("*.html")}
