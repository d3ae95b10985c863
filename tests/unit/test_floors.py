"""The floors of the house, read from the source: imports go down only and never in a circle; files and objects stay
small."""

import ast
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FLOORS = {
    # Below all: they need nothing but Python.
    "requirements": -1,
    "passes": -1,
    "output": -1,
    "progress": -1,
    "reserve": -1,
    "interruption": -1,
    "command_line": 0,
    "device": 0,
    "nested": 0,
    "optimizer_hooks": 0,
    "optimizer_kinds": 0,
    "model_sizes": 1,
    "patching": 1,
    "ranks": 1,
    "plan": 1,
    "activation": 2,
    "zero": 2,
    "optimizer_parallel": 2,
    "schedule": 2,
    "sdpa": 2,
    "adaptive": 3,
    "experimental": 3,
    "gemini": 3,
    "parallel": 3,
    "report": 3,
    "features": 4,
    "patches": 5,
    "megatron_adaptor": 6,
    "attachment": 6,
    "tools": 6,
    "__main__": 6,
}
TOP = 6
# What a script may build on, besides the adaptor: the rooms, not how they are wired into Megatron. (A benchmark may
# take the patches away and put them back, to measure both side by side.)
NOT_FOR_SCRIPTS = {"patching", "experimental", "features", "patches", "tools", "__main__"}
HOSTS = {"megatron", "mindspeed", "transformer_engine"}
MAX_LINES = 600
MAX_MEDIAN = 200
MAX_STATE = 25  # attributes that the methods of a class and of its bases assign to one object
KNOWN_CIRCLES: set[str] = set()
"""Rooms that still have some."""
KNOWN_STATE: set[str] = set()
"""Classes that still have more."""


def problems(root: Path) -> list[str]:
    """All violations in the tree at `root`, as lines "file:line: what is wrong"."""
    files = {folder: sorted((root / folder).rglob("*.py")) for folder in ("mindspeed_mem", "patches")}
    scripts = [path for folder in ("examples", "benchmarks") for path in sorted((root / folder).rglob("*.py"))]
    found = []
    for path in files["mindspeed_mem"] + files["patches"] + scripts:
        place = path.relative_to(root)
        for line, target, inside_function in _imports(path, root):
            wrong = _wrong_import(place, target, inside_function)
            if wrong:
                found.append(f"{place}:{line}: {wrong}")
    return list(dict.fromkeys(found)) + _too_large(root, files["mindspeed_mem"] + files["patches"], scripts)


def _too_large(root: Path, library: list[Path], scripts: list[Path]) -> list[str]:
    tests = sorted((root / "tests").rglob("*.py"))
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in library + scripts + tests}
    found = [f"{p.relative_to(root)}:1: {n} lines, at most {MAX_LINES}" for p, n in lines.items() if n > MAX_LINES]
    median = statistics.median(lines[path] for path in library) if library else 0
    if median > MAX_MEDIAN:
        found.append(f"mindspeed_mem, patches: the median file has {median:g} lines, at most {MAX_MEDIAN}")
    return found


def _wrong_import(place: Path, target: str, inside_function: bool) -> str | None:
    """What is wrong with the file at `place` (relative to the root) importing the module `target`, or None."""
    top = target.partition(".")[0]
    if top == "torch_npu" and place.as_posix() != "mindspeed_mem/device/npu.py":
        return "only mindspeed_mem/device/npu.py may import torch_npu"
    if top in {"patches", "tests", "examples", "benchmarks"}:
        return f"imports {target}; patches are mindspeed_mem.patches, the other folders are nobody's library"
    if top in HOSTS and place.parts[0] == "mindspeed_mem":
        return f"mindspeed_mem does not import {top}; what needs it belongs in patches"
    if top in HOSTS and place.parts[0] == "patches" and not inside_function:
        return f"imports {target} at module level; patch files are imported before it, so only inside functions"
    if top != "mindspeed_mem" or target == "mindspeed_mem":
        return None
    room = target.split(".")[1]
    if room not in FLOORS:
        return f"imports {target}, which has no floor"
    if place.parts[0] in {"examples", "benchmarks"}:
        allowed = room not in NOT_FOR_SCRIPTS or (place.parts[0] == "benchmarks" and room == "patching")
        return None if allowed else f"a script does not import mindspeed_mem.{room}"
    if room == "patches" and place.parts[0] == "patches" and target.split(".")[2:3] and target.split(".")[2][0] == "_":
        return None if place.name[0] != "_" else "what patch files share is no patch, and imports none"
    if place.as_posix() == "mindspeed_mem/__init__.py" and inside_function and room == "attachment":
        return None  # `mindspeed_mem.attach`, when it is asked for
    return _wrong_floor(place, room)


def _wrong_floor(place: Path, room: str) -> str | None:
    """What is wrong with a file of the library importing something of the room `room`, or None."""
    if place.as_posix() == "mindspeed_mem/__init__.py":
        return f"mindspeed_mem itself imports no room, but imports {room}"
    own = "patches" if place.parts[0] == "patches" else place.with_suffix("").parts[1]
    if own not in FLOORS:
        return f"the room {own} has no floor"
    if own == room == "patches":
        return "patch files do not import each other"
    if room == "patches" and FLOORS[own] != TOP:
        return "only megatron_adaptor and its floor import mindspeed_mem.patches"
    if own == room or FLOORS[room] < FLOORS[own] or FLOORS[room] == FLOORS[own] == TOP:
        return None
    return f"{own} (floor {FLOORS[own]}) imports {room} (floor {FLOORS[room]}); imports go down only"


def _imports(path: Path, root: Path, for_types: bool = False):
    """Yields (line, module imported, whether inside a function) of each import in the file, as absolute names; those
    that only a type checker sees if asked for."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    place = path.relative_to(root).with_suffix("")
    package = ("mindspeed_mem", *place.parts) if place.parts[0] == "patches" else place.parts
    package = package[:-1]
    for node, inside_function in _walk(tree, False, for_types):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name, inside_function
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
            base = base if node.level else node.module
            for name in node.names:
                # `from mindspeed_mem import plan` names a room, `from mindspeed_mem import __version__` does not.
                if base == "mindspeed_mem" and not _is_module(root, name.name):
                    yield node.lineno, base, inside_function
                else:
                    yield node.lineno, f"{base}.{name.name}", inside_function
        elif isinstance(node, ast.Subscript) and _is_modules(node.value) and isinstance(node.slice, ast.Constant):
            yield node.lineno, str(node.slice.value), inside_function
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            in_modules = called in {"get", "setdefault", "pop"} and _is_modules(node.func.value)
            if (called in {"import_module", "__import__"} or in_modules) and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value, inside_function


def _is_modules(node: ast.AST) -> bool:
    """Whether this is ``sys.modules``: what is taken from there is imported, too."""
    return isinstance(node, ast.Attribute) and node.attr == "modules" and isinstance(node.value, ast.Name)


def _is_module(root: Path, name: str) -> bool:
    folders = (root / "mindspeed_mem", root)
    return name in FLOORS or any((f / name).is_dir() or (f / f"{name}.py").is_file() for f in folders)


def _walk(node: ast.AST, inside_function: bool, for_types: bool):
    """All nodes below `node` that are executed, each with whether a function delays that."""
    for child in ast.iter_child_nodes(node):
        types_only = isinstance(child, ast.If) and ast.unparse(child.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}
        if types_only and not for_types:
            yield from _walk(ast.Module(child.orelse, []), inside_function, for_types)
            continue
        yield child, inside_function
        delayed = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from _walk(child, inside_function or delayed, for_types)


# ---- no circles, of modules or of the folders in a room


def circles(root: Path) -> list[str]:
    """Modules, and folders of modules, that import each other, as lines "a, b, c"; imports for type checkers and inside
    functions count, too."""
    paths = {}
    for path in [path for folder in ("mindspeed_mem", "patches") for path in sorted((root / folder).rglob("*.py"))]:
        parts = path.relative_to(root).with_suffix("").parts
        parts = ("mindspeed_mem", *parts) if parts[0] == "patches" else parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    modules: dict[str, set[str]] = {name: set() for name in paths}
    folders: dict[str, set[str]] = {}
    for name, path in paths.items():
        for _, target, _ in _imports(path, root, for_types=True):
            while target and target not in paths:
                target = target.rpartition(".")[0]
            if target in ("", name, "mindspeed_mem"):
                continue
            modules[name].add(target)
            own, other = _folder(name, paths), _folder(target, paths)
            if own != other and not f"{own}.".startswith(f"{other}.") and not f"{other}.".startswith(f"{own}."):
                folders.setdefault(own, set()).add(other)
    return [", ".join(circle) for circle in [*_circles(modules), *_circles(folders)]]


def _folder(name: str, paths: dict[str, Path]) -> str:
    return name if paths[name].name == "__init__.py" else name.rpartition(".")[0]


def _circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of nodes of which each reaches each other."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen, open_ends = set(), [start]
        while open_ends:
            new = graph.get(open_ends.pop(), set()) - seen
            seen |= new
            open_ends += new
        reached[start] = seen
    groups = {tuple(sorted(two for two in reached[one] if one in reached.get(two, ()))) for one in graph}
    return sorted(list(group) for group in groups if group)


# ---- no object with more state than one can keep in mind


def states(root: Path) -> dict[str, int]:
    """How many attributes the methods of each class and of its bases in the tree assign to ``self``."""
    own: dict[str, set[str]] = {}
    bases: dict[str, list[str]] = {}
    for path in [path for folder in ("mindspeed_mem", "patches") for path in sorted((root / folder).rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef):
                continue
            assigned = (
                one for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)
            )
            of_self = {one.attr for one in assigned if isinstance(one.value, ast.Name) and one.value.id == "self"}
            own.setdefault(node.name, set()).update(of_self)
            bases.setdefault(node.name, []).extend(ast.unparse(base).rpartition(".")[2] for base in node.bases)

    def all_of(name: str, below: tuple[str, ...] = ()) -> set[str]:
        above = [base for base in bases[name] if base in own and base not in (name, *below)]
        return own[name].union(*(all_of(base, (name, *below)) for base in above))

    return {name: len(all_of(name)) for name in own}


def test_the_tree_keeps_its_floors():
    assert list((ROOT / "mindspeed_mem").rglob("*.py")), f"no source below {ROOT}"
    found = problems(ROOT)
    assert not found, "\n".join(found)


def test_each_room_has_a_floor_and_each_floor_is_of_a_room():
    rooms = {
        path.stem
        for path in (ROOT / "mindspeed_mem").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert rooms - {"__init__"} | {"patches"} == set(FLOORS)


def test_the_page_on_the_architecture_has_these_floors():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d|below) \| (.+?) \|", page, re.MULTILINE)
    names = {name: floor for floor, names in rows for name in re.findall(r"`(\w+)(?:/|\.py)`", names)}
    expected = {room: "below" if floor < 0 else str(floor) for room, floor in FLOORS.items() if room != "__main__"}
    assert names == expected


def test_no_circle_of_imports():
    found = [circle for circle in circles(ROOT) if circle.split(".")[1] not in KNOWN_CIRCLES]
    assert not found, "\n".join(found)


def test_no_class_has_too_much_state():
    found = {name: count for name, count in states(ROOT).items() if count > MAX_STATE and name not in KNOWN_STATE}
    assert not found, f"at most {MAX_STATE} attributes"


# A made-up tree that keeps every rule, the allowed edge cases included.
GOOD = {
    "mindspeed_mem/__init__.py": "from pathlib import Path\n",
    "mindspeed_mem/__main__.py": "from mindspeed_mem import megatron_adaptor, patches\n",
    "mindspeed_mem/megatron_adaptor.py": "import mindspeed_mem.patches.torch_cpu\n"
    "from mindspeed_mem import __version__\n",
    "mindspeed_mem/features/checking.py": "from mindspeed_mem.plan import MemoryPlan\n",
    "mindspeed_mem/device/__init__.py": "from .npu import Npu\n",
    "mindspeed_mem/device/npu.py": "def load():\n    import torch_npu\n",
    "mindspeed_mem/plan/__init__.py": "from mindspeed_mem.plan.config import load\n",
    "mindspeed_mem/plan/config.py": "import yaml\n",
    "mindspeed_mem/activation/engine.py": "from ..device import get_backend\nfrom mindspeed_mem import plan\n",
    "mindspeed_mem/zero/engine.py": "import torch\n",
    "patches/__init__.py": "",
    "patches/_shared.py": "import sys\ndef utils():\n    return sys.modules['megatron.core.utils']\n",
    "patches/shares.py": "from mindspeed_mem.patches import _shared\n",
    "patches/torch_cpu.py": "import torch\nfrom mindspeed_mem.patching import around\n",
    "patches/schedules.py": "def patch():\n    from megatron.core import parallel_state\n",
    "examples/pretrain.py": "import mindspeed_mem.megatron_adaptor\nimport megatron.core\n"
    "from mindspeed_mem.plan import load_memory_config\n",
}


@pytest.fixture
def tree(tmp_path):
    """Writes the good tree with some files replaced or added; returns its root."""

    def write(changes=()):
        for name, text in {**GOOD, **dict(changes)}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return tmp_path

    return write


def test_a_good_tree_has_no_problem(tree):
    assert problems(tree()) == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("mindspeed_mem/plan/x.py", "from mindspeed_mem.activation import engine", "imports go down only"),
        ("mindspeed_mem/plan/x.py", "from ..activation.engine import Engine", "imports go down only"),
        ("mindspeed_mem/plan/x.py", "from .. import activation", "imports go down only"),
        ("mindspeed_mem/plan/x.py", "def f():\n    import mindspeed_mem.report", "imports go down only"),
        ("mindspeed_mem/device/x.py", "import mindspeed_mem.patching", "imports go down only"),
        ("mindspeed_mem/activation/x.py", "import mindspeed_mem.zero.engine", "imports go down only"),
        ("mindspeed_mem/zero/x.py", "from mindspeed_mem import activation", "imports go down only"),
        ("mindspeed_mem/features/x.py", "from mindspeed_mem import megatron_adaptor", "imports go down only"),
        ("mindspeed_mem/features/x.py", "from mindspeed_mem.patches import torch_cpu", "only megatron_adaptor and"),
        ("mindspeed_mem/__init__.py", "from mindspeed_mem import plan", "imports no room"),
        ("mindspeed_mem/plan/x.py", "import mindspeed_mem.tests.unit", "has no floor"),
        ("mindspeed_mem/attic.py", "import mindspeed_mem.plan", "attic has no floor"),
        ("mindspeed_mem/activation/x.py", "import megatron.core", "does not import megatron"),
        ("mindspeed_mem/activation/x.py", "def f():\n    from megatron import core", "does not import megatron"),
        ("mindspeed_mem/megatron_adaptor.py", "import mindspeed.megatron_adaptor", "does not import mindspeed"),
        ("mindspeed_mem/report/x.py", "m = __import__('transformer_engine')", "does not import transformer_engine"),
        ("mindspeed_mem/report/x.py", "import importlib as i\ni.import_module('megatron.core')", "does not import"),
        ("mindspeed_mem/report/x.py", "import sys\ns = sys.modules['megatron.core.utils']", "does not import megatron"),
        ("mindspeed_mem/report/x.py", "import sys\ns = sys.modules.get('megatron')", "does not import megatron"),
        ("mindspeed_mem/device/cuda.py", "import torch_npu", "only mindspeed_mem/device/npu.py"),
        ("patches/x.py", "def f():\n    import torch_npu.npu", "only mindspeed_mem/device/npu.py"),
        ("patches/x.py", "import mindspeed_mem.patches.schedules", "do not import each other"),
        ("patches/x.py", "from . import schedules", "do not import each other"),
        ("patches/x.py", "from .schedules import patch", "do not import each other"),
        ("patches/_x.py", "from .schedules import patch", "do not import each other"),
        ("patches/_x.py", "from . import _shared", "is no patch, and imports none"),
        ("mindspeed_mem/features/x.py", "from mindspeed_mem.patches import _shared", "only megatron_adaptor and"),
        ("patches/x.py", "from mindspeed_mem import megatron_adaptor", "imports go down only"),
        ("patches/x.py", "from megatron.core import tensor_parallel", "only inside functions"),
        ("patches/x.py", "try:\n    import megatron.core\nexcept ImportError:\n    pass", "only inside functions"),
        ("patches/x.py", "class A:\n    import mindspeed", "only inside functions"),
        ("mindspeed_mem/plan/x.py", "import patches.schedules", "patches are mindspeed_mem.patches"),
        ("mindspeed_mem/plan/x.py", "from tests.unit import something", "nobody's library"),
        ("examples/x.py", "from mindspeed_mem.patches import schedules", "a script does not import"),
        ("examples/x.py", "import mindspeed_mem.features", "a script does not import"),
        ("mindspeed_mem/plan/x.py", "a = 1\n" * 601, "601 lines, at most 600"),
        ("tests/unit/test_x.py", "a = 1\n" * 601, "601 lines, at most 600"),
    ],
)
def test_each_rule_is_caught(tree, name, text, expected):
    found = problems(tree({name: text}))
    assert len(found) == 1, found
    assert found[0].startswith(name) and expected in found[0]


def test_many_large_files_are_caught_by_their_median(tree):
    found = problems(tree({f"mindspeed_mem/plan/part{i}.py": "a = 1\n" * 300 for i in range(20)}))
    assert found == ["mindspeed_mem, patches: the median file has 300 lines, at most 200"]


FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {
                "x": "from mindspeed_mem.plan import y",
                "y": "from mindspeed_mem.plan.z import a",
                "z": "import mindspeed_mem.plan.x",
            },
            ["x, y, z"],
        ),
        ({"x": "from . import y", "y": "def f():\n    from .x import a"}, ["x, y"]),
        ({"x": "from . import y", "y": FOR_TYPES + "from .x import A"}, ["x, y"]),
        ({"x": "import sys\nfrom . import y", "y": "import sys\na = sys.modules['mindspeed_mem.plan.x']"}, ["x, y"]),
        ({"x": "from . import y", "y": "import torch", "z": "from . import x, y"}, []),
        # No two modules, but two folders.
        ({"a/x": "from ..b import y", "a/z": "", "b/y": "", "b/w": "from ..a.z import c"}, ["a, b"]),
        ({"a/x": "from ..b import y", "a/__init__": "", "b/__init__": "", "b/y": "", "x": "from .a import x"}, []),
    ],
)
def test_a_circle_is_found(tree, changes, expected):
    found = circles(tree({f"mindspeed_mem/plan/{name}.py": text for name, text in changes.items()}))
    assert [circle.replace("mindspeed_mem.plan.", "") for circle in found] == expected


def test_state_of_bases_counts(tree):
    below = "class A:\n    def __init__(self):\n        self.a = self.b = 1\n        self.c: int = 2\n"
    above = "from .x import A\nclass B(A):\n    d = 1\n    def f(self, other):\n        self.e, other.g = self.a, 1\n"
    found = states(tree({"mindspeed_mem/plan/x.py": below, "mindspeed_mem/plan/y.py": above}))
    assert found == {"A": 3, "B": 4}


def test_imports_for_type_checkers_are_free(tree):
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from megatron.core import ModelParallelConfig\n"
    assert problems(tree({"patches/x.py": text})) == []
    found = problems(tree({"patches/x.py": text + "else:\n    import megatron\n"}))
    assert len(found) == 1 and found[0].startswith("patches/x.py:5: ")


# ---- no name of a device decides anything

DEVICE_NAMES = {"cpu", "cuda", "npu", "simulated", "hip", "xpu", "mps", "privateuseone"}
DEVICE_FLAGS = {"is_cuda", "is_npu", "is_xpu", "is_mps"}


def named_devices(root: Path) -> list[str]:
    """Where a comparison asks for a device by name, as lines "file:line": ask the backend what it can do."""
    found = []
    for path in [path for folder in ("mindspeed_mem", "patches") for path in sorted((root / folder).rglob("*.py"))]:
        place = path.relative_to(root)
        if place.parts[1] in {"device", "experimental"} or place.name.startswith("cpu_"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                parts = [leaf for side in (node.left, *node.comparators) for leaf in ast.walk(side)]
                named = any(isinstance(leaf, ast.Constant) and leaf.value in DEVICE_NAMES for leaf in parts)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith":
                parts = [leaf for argument in node.args for leaf in ast.walk(argument)]
                named = any(
                    isinstance(leaf, ast.Constant) and str(leaf.value).rstrip(":") in DEVICE_NAMES for leaf in parts
                )
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
                named = isinstance(node.func.value, ast.Dict) and any(
                    isinstance(key, ast.Constant) and key.value in DEVICE_NAMES for key in node.func.value.keys
                )
            elif isinstance(node, ast.match_case):
                leaves = ast.walk(node.pattern)
                named = any(isinstance(leaf, ast.Constant) and leaf.value in DEVICE_NAMES for leaf in leaves)
            else:
                named = isinstance(node, ast.Attribute) and node.attr in DEVICE_FLAGS
            if named:
                found.append(f"{place}:{getattr(node, 'lineno', 0) or node.pattern.lineno}")
    return found


def test_no_name_of_a_device_decides_anything():
    assert named_devices(ROOT) == []


@pytest.mark.parametrize(
    "line",
    [
        'x = backend.type == "npu"',
        'x = "cpu" if backend.type != "simulated" else None',
        'x = tensor.device.type in ("cuda", "npu")',
        'x = str(device).startswith("cuda:")',
        "x = tensor.is_cuda",
        'x = {"cuda": 1}.get(backend.type)',
    ],
)
def test_a_name_that_decides_is_found(tmp_path, line):
    (tmp_path / "mindspeed_mem" / "device").mkdir(parents=True)
    (tmp_path / "patches").mkdir()
    for place in ("mindspeed_mem/engine.py", "mindspeed_mem/device/cuda.py", "patches/cpu_torch.py"):
        (tmp_path / place).write_text(f"y = 1\n{line}\n")
    assert named_devices(tmp_path) == ["mindspeed_mem/engine.py:2"]
