"""An explanation as HTML: one page without scripts or anything from elsewhere.

``fragment`` is for notebooks: its style names only what it holds itself. ``page`` puts it into a
document of its own. Both follow the reader's light or dark setting.
"""

from collections.abc import Iterable, Sequence
from html import escape

from ..compile_passes.report import Finding
from . import words
from .record import Break, Explanation, Recompile
from .style import STYLE
from .tree import Line, lines_of


def page(explanation: Explanation) -> str:
    """A whole document."""
    title = escape(f"{explanation.name}: {explanation.verdict}")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>body {{ margin: 0 }}</style>\n</head>\n<body>\n"
        f"{fragment(explanation)}\n</body>\n</html>\n"
    )


def fragment(explanation: Explanation) -> str:
    """What goes into a page that others own."""
    parts = [
        _head(explanation),
        _problems(explanation),
        _ops(explanation),
        _largest(explanation),
        _passes(explanation),
        _inputs(explanation),
        _recompiles(explanation),
        _padding(explanation),
    ]
    body = "\n".join(part for part in parts if part)
    return f'<div class="mtpgraph-explain">\n<style>\n{STYLE}</style>\n{body}\n</div>'


def _head(explanation: Explanation) -> str:
    ops = explanation.ops
    bound = any(op.at_most for op in ops)
    syncs = [b for b in explanation.breaks if b.host_sync]
    syncs += [f for f in explanation.findings if f.kind == "host sync"]
    tiles = (
        ("graphs", len(explanation.graphs), len(explanation.graphs) > 1),
        ("graph breaks", len(explanation.breaks), bool(explanation.breaks)),
        ("host syncs", len(syncs), bool(syncs)),
        ("ops", f"{len(ops):,}", False),
        ("of mtpgraph", sum(op.ours for op in ops), False),
        ("bytes, at most" if bound else "bytes", words.size(explanation.bytes), False),
    )
    shown = "".join(
        f'<div class="tile{" bad" if bad else ""}"><b>{value}</b><span>{name}</span></div>'
        for name, value, bad in tiles
    )
    verdict = "good" if explanation.ok else "bad"
    notes = "".join(f"<p>{escape(note)}</p>" for note in explanation.notes)
    return (
        f"<header><h1>{_breakable(explanation.name)}</h1>"
        f'<p class="verdict {verdict}">{escape(explanation.verdict)}</p>{notes}'
        f'<div class="tiles">{shown}</div>'
        f'<p class="quiet">traced with torch {escape(explanation.torch)}; the step did not run on '
        f"your tensors</p></header>"
    )


def _problems(explanation: Explanation) -> str:
    cards = [
        _card("host sync" if one.host_sync else "graph break", one) for one in explanation.breaks
    ]
    cards += [_card(one.kind, one) for one in explanation.findings]
    return _section("What to change", "".join(cards)) if cards else ""


def _card(kind: str, one: Break | Finding) -> str:
    bad = isinstance(one, Break) or kind in ("host sync", "mutation hazard")
    code = f"<pre>{escape(one.code)}</pre>" if one.code else ""
    remedy = f'<p class="remedy">{_marked(one.remedy)}</p>' if one.remedy else ""
    at = words.place(one.file, one.line) or getattr(one, "op", "")
    by = f", found by {one.found_by}" if isinstance(one, Finding) else ""
    return (
        f'<article class="card{" bad" if bad else ""}"><p class="where"><span class="chip">'
        f"{escape(kind)}</span> {_breakable(at)}{escape(by)}</p>{code}"
        f"<p>{_marked(one.reason)}</p>{remedy}</article>"
    )


def _ops(explanation: Explanation) -> str:
    sections = []
    top = max((line.bytes for g in explanation.graphs for line in _leaves(lines_of(g))), default=1)
    for number, graph in enumerate(explanation.graphs, start=1):
        several = len(explanation.graphs) > 1
        title = f"Graph {number}" if several else "Ops, line by line"
        key = (
            '<p class="quiet">Lines that call others open. Marked: '
            '<span class="op ours">ours</span> an op of mtpgraph, '
            '<span class="op writes">x</span> a tensor that the line writes to. '
            "Bars and bytes: read and written.</p>"
        )
        lines = _lines(lines_of(graph), max(top, 1), "", is_open=True)
        sections.append(_section(title, (key if number == 1 else "") + lines))
    return "".join(sections)


def _leaves(lines: Iterable[Line]) -> Iterable[Line]:
    for line in lines:
        if line.ops:
            yield Line(line.file, line.line, line.ops)
        yield from _leaves(line.inside)


def _lines(lines: Sequence[Line], top: int, file: str, is_open: bool) -> str:
    shown = []
    for line in lines:
        if line.file and line.file != file:
            file = line.file
            shown.append(f'<li class="file">{_breakable(words.short_path(file))}</li>')
        row = _row(line, top)
        if line.inside:
            inside = _lines(line.inside, top, file, False)
            # lines that repeat together have no line of their own to say what they are
            opened = " open" if is_open or not line.file else ""
            row = f"<details{opened}><summary>{row}</summary>{inside}</details>"
        shown.append(f"<li>{row}</li>")
    return f'<ol class="lines">{"".join(shown)}</ol>'


def _row(line: Line, top: int) -> str:
    times = f'<span class="chip">{line.times} times in a row</span>' if line.times > 1 else ""
    code = f"<code>{escape(line.code)}</code>" if line.file else ""
    names = [
        f'<span class="op{" ours" if ours else ""}">{escape(name)}</span>'
        for name, ours in words.op_names(line.first)
    ]
    names += [f'<span class="op writes">{escape(name)}</span>' for name in words.mutated(line)]
    if line.inside:
        names.append(f'<span class="quiet">{words.count(len(line.all_ops), "op")}</span>')
    share = min(1.0, line.bytes / top)
    bar = "" if line.inside else f'<i style="width:{100 * share:.1f}%"></i>'
    moved = words.moved(line.all_ops)
    bytes_ = f'<span class="bytes"><span>{moved}</span>{bar}</span>' if moved else ""
    return (
        f'<span class="row"><span class="no">{line.line or ""}</span>'
        f'<span class="what">{code}{times}<span class="ops">{"".join(names)}</span></span>'
        f"{bytes_}</span>"
    )


def _largest(explanation: Explanation) -> str:
    movers = words.largest(explanation.ops)
    if not movers:
        return ""
    top = movers[0].read + movers[0].written
    rows = []
    for one in movers:
        total = one.read + one.written
        calls = f" in {one.calls} calls" if one.calls > 1 else ""
        split = f"{words.size(one.read)} read, {words.size(one.written)} written"
        rows.append(
            f'<li><span class="row"><span class="what"><b>{escape(one.name)}</b>{calls}'
            f'<span class="quiet">{_breakable(one.where)}; {split}</span></span>'
            f'<span class="bytes"><span>{words.size(total, one.at_most)}</span>'
            f'<i style="width:{100 * total / top:.1f}%"></i></span></span></li>'
        )
    why = f'<p class="quiet">{escape(words.WHY_BYTES)}</p>'
    return _section("What moves most", f'{why}<ol class="lines">{"".join(rows)}</ol>')


def _passes(explanation: Explanation) -> str:
    items = []
    for one in explanation.passes:
        done = "disabled" if one.disabled else words.count(one.count, "rewrite")
        fired = " good" if one.count else ""
        left = "".join(
            f"<li>{_breakable(words.place(f.file, f.line) or f.op)}: left alone, "
            f"{_marked(f.reason)}{'; ' + _marked(f.remedy) if f.remedy else ''}</li>"
            for f in one.left_alone
        )
        items.append(
            f'<article class="card"><p class="where"><b>{escape(one.name)}</b> '
            f'<span class="chip{fired}">{done}</span></p><p class="quiet">{escape(one.rewrite)}</p>'
            f"{f'<ul>{left}</ul>' if left else ''}</article>"
        )
    return _section("Passes", "".join(items))


def _inputs(explanation: Explanation) -> str:
    rows = [
        (one.name, words.shape(one), "written" if one.written else "")
        for one in explanation.inputs
        if not one.parameter
    ]
    weights = sum(one.parameter for one in explanation.inputs)
    text = words.STARS
    if weights:
        text += f" Besides: {weights} weights, buffers and numbers of modules."
    return _section("Inputs", _table(("input", "value", ""), rows), text)


def _recompiles(explanation: Explanation) -> str:
    often, fixed = words.seldom(explanation.recompiles)

    def rows(some: Iterable[Recompile]) -> list[tuple[str, ...]]:
        return [(r.name, r.value, f"{words.short_path(r.where)} {r.code}".strip()) for r in some]

    head = ("what", "now", "because of")
    body = _table(head, rows(often))
    if fixed:
        body += (
            f"<details><summary>{len(fixed)} more, which change with the model alone: sizes of "
            f"states, constants of modules</summary>{_table(head, rows(fixed))}</details>"
        )
    text = "" if often else "Only other dtypes, devices or structures of the arguments."
    return _section("Compiles anew for another", body, text)


def _padding(explanation: Explanation) -> str:
    rows = [
        (one.name, "" if one.dim is None else str(one.dim), one.per, one.pad, one.why)
        for one in explanation.padding or []
    ]
    table = _table(("input", "dim", "per", "pad", "why"), rows)
    return _section("Padding", table, explanation.padding_verdict)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    body = "".join(
        f"<tr>{''.join(_cell(name, cell) for name, cell in zip(head, row, strict=True))}</tr>"
        for row in rows
    )
    if not body:
        return ""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _cell(name: str, text: str) -> str:
    # on a narrow screen a row becomes a card, and the name of the column stands in the cell
    return f'<td data-of="{escape(name)}">{_breakable(text)}</td>' if text else "<td></td>"


def _section(title: str, body: str, text: str = "") -> str:
    said = f'<p class="quiet">{escape(text)}</p>' if text else ""
    return f"<section><h2>{escape(title)}</h2>{said}{body}</section>"


def _breakable(text: str) -> str:
    """Escaped, with places where a long path or name may break."""
    return escape(text).replace("/", "/<wbr>").replace(".", ".<wbr>").replace("_", "_<wbr>")


def _marked(text: str) -> str:
    """Escaped, with what stands in backticks as code."""
    parts = escape(text).split("`")
    if len(parts) % 2 == 0:
        return escape(text)
    return "".join(f"<code>{p}</code>" if i % 2 else p for i, p in enumerate(parts))
