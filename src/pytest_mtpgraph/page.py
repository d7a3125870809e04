"""The report: one HTML page that needs nothing else, readable on a phone."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from .baseline import relative

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #1a7f37; --bad: #c62828; --note: #9a6700 }
@media (prefers-color-scheme: dark) { :root { --good: #4ac26b; --bad: #ff7b72; --note: #d4a72c } }
* { box-sizing: border-box }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 1rem }
h1 { font-size: 1.4rem; margin: 0 0 .5rem }
h2 { font-size: 1rem; margin: 1rem 0 .25rem }
p, li, summary { overflow-wrap: anywhere }
details { border: 1px solid var(--line); border-radius: .5rem; margin: .5rem 0;
  padding: .5rem .75rem }
details details { border: 0; margin: 0; padding: 0 }
summary { cursor: pointer; min-height: 2rem }
code, .where { font: .85em ui-monospace, monospace; overflow-wrap: anywhere }
ol, ul { margin: .25rem 0; padding-left: 1.4rem }
li { margin: .4rem 0 }
.badge { border: 1px solid; border-radius: 1rem; font-size: .8rem; margin-left: .3rem;
  padding: 0 .5rem; white-space: nowrap }
.good { color: var(--good) } .bad { color: var(--bad) } .note { color: var(--note) }
"""

_PARTS = (
    ("breaks", "graph break", "Graph breaks", "bad"),
    ("recompiles", "recompile", "Recompiles", "bad"),
    ("findings", "finding", "Findings of passes", "note"),
)


def render(tests: Mapping[str, tuple[str, Mapping[str, Any]]], root: Path) -> str:
    """The page of what tests compiled.

    Args:
        tests: outcome and record of each test, by its id; those that compiled nothing are left out
        root: paths below it are shown from there
    """
    shown = {test: (outcome, found) for test, (outcome, found) in tests.items() if _busy(found)}
    totals = {
        part: sum(len(_all(found, part)) for _, found in shown.values())
        for part in ("graphs", "breaks", "recompiles", "findings")
    }
    cards = "\n".join(_card(test, *shown[test], root) for test in shown)
    summary = ", ".join(
        [
            _counted(len(shown), "test") + " compiled something",
            _counted(totals["graphs"], "graph"),
            _counted(totals["breaks"], "graph break"),
            _counted(totals["recompiles"], "recompile"),
            _counted(totals["findings"], "finding"),
        ]
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>What the tests compiled</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>What the tests compiled</h1>
<p>{summary}</p>
{cards}
</body>
</html>
"""


def _card(test: str, outcome: str, found: Mapping[str, Any], root: Path) -> str:
    graphs = _all(found, "graphs")
    badges = [_badge(outcome, "good" if outcome == "passed" else "bad")]
    badges.append(_badge(_counted(len(graphs), "graph"), "good"))
    sections = []
    for part, one, title, tone in _PARTS:
        problems = _all(found, part)
        if problems:
            badges.append(_badge(_counted(len(problems), one), tone))
            items = "".join(_problem(problem, root) for problem in problems)
            sections.append(f"<h2>{title}</h2><ol>{items}</ol>")
    rewrites = _rewrites(found)
    if rewrites:
        items = "".join(f"<li><code>{escape(n)}</code>: {c}</li>" for n, c in rewrites.items())
        sections.append(f"<h2>Rewrites</h2><ul>{items}</ul>")
    items = "".join(_graph(graph, root) for graph in graphs)
    sections.append(f"<h2>Graphs</h2><ol>{items}</ol>")
    is_open = " open" if _all(found, "breaks") or _all(found, "recompiles") else ""
    return (
        f"<details{is_open}><summary><code>{escape(test)}</code>{''.join(badges)}</summary>"
        f"{''.join(sections)}</details>"
    )


def _problem(problem: Mapping[str, Any], root: Path) -> str:
    where = f"{relative(problem['file'], root)}:{problem['line']}" if problem["file"] else ""
    remedy = f"<br>instead: {escape(problem['remedy'])}" if problem["remedy"] else ""
    return (
        f'<li><span class="where">{escape(where)}</span> <code>{escape(problem["code"])}</code>'
        f"<br>{escape(problem['kind'])}: {escape(problem['reason'])}{remedy}</li>"
    )


def _graph(graph: Mapping[str, Any], root: Path) -> str:
    where = f"{relative(graph['file'], root)}:{graph['line']}"
    ops = "".join(
        f"<li><code>{escape(name)}</code>"
        + (f' <span class="where">{escape(relative(file, root))}:{line}</span>' if file else "")
        + "</li>"
        for name, file, line in graph["ops"]
    )
    again = ", compiled again" if graph["recompile"] else ""
    return (
        f'<li><code>{escape(graph["function"])}</code> <span class="where">{escape(where)}</span>'
        f"{again}<details><summary>{_counted(len(graph['ops']), 'op')}</summary><ol>{ops}</ol>"
        "</details></li>"
    )


def _badge(text: str, tone: str) -> str:
    return f'<span class="badge {tone}">{escape(text)}</span>'


def _busy(found: Mapping[str, Any]) -> bool:
    return any(_all(found, part) for part in ("graphs", "breaks", "recompiles"))


def _all(found: Mapping[str, Any], part: str) -> list[Any]:
    """What a record holds of one part, that of the checks in it too."""
    return [*found[part], *(item for check in found["checks"] for item in _all(check, part))]


def _rewrites(found: Mapping[str, Any]) -> dict[str, int]:
    total = dict(found["rewrites"])
    for check in found["checks"]:
        for name, count in _rewrites(check).items():
            total[name] = total.get(name, 0) + count
    return total


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
