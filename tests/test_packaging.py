"""The sdist, the wheel built from it, and the editable install, each used from elsewhere."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import mtpgraph

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
# the plugin stands apart: pytest imports it at every start, and must not import torch with it
PACKAGES = ("mtpgraph", "pytest_mtpgraph")
LINKED = ("ops", "kernels", "compile_passes")
IMPORTS = "import mtpgraph, mtpgraph.ops, mtpgraph.kernels, mtpgraph.compile_passes"


def run(*args: str | Path, cwd: Path, path: Path | None = None) -> str:
    """What a command prints; ``path`` is all that it gets as PYTHONPATH."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [str(arg) for arg in args], cwd=cwd, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


def copy_tree(to: Path) -> Path:
    """The tree without what is hidden or built: builds leave their traces in the copy."""

    def ignore(folder: str, names: list[str]) -> list[str]:
        built = {"build", "dist", "site"} if Path(folder) == ROOT else set()
        return [
            name
            for name in names
            if name in built
            or name.startswith(".")
            or name == "__pycache__"
            or name.endswith(".egg-info")
        ]

    return Path(shutil.copytree(ROOT, to, symlinks=True, ignore=ignore))


def package_files(tree: Path) -> set[str]:
    """Every file of the import packages as ``mtpgraph/...``, through the links."""
    source = tree / "src"
    return {
        str(Path(folder, name).relative_to(source))
        for package in PACKAGES
        for folder, _, names in os.walk(source / package, followlinks=True)
        for name in names
        if not name.endswith(".pyc")
    }


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_tree(tmp_path_factory.mktemp("packaging") / "tree")


@pytest.fixture(scope="module")
def dist(tree: Path) -> Path:
    """The folder with the sdist, and the wheel made from the sdist."""
    out = tree.parent / "dist"
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, tree, cwd=tree.parent)
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """A folder that holds the wheel's contents and nothing else."""
    target = wheel.parent.parent / "installed"
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", target)
    run(*pip, wheel, cwd=wheel.parent)
    return target


def test_packaging_sdist_holds_the_folders_as_files(dist: Path, tree: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    top = f"mtpgraph-{mtpgraph.__version__}"
    names = {member.name.removeprefix(f"{top}/") for member in members if member.isfile()}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names
    assert {f"src/{name}" for name in package_files(tree)} <= names
    assert not [member.name for member in members if member.issym() or member.islnk()]


def test_packaging_wheel_holds_the_package_and_nothing_else(wheel: Path, tree: Path) -> None:
    """A data file or a subpackage that the build configuration misses shows here, by its name."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = f"mtpgraph-{mtpgraph.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {*PACKAGES, info}
    assert {name for name in names if not name.startswith(info)} == package_files(tree)
    assert "mtpgraph/py.typed" in names
    for folder in LINKED:
        modules = {f"mtpgraph/{folder}/{path.name}" for path in (ROOT / folder).glob("*.py")}
        assert f"mtpgraph/{folder}/__init__.py" in modules
        assert modules <= names
    assert f"{info}/licenses/LICENSE" in names


def test_packaging_wheel_imports_from_elsewhere(installed: Path, tmp_path: Path) -> None:
    program = f"{IMPORTS}; print(mtpgraph.__file__)"
    printed = run(sys.executable, "-P", "-c", program, cwd=tmp_path, path=installed)
    assert Path(printed) == installed / "mtpgraph" / "__init__.py"


def test_packaging_wheel_brings_no_other_top_level_name(installed: Path, tmp_path: Path) -> None:
    """``ops`` and ``kernels`` are import names of other people's packages."""
    for folder in LINKED:
        program = f"""
try:
    import {folder}
except ModuleNotFoundError as error:
    print(error.name)
"""
        printed = run(sys.executable, "-P", "-c", program, cwd=tmp_path, path=installed)
        assert printed == folder


def test_packaging_entry_points_load(installed: Path, tmp_path: Path) -> None:
    program = f"""
from importlib.metadata import distributions
(dist,) = distributions(name="mtpgraph", path=[{str(installed)!r}])
for entry in sorted(dist.entry_points):
    print(entry.group, entry.name, callable(entry.load()))
"""
    printed = run(sys.executable, "-P", "-c", program, cwd=tmp_path, path=installed)
    assert printed.splitlines() == [
        "console_scripts mtpgraph True",
        "torch_dynamo_backends mtpgraph True",
        "pytest11 pytest_mtpgraph False",
    ]


def test_packaging_editable_install_is_live(tmp_path: Path) -> None:
    tree = copy_tree(tmp_path / "tree")
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    python = venv / "bin" / "python"
    # Lends torch and setuptools; a venv made with --system-site-packages would skip this very venv.
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path)
    outer = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    (Path(site) / "outer.pth").write_text("\n".join(outer) + "\n")

    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index")
    run(*pip, "--no-build-isolation", "--editable", tree, cwd=tmp_path)

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    program = f"{IMPORTS}; print(mtpgraph.__file__)"
    printed = run(python, "-P", "-c", program, cwd=elsewhere)
    assert Path(printed) == tree / "src" / "mtpgraph" / "__init__.py"

    (tree / "ops" / "added_later.py").write_text("ANSWER = 42\n")
    program = "from mtpgraph.ops.added_later import ANSWER; print(ANSWER)"
    assert run(python, "-P", "-c", program, cwd=elsewhere) == "42"
