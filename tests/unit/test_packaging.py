"""`mindspeed_mem.patches` is one importable package in a wheel, an editable install and a bare checkout."""

import configparser
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.wheels import SOURCES

ROOT = Path(__file__).resolve().parents[2]

# Prints where the two packages lie and which patch files are found, without importing the patches' own needs.
PROBE = """
import importlib.util, json, pathlib, sys
import mindspeed_mem, mindspeed_mem.patches as patches
folder = pathlib.Path(patches.__file__).parent
names = sorted(path.stem for path in folder.glob("*.py"))
missing = [name for name in names if importlib.util.find_spec("mindspeed_mem.patches." + name) is None]
print(json.dumps([str(pathlib.Path(mindspeed_mem.__file__).parent), str(folder), names, missing]))
"""


def _modules(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}


def _probe(cwd: Path, *, path: Path | None = None, site: Path | None = None):
    """Runs PROBE in a fresh interpreter that sees no site-packages but `site` (with its .pth files)."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    if path:
        env["PYTHONPATH"] = str(path)
    code = PROBE if site is None else f"import site; site.addsitedir({str(site)!r})\n{PROBE}"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    package, patches, names, missing = json.loads(done.stdout)
    assert missing == []
    assert set(names) == {path.stem for path in (ROOT / "patches").glob("*.py")}
    return Path(package).resolve(), Path(patches).resolve()


def _pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", *map(str, arguments), "--no-deps", "--no-build-isolation", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the sources: a build leaves folders behind, and a stale build folder would hide a missing file."""
    root = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, root / name)
    return root


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    _pip("wheel", checkout, "--wheel-dir", folder)
    (path,) = folder.glob("mindspeed_mem-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder that holds the installed wheel."""
    folder = tmp_path_factory.mktemp("installed")
    _pip("install", wheel, "--target", folder)
    return folder


def test_setup_cfg_names_every_package_folder():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    listed = config["options"]["packages"].split()
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "mindspeed_mem").rglob("*.py")}
    folders |= {Path("mindspeed_mem") / path.parent.relative_to(ROOT) for path in (ROOT / "patches").rglob("*.py")}
    folders |= {Path("mindspeed_mem") / "examples", Path("mindspeed_mem") / "examples" / "configs"}
    assert listed == sorted(".".join(folder.parts) for folder in folders)


def test_every_package_folder_has_an_init_file():
    folders = {path.parent for room in ("mindspeed_mem", "patches") for path in (ROOT / room).rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_wheel_holds_all_modules_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"mindspeed_mem/{name}" for name in _modules(ROOT / "mindspeed_mem")}
    expected |= {f"mindspeed_mem/patches/{name}" for name in _modules(ROOT / "patches")}
    sources = [path for path in (ROOT / "mindspeed_mem").rglob("*") if path.suffix in (".cpp", ".h")]
    expected |= {path.relative_to(ROOT).as_posix() for path in sources}
    expected |= {"mindspeed_mem/py.typed", "mindspeed_mem/compat.json", "mindspeed_mem/patching/upstream.json"}
    expected |= {"mindspeed_mem/report/page.html", "mindspeed_mem/adaptive/problem/devices.json"}
    examples = [path for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".sh", ".yaml")]
    expected |= {f"mindspeed_mem/{path.relative_to(ROOT).as_posix()}" for path in examples}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith("LICENSE") for name in names)


def test_wheel_imports_elsewhere(installed, tmp_path):
    package = (installed / "mindspeed_mem").resolve()
    assert _probe(tmp_path, path=installed) == (package, package / "patches")


def test_wheel_imports_in_the_checkout_root(installed):
    # There the current folder comes first: the checkout's package shadows the wheel's, and finds its own patches.
    assert _probe(ROOT, path=installed) == (ROOT / "mindspeed_mem", ROOT / "patches")


def test_editable_install_imports_elsewhere(checkout, tmp_path):
    # --ignore-installed: pip would otherwise remove the editable install that these tests themselves may run from.
    _pip("install", "--ignore-installed", "--prefix", tmp_path / "prefix", "--editable", checkout)
    (site,) = {path.parent for path in (tmp_path / "prefix").rglob("mindspeed_mem-*.dist-info")}
    checkout = checkout.resolve()
    assert _probe(tmp_path, site=site) == (checkout / "mindspeed_mem", checkout / "patches")


def test_bare_checkout_imports(tmp_path):
    places = (ROOT / "mindspeed_mem", ROOT / "patches")
    assert _probe(tmp_path, path=ROOT) == places
    assert _probe(ROOT) == places


def test_patches_refuse_to_be_imported_under_a_second_name(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", "import patches"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ImportError" in done.stderr and "mindspeed_mem.patches" in done.stderr
