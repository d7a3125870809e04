"""The pytest plugin, each test in a run of pytest of its own."""

import json
import linecache
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pytest_mtpgraph
from mtpgraph import testing

from . import models

MODEL = """\
import torch

def branch(x):
    if x.sum() > 0:
        return x * 2
    return x + 1

def doubled(x):
    return x * 2

def attribute(x):
    return x * len(x)
"""

pytest_plugins = ["pytester"]

# hypothesis would be imported anew in each run
PLUGINS = ("-p", "pytest_mtpgraph", "-p", "no:cacheprovider", "-p", "no:hypothesispytest")


@pytest.fixture(scope="module", autouse=True)
def compiler_is_imported() -> None:
    """A run inside this process forgets what it imported, and torch cannot be imported twice."""
    from torch._inductor import compile_fx, test_operators

    assert compile_fx
    assert test_operators
    for compiled in (torch.compile(models.prints, backend="eager"), torch.compile(models.doubled)):
        with testing.record():
            compiled(torch.ones(2))
            compiled(torch.ones(3))


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Run pytest over one file of tests, with the plugin and a module ``model``."""
    monkeypatch.syspath_prepend(pytester.path)
    pytester.makepyfile(model=MODEL)
    header = "import pytest, torch\nfrom model import *\n\nX = torch.ones(4, 3)\n\n"

    def run_tests(source: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(test_it=header + source)
        sys.modules.pop("model", None)
        linecache.clearcache()
        return pytester.runpytest_inprocess(*PLUGINS, *options)

    return run_tests


BRANCH_LINE = MODEL.splitlines().index("    if x.sum() > 0:") + 1


def test_plugin_is_found_and_imports_no_torch(tmp_path: Path) -> None:
    """pytest loads it at its start, through the entry point, into runs that never compile."""
    declared = re.search(
        r"^\[project\.entry-points\.pytest11\]\n(\w+ = )\"(\w+)\"\n",
        (Path(__file__).parents[2] / "pyproject.toml").read_text(),
        re.MULTILINE,
    )
    assert declared is not None
    info = tmp_path / "stand_in-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stand-in\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[pytest11]\n{declared[1]}{declared[2]}\n")
    (tmp_path / "test_it.py").write_text(
        """
import sys

def test_nothing(pytestconfig):
    assert pytestconfig.pluginmanager.has_plugin("pytest_mtpgraph")
    assert "mtpgraph" not in sys.modules
    assert "torch" not in sys.modules
"""
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "test_it.py"],
        cwd=tmp_path,
        env=_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout


def _environment(*more: Path) -> dict[str, str]:
    source = Path(pytest_mtpgraph.__file__).parent.parent
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (source, *more)))}


def test_testing_imports_no_pytest(tmp_path: Path) -> None:
    program = "import sys, mtpgraph.testing; print('pytest' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "False", done.stderr


def test_fullgraph_marker(run) -> None:
    result = run(
        """
@pytest.mark.fullgraph
def test_good():
    torch.compile(doubled, backend="eager")(X)

@pytest.mark.fullgraph
def test_good_again():
    torch.compile(doubled, backend="eager")(X[:2])

@pytest.mark.fullgraph
def test_break():
    torch.compile(branch, backend="eager")(X)

@pytest.mark.fullgraph(max_graphs=2)
def test_break_allowed():
    torch.compile(branch, backend="eager")(X)

@pytest.mark.fullgraph
def test_recompile():
    step = torch.compile(doubled, backend="eager")
    step(X)
    step(X[:2])

@pytest.mark.fullgraph(max_recompiles=1)
def test_recompile_allowed():
    step = torch.compile(doubled, backend="eager")
    for size in (4, 2, 3):
        step(X[:size])

@pytest.mark.fullgraph
def test_two_functions():
    torch.compile(doubled, backend="eager")(X)
    torch.compile(attribute, backend="eager")(X)

@pytest.mark.fullgraph
def test_nothing():
    pass

@pytest.mark.fullgraph
def test_fails_itself():
    assert False, "its own failure"

@pytest.mark.fullgraph
def test_skipped():
    pytest.skip("no card")

@pytest.mark.fullgraph
@pytest.mark.xfail(strict=True)
def test_expected():
    torch.compile(branch, backend="eager")(X)

@pytest.mark.fullgraph
def test_check_alone():
    from mtpgraph.testing import assert_no_graph_breaks
    assert_no_graph_breaks(doubled, X)

def test_unmarked():
    torch.compile(branch, backend="eager")(X)
"""
    )
    result.assert_outcomes(passed=6, failed=5, skipped=1, xfailed=1)
    told = str(result.stdout)
    sections = dict(re.findall(r"_+ (test_\w+) _+\n(.*?)(?=\n_+ test_|\n=)", told, re.DOTALL))
    assert sections.keys() == {
        "test_break",
        "test_recompile",
        "test_two_functions",
        "test_nothing",
        "test_fails_itself",
    }
    assert f"model.py:{BRANCH_LINE}: `if x.sum() > 0:`" in sections["test_break"]
    assert "instead: keep both results and choose on the device" in sections["test_break"]
    assert "1 recompile, 0 allowed" in sections["test_recompile"]
    assert "tensor 'x' size mismatch at index 0. expected 4, actual 2" in sections["test_recompile"]
    assert "fullgraph: 2 graphs" in sections["test_two_functions"]
    assert "graph 2: attribute, " in sections["test_two_functions"]
    assert "the test compiled nothing" in sections["test_nothing"]
    assert "its own failure" in sections["test_fails_itself"]


@pytest.mark.parametrize("arguments", ["graphs=1", "0", "max_recompiles=-1", "max_graphs=True"])
def test_fullgraph_marker_refuses(run, arguments: str) -> None:
    result = run(f"@pytest.mark.fullgraph({arguments})\ndef test_it():\n    doubled(X)\n")
    assert result.ret != 0
    assert "fullgraph" in str(result.stdout) + str(result.stderr)


def test_graph_report_fixture(run) -> None:
    result = run(
        """
def test_it(graph_report):
    assert not graph_report
    step = torch.compile(doubled, backend="eager")
    step(X)
    assert len(graph_report.graphs) == 1
    assert graph_report.graphs[0].function == "doubled"
    step(X[:2])
    assert len(graph_report.recompiles) == 1
    assert not graph_report.breaks
    torch.compile(branch, backend="eager")(X)
    assert graph_report.breaks[0].code == "if x.sum() > 0:"
    assert not graph_report.rewrites
    assert not graph_report.host_syncs

def test_next(graph_report):
    assert not graph_report
    torch.compile(doubled, backend="eager")(X)
    assert not graph_report.recompiles
"""
    )
    result.assert_outcomes(passed=2)


REPORTED = """
@pytest.mark.parametrize("name", ["<script>alert(1)</script>"])
def test_break(name):
    torch.compile(branch, backend="eager")(X)

def test_check():
    from mtpgraph.testing import assert_no_recompiles
    assert_no_recompiles(doubled, X, X[:2])

def test_nothing():
    pass
"""


def test_report_page(run, pytester: pytest.Pytester) -> None:
    result = run(REPORTED, "--mtpgraph-report=out/page.html")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*report: *page.html"])
    page = (pytester.path / "out/page.html").read_text()
    assert "2 tests compiled something" in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<script" not in page
    assert "http" not in page
    assert 'name="viewport"' in page
    assert f"model.py:{BRANCH_LINE}" in page
    assert str(pytester.path) not in page
    assert "if x.sum() &gt; 0:" in page
    assert "size mismatch at index 0" in page
    assert "test_nothing" not in page
    assert "instead: keep both results" in page


BREAKS = """
def test_known():
    torch.compile(branch, backend="eager")(X)

def test_good():
    torch.compile(doubled, backend="eager")(X)
"""
BASELINE = "--mtpgraph-baseline=known.json"


def test_baseline(run, pytester: pytest.Pytester) -> None:
    result = run(BREAKS, BASELINE, "--mtpgraph-update-baseline")
    result.assert_outcomes(passed=2)
    held = json.loads((pytester.path / "known.json").read_text())
    assert held["tests"] == {
        "test_it.py::test_known": [
            {
                "what": "graph break",
                "file": "model.py",
                "code": "if x.sum() > 0:",
                "kind": "data-dependent branch",
            }
        ]
    }
    result = run(BREAKS, BASELINE)
    result.assert_outcomes(passed=2)
    assert "stale" not in str(result.stdout)

    # the line moves, and the marker holds for what is new
    pytester.makepyfile(model="# a line more\n" + MODEL)
    marked = BREAKS.replace("def test_known", "@pytest.mark.fullgraph\ndef test_known")
    run(marked, BASELINE).assert_outcomes(passed=2)


def test_baseline_refuses_what_is_new(run) -> None:
    run(BREAKS, BASELINE, "--mtpgraph-update-baseline")
    worse = BREAKS + '    torch.compile(branch, backend="eager")(X)\n'
    result = run(worse, BASELINE)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["it compiles worse than the baseline", f"1. *model.py:{BRANCH_LINE}: `if x.sum() > 0:`"]
    )
    twice = BREAKS.replace(
        'branch, backend="eager")(X)', 'branch, backend="eager")(X)\n    test_recompiling()', 1
    )
    twice += "\ndef test_recompiling():\n    step = torch.compile(doubled, backend='eager')\n"
    twice += "    step(X), step(X[:2])\n"
    result = run(twice, BASELINE)
    result.assert_outcomes(passed=1, failed=2)
    assert "size mismatch at index 0" in str(result.stdout)


def test_baseline_tells_what_is_stale(run, pytester: pytest.Pytester) -> None:
    run(BREAKS, BASELINE, "--mtpgraph-update-baseline")
    held = json.loads((pytester.path / "known.json").read_text())
    held["tests"]["test_gone.py::test_it"] = held["tests"]["test_it.py::test_known"]
    (pytester.path / "known.json").write_text(json.dumps(held))
    better = BREAKS.replace("branch", "doubled")
    result = run(better, BASELINE)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        [
            "stale in the baseline: test_gone.py::test_it: * (its file is gone)",
            "stale in the baseline: test_it.py::test_known: graph break in model.py: `if x.sum()*",
        ]
    )
    # a run of some tests alone says nothing of the others, and keeps what it knows of them
    result = run(BREAKS, BASELINE, "--mtpgraph-update-baseline", "-k", "good")
    held = json.loads((pytester.path / "known.json").read_text())
    assert list(held["tests"]) == ["test_it.py::test_known"]
    run(better, BASELINE, "--mtpgraph-update-baseline")
    assert json.loads((pytester.path / "known.json").read_text())["tests"] == {}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--mtpgraph-update-baseline"], "needs --mtpgraph-baseline=PATH"),
        ([BASELINE], "there is no *known.json"),
        (["--mtpgraph-baseline=broken.json"], "broken.json is no baseline"),
        (["--mtpgraph-baseline=newer.json"], "has version 99, expected 1"),
    ],
)
def test_baseline_refuses_options(
    run, pytester: pytest.Pytester, options: list[str], told: str
) -> None:
    (pytester.path / "broken.json").write_text("[1]")
    (pytester.path / "newer.json").write_text('{"version": 99, "tests": {}}')
    result = run("def test_it():\n    pass\n", *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{told}*"])
