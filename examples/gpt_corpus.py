"""From text to Megatron's indexed dataset: what the user names, or the source text of Python's standard library.

Everything here happens before the ranks know of each other: each takes a lock on the cache folder, the first builds,
the others find what it built. So it makes no difference whether nodes share the folder, or whether two jobs start at
once.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import sys
import sysconfig
from pathlib import Path

import numpy
from gpt_arguments import UsageError

FORMAT = 1
"""Part of every cache key: raise it when the same text would give other tokens or other documents."""
STDLIB_BYTES = 4_000_000
LONGEST_SEQUENCE = 2048
"""Tokens. Longer documents are stored as several sequences: the split into train, valid and test is by sequence."""
LEFT_OUT = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "turtledemo"}


class ByteTokenizer:
    """One token per byte of the UTF-8 text, and one for the end of a document."""

    vocab_size = 257
    eod = 256
    unique_identifiers = {"class": "ByteTokenizer"}

    def encode(self, text):
        """int64 array of tokens of `text` (bytes or str)."""
        data = text.encode() if isinstance(text, str) else text
        return numpy.frombuffer(data, dtype=numpy.uint8).astype(numpy.int64)


class FileTokenizer:
    """A Hugging Face tokenizer.json, read with the package `tokenizers`."""

    ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")

    def __init__(self, path):
        import tokenizers

        data = Path(path).read_bytes()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the package raises plain Exception
            raise UsageError(f"--tokenizer-model {path}: not a Hugging Face tokenizer.json ({error})") from error
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        ids = (self._tokenizer.token_to_id(end) for end in self.ENDS)
        self.eod = next((i for i in ids if i is not None), None)
        if self.eod is None:
            raise UsageError(f"--tokenizer-model {path}: it has none of the end tokens {', '.join(self.ENDS)}")
        self.unique_identifiers = {"class": "FileTokenizer", "sha256": hashlib.sha256(data).hexdigest()}

    def encode(self, text):
        """int64 array of tokens of `text` (bytes or str), without special tokens."""
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        return numpy.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=numpy.int64)


class ForeignTokenizer:
    """Stands for the unknown tokenizer of an indexed dataset: its size is all that training needs."""

    eod = None

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size
        self.unique_identifiers = {"class": "ForeignTokenizer", "vocab_size": str(vocab_size)}


def prepare_corpus(args):
    """(prefixes of indexed datasets, tokenizer, folder for their indices), building and caching what is missing."""
    cache = cache_folder(args.data_cache_path)
    tokenizer = FileTokenizer(args.tokenizer_model) if args.tokenizer_model else ByteTokenizer()
    paths = [os.path.abspath(path) for path in args.data_path or []]
    indexed = [path for path in paths if os.path.isfile(path + ".idx") and not os.path.isdir(path)]
    if indexed:
        if len(indexed) < len(paths):
            raise UsageError("--data-path names indexed datasets and text; give only one of the two kinds")
        if not args.tokenizer_model and args.vocab_size is None:
            raise UsageError("--data-path names an indexed dataset: give its --tokenizer-model FILE or --vocab-size N")
        if not args.tokenizer_model:
            tokenizer = ForeignTokenizer(args.vocab_size)
        return indexed, tokenizer, cache / f"indices-{_digest(indexed)}"

    if args.vocab_size is not None:
        raise UsageError("--vocab-size is for indexed datasets only; text has the vocabulary of its tokenizer")
    sources = text_files(paths) if paths else stdlib_files()
    stamps = [(str(path), path.stat().st_size, path.stat().st_mtime_ns if paths else 0) for path in sources]
    key = _digest([FORMAT, tokenizer.unique_identifiers, None if paths else platform.python_version(), stamps])
    folder = cache / f"{'text' if paths else 'stdlib'}-{key}"
    with locked(folder):
        if not folder.is_dir():
            build(folder, documents(sources), tokenizer)
    return [str(folder / "corpus")], tokenizer, folder / "indices"


def cache_folder(path):
    """The folder for built datasets, made if it does not exist."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(path) if path else Path(base, "mindspeed_mem")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {folder} ({error}); choose one: --data-cache-path DIR") from error
    return folder.resolve()


@contextlib.contextmanager
def locked(folder):
    """Only one process on the machines that share this file system is inside, per folder."""
    lock = folder.with_name(folder.name + ".lock")
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(lock, "a"))
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise UsageError(f"cannot lock {lock} ({error}); choose a local folder: --data-cache-path DIR") from error
        yield


def stdlib_files():
    """Paths of the standard library's modules, the shortest names first, up to STDLIB_BYTES; the same on every run."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT]  # site-packages may hold thousands
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    found.sort(key=lambda path: (len(path.relative_to(root).parts), str(path)))
    chosen, total = [], 0
    for path in found:
        size = path.stat().st_size
        if size and total + size <= STDLIB_BYTES:
            chosen.append(path)
            total += size
    if total < 100_000:
        raise UsageError(f"{root} does not hold the source of Python's standard library; name a text: --data-path FILE")
    return chosen


def text_files(paths):
    """The files themselves and those in the folders named, in a fixed order."""
    found = []
    for path in map(Path, paths):
        inside = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        if not inside:
            raise UsageError(f"--data-path {path}: the folder is empty")
        found += inside
    return found


def documents(sources):
    """Yields the text of each document, bytes or str: a file, or one line of a .jsonl file."""
    for path in sources:
        if path.suffix != ".jsonl":
            yield path.read_bytes()
            continue
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    text = json.loads(line)["text"]
                except (ValueError, KeyError, TypeError) as error:
                    raise UsageError(f'{path}:{number}: not a JSON object with a key "text" ({error!r})') from error
                if not isinstance(text, str):
                    raise UsageError(f'{path}:{number}: the value of "text" is not a string')
                yield text


def build(folder, texts, tokenizer):
    """Write corpus.bin and corpus.idx into `folder`, which appears only when they are complete."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    unfinished = folder.with_name(f"{folder.name}.{platform.node()}.{os.getpid()}")
    unfinished.mkdir()
    builder = IndexedDatasetBuilder(str(unfinished / "corpus.bin"), DType.optimal_dtype(tokenizer.vocab_size))
    total = 0
    for text in texts:
        tokens = numpy.append(tokenizer.encode(text), tokenizer.eod)
        lengths = [LONGEST_SEQUENCE] * (len(tokens) // LONGEST_SEQUENCE) + [len(tokens) % LONGEST_SEQUENCE]
        builder.add_document(tokens, [length for length in lengths if length])
        total += len(tokens)
    builder.finalize(str(unfinished / "corpus.idx"))
    if total < 2:
        raise UsageError("--data-path: there is no text in these files")
    unfinished.rename(folder)


def _digest(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


if __name__ == "__main__":  # for scripts: build the text and say where it is, as Megatron-LM's --data-path wants it
    from gpt_arguments import make_parser

    try:
        print(prepare_corpus(make_parser().parse_args())[0][0])
    except UsageError as error:
        sys.exit(f"gpt_corpus.py: error: {error}")
