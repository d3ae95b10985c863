"""From text to tokens on disk, by examples/gpt_corpus.py as a program."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest

from tests import warm
from tests.examples.jobs import EXAMPLES, numbers, start, train

END = 256


def build(cache, *paths):
    """The prefix of the indexed dataset made of these texts."""
    where = ["--data-path", *paths] if paths else []
    job = start([warm.python(), EXAMPLES / "gpt_corpus.py", *where, "--data-cache-path", cache], {}).succeeded()
    return job.output.strip().splitlines()[-1]


def tokens(prefix):
    return numpy.fromfile(prefix + ".bin", dtype=numpy.uint16)


def expected(*texts):
    return [token for text in texts for token in [*text.encode(), END]]


@pytest.mark.slow
def test_files_and_folders_in_order(tmp_path):
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / "a.txt").write_text("first")
    (folder / "b" / "c.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in ("sécond", "third")))
    (tmp_path / "last").write_text("last")
    prefix = build(tmp_path / "cache", folder, tmp_path / "last")
    assert tokens(prefix).tolist() == expected("first", "sécond", "third", "last")
    (tmp_path / "last").write_text("another")  # a changed text is built anew
    changed = build(tmp_path / "cache", folder, tmp_path / "last")
    assert tokens(changed).tolist() == expected("first", "sécond", "third", "another")
    assert tokens(prefix).tolist() == expected("first", "sécond", "third", "last")


@pytest.mark.slow
def test_the_standard_library_built_by_several_at_once(tmp_path):
    with ThreadPoolExecutor() as pool:
        prefixes = set(pool.map(build, [tmp_path / "cache"] * 3))
    assert len(prefixes) == 1
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1
    text = tokens(prefixes.pop())
    assert 100_000 < len(text) < 5_000_000 and text.max() == END
    assert b"import " in text[text < END].astype(numpy.uint8).tobytes()


@pytest.mark.slow
def test_training_on_text_and_on_the_indexed_dataset_is_the_same(tmp_path):
    (tmp_path / "text").write_text("".join(f"{i} plus {i} is {2 * i}.\n" for i in range(3000)))
    prefix = build(tmp_path / "cache", tmp_path / "text")
    arguments = ["--train-iters", "4", "--num-layers", "1", "--metrics-file"]
    train(*arguments, tmp_path / "from_text", "--data-path", tmp_path / "text").succeeded()
    train(*arguments, tmp_path / "indexed", "--data-path", prefix, "--vocab-size", "257").succeeded()
    assert len(numbers(tmp_path / "indexed")) == 4
    assert numbers(tmp_path / "indexed") == numbers(tmp_path / "from_text")
    several = ["--data-path", prefix, prefix, "--vocab-size", "257", "--eval-iters", "1", "--eval-interval", "4"]
    job = train(*arguments, tmp_path / "several", *several).succeeded()
    assert "validation loss at iteration 4" in job.output


@pytest.mark.slow
def test_a_tokenizer_file(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"one": 0, "two": 1, "</s>": 2, "[UNK]": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").write_text("one two three " * 2000)
    arguments = ["--tokenizer-model", tmp_path / "tokenizer.json", "--data-cache-path", tmp_path / "cache"]
    train("--data-path", tmp_path / "text", "--train-iters", "2", "--num-layers", "1", *arguments).succeeded()
    built = next((tmp_path / "cache").glob("text-*/corpus.bin"))
    assert numpy.fromfile(built, dtype=numpy.uint16)[:4].tolist() == [0, 1, 3, 0]


def test_a_tokenizer_file_needs_its_package(tmp_path):
    try:
        import tokenizers  # noqa: F401
    except ImportError:
        (tmp_path / "tokenizer.json").write_text("{}")
        train("--tokenizer-model", tmp_path / "tokenizer.json").refused("pip install tokenizers")
    else:
        train("--tokenizer-model", tmp_path / "absent").refused("absent: no such file")
