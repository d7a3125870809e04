"""The pytest plugin of mtpgraph: a marker, a fixture, a report page and a baseline.

It lies outside of the package ``mtpgraph`` because pytest imports every installed plugin at its
start, and ``import mtpgraph`` imports torch. Here torch is imported when a test asks for it.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from .baseline import Baseline, keys_of
from .page import render

if TYPE_CHECKING:
    from mtpgraph.testing import Problem, Record

_RECORD = pytest.StashKey["Record"]()
_SESSION = pytest.StashKey["_Session"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mtpgraph", "what torch.compile makes of the tests")
    group.addoption(
        "--mtpgraph-report",
        metavar="PATH",
        help="write one HTML page of all tests that compile something",
    )
    group.addoption(
        "--mtpgraph-baseline",
        metavar="PATH",
        help="fail on graph breaks and recompiles that are not in this JSON file",
    )
    group.addoption(
        "--mtpgraph-update-baseline",
        action="store_true",
        help="write the breaks and recompiles of this run to the baseline",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "fullgraph(max_graphs=1, max_recompiles=0): all that the test compiles stays within so "
        "many graphs, hence graph breaks, and recompiles",
    )
    session = config.stash[_SESSION] = _Session(config)
    config.pluginmanager.register(session, "pytest_mtpgraph.session")


@pytest.fixture
def graph_report(request: pytest.FixtureRequest) -> Record:
    """What the test has compiled so far: graphs, breaks, recompiles, findings, rewrites."""
    from mtpgraph.testing import Record

    return request.node.stash.setdefault(_RECORD, Record())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    marked = _budget(item) is not None
    judged = marked or item.config.stash[_SESSION].baseline is not None
    if judged or "graph_report" in getattr(item, "fixturenames", ()):
        from mtpgraph.testing.record import forget_compiled

        # what an earlier test compiled would be missing here, or turn a first compilation into
        # a recompile
        forget_compiled()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    session = item.config.stash[_SESSION]
    budget = _budget(item)
    if budget is None and not session.watches_all and _RECORD not in item.stash:
        return (yield)
    from mtpgraph.testing import Record, record

    with record(item.stash.setdefault(_RECORD, Record())) as found:
        result = yield
    if message := session.judge(item.nodeid, found, budget):
        pytest.fail(message, pytrace=False)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    found = item.stash.get(_RECORD, None)
    if call.when == "call" and found is not None:
        # plain values: a worker of pytest-xdist sends the report on
        report.mtpgraph = found.asdict()
    return report


class _Budget(NamedTuple):
    max_graphs: int
    max_recompiles: int


def _budget(item: pytest.Item) -> _Budget | None:
    marker = item.get_closest_marker("fullgraph")
    if marker is None:
        return None
    try:
        budget = _read_marker(*marker.args, **marker.kwargs)
    except TypeError as error:
        raise pytest.UsageError(
            f"{item.nodeid}: fullgraph takes max_graphs=1 and max_recompiles=0, got {marker}"
        ) from error
    for name, value, least in zip(budget._fields, budget, (1, 0), strict=True):
        if type(value) is not int or value < least:
            raise pytest.UsageError(
                f"{item.nodeid}: fullgraph({name}=...) must be an int of at least {least}, got "
                f"{value!r}"
            )
    return budget


def _read_marker(max_graphs: int = 1, max_recompiles: int = 0) -> _Budget:
    return _Budget(max_graphs, max_recompiles)


class _Session:
    """One run of pytest: its options, and what its tests compiled."""

    def __init__(self, config: pytest.Config) -> None:
        self._root = config.rootpath
        self._is_worker = hasattr(config, "workerinput")
        page, path = config.getoption("mtpgraph_report"), config.getoption("mtpgraph_baseline")
        self._page = Path(page).absolute() if page else None
        self._update = bool(config.getoption("mtpgraph_update_baseline"))
        if self._update and not path:
            raise pytest.UsageError("--mtpgraph-update-baseline needs --mtpgraph-baseline=PATH")
        self.baseline: Baseline | None = None
        if path:
            try:
                self.baseline = Baseline.read(Path(path).absolute(), new=self._update)
            except ValueError as error:
                raise pytest.UsageError(f"--mtpgraph-baseline: {error}") from error
        # outcome and record of each test that was watched
        self._tests: dict[str, tuple[str, dict[str, Any]]] = {}

    @property
    def watches_all(self) -> bool:
        """Every test is recorded, not only those that ask for it."""
        return self._page is not None or self.baseline is not None

    def judge(self, test: str, found: Record, budget: _Budget | None) -> str:
        """What is wrong with what a test compiled; empty if nothing is."""
        if self._update or (budget is None and self.baseline is None):
            return ""
        breaks = self._unknown(test, "graph break", found.breaks)
        recompiles = self._unknown(test, "recompile", found.recompiles)
        if budget is None:
            title = "it compiles worse than the baseline"
            return _told(title, [*breaks, *recompiles])
        known = len(found.breaks) - len(breaks)
        graphs = len(found.first_graphs)
        told = []
        if graphs > budget.max_graphs + known or len(breaks) >= budget.max_graphs:
            title = (
                f"fullgraph: {_counted(graphs, 'graph')} and "
                f"{_counted(len(breaks), 'graph break')}, at most "
                f"{_counted(budget.max_graphs + known, 'graph')} allowed"
            )
            traced = [
                f"graph {n}: {graph.function}, {graph.file}:{graph.line}, "
                f"{_counted(len(graph.ops), 'op')}"
                for n, graph in enumerate(found.first_graphs, 1)
            ]
            told.append("\n".join([_told(title, breaks) or title, *traced]))
        if len(recompiles) > budget.max_recompiles:
            title = (
                f"fullgraph: {_counted(len(recompiles), 'recompile')}, "
                f"{budget.max_recompiles} allowed"
            )
            told.append(_told(title, recompiles))
        if not found:
            told.append(
                "fullgraph: the test compiled nothing, so there is nothing to hold to a budget; "
                "call the compiled function in the test, and run it with torch.compile switched on"
            )
        return "\n\n".join(told)

    def _unknown(self, test: str, what: str, problems: list[Problem]) -> list[Problem]:
        """Problems that the baseline does not hold."""
        if self.baseline is None:
            return problems
        plain = [vars(problem) for problem in problems]
        return self.baseline.unknown(test, what, keys_of(what, plain, self._root), problems)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = getattr(report, "mtpgraph", None)
        if found is not None and report.when == "call":
            self._tests[report.nodeid] = (report.outcome, found)

    def pytest_sessionfinish(self) -> None:
        if self._is_worker:
            return
        if self._page is not None:
            self._page.parent.mkdir(parents=True, exist_ok=True)
            self._page.write_text(render(self._tests, self._root), encoding="utf-8")
        if self.baseline is not None and self._update:
            self.baseline.write(self._keys(), self._root)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.watches_all or self._is_worker:
            return
        lines = []
        if self._page is not None:
            lines.append(f"report: {self._page}")
        if self.baseline is not None and self._update:
            lines.append(f"baseline written: {self.baseline.path}")
        elif self.baseline is not None:
            stale = self.baseline.stale(self._keys(), self._root)
            lines += [f"stale in the baseline: {entry}" for entry in stale]
            if stale:
                lines.append("drop what is stale with --mtpgraph-update-baseline")
        if lines:
            terminalreporter.section("mtpgraph")
            for line in lines:
                terminalreporter.write_line(line)

    def _keys(self) -> dict[str, list[tuple[str, ...]]]:
        """Breaks and recompiles of each test that ran to its end, as the baseline knows them."""
        return {
            test: [
                *keys_of("graph break", found["breaks"], self._root),
                *keys_of("recompile", found["recompiles"], self._root),
            ]
            for test, (outcome, found) in self._tests.items()
            if outcome == "passed"
        }


def _told(title: str, problems: list[Problem]) -> str:
    if not problems:
        return ""
    return "\n".join([title, *(f"{number}. {p}" for number, p in enumerate(problems, 1))])


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
