"""Text, page and tree: what is said, that it is well formed, and that it fits a phone."""

import html
import io
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from mtpgraph.compile_passes.report import Finding
from mtpgraph.explanation.page import fragment, page
from mtpgraph.explanation.record import Break, Explanation, Op, PassReport
from mtpgraph.explanation.text import print_rich, render
from mtpgraph.explanation.trace import explain
from mtpgraph.explanation.tree import lines_of, walk
from mtpgraph.explanation.words import size

from .modules import BROKEN, LAYERS, load_module

VOID = {"meta", "wbr", "br", "link", "img", "input", "hr"}


class Checker(HTMLParser):
    """Every element is closed by its own end tag, and nothing comes from elsewhere."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe", "object"), tag
        for name, _ in attrs:
            assert name not in ("src", "href", "srcset"), name
            assert not name.startswith("on"), name
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            assert "url(" not in data
            assert "@import" not in data
        else:
            self.text.append(data)


def check(markup: str) -> str:
    """The text of some HTML that is well formed and stands alone."""
    checker = Checker()
    checker.feed(markup)
    checker.close()
    assert checker.open == []
    assert "http" not in markup
    return "".join(checker.text)


@pytest.fixture
def broken(tmp_path: Path) -> tuple[Explanation, Path]:
    module, path = load_module(tmp_path, BROKEN)
    return explain(module.step, torch.ones(4), torch.zeros(4)), path


def hostile() -> Explanation:
    """Everything that a user or a pass can say, with markup in it."""
    bad = "<b>&\"'</b>"
    place = ("/somewhere/else.py", 3, f"x = '{bad}'")
    op = Op(f"ns.{bad}", False, ((bad, 7),), f"float32[{bad}]", (bad,), 5, 5, True)
    left = Finding("left alone", "fuse_select", bad, *place, f"used `{bad}`", f"write {bad}")
    return Explanation(
        bad,
        "2.99",
        graphs=[[op]],
        breaks=[Break(*place, f"it is {bad}", f"write {bad}", True)],
        findings=[
            Finding("mutation hazard", "find_it", bad, *place, f"it is {bad}", f"write {bad}"),
            Finding("rows mixed", "find_it", bad, "", 0, "", f"it is {bad}"),
        ],
        passes=[PassReport("fuse_select", bad, 2, False, (left,))],
        notes=[bad],
    )


def test_page_is_well_formed_and_escaped() -> None:
    said = check(page(hostile()))
    assert "<b>&\"'</b>" in said
    assert "<b>&" not in page(hostile())
    assert "1 graph break, 1 mutation hazard." in said
    assert "left alone" in said
    assert "rows mixed" in said


def test_page_shows_lines_and_remedies(broken: tuple[Explanation, Path]) -> None:
    explanation, path = broken
    said = check(explanation.html())
    assert 'print("<loud> & clear")' in said
    assert "if x.sum() > 0:" in said
    for one in explanation.breaks:
        assert one.remedy.replace("`", "") in said
        assert f"{path.name}:{one.line}" in said
    assert re.search(r"2graph breaks", said)


def test_page_in_a_notebook_keeps_its_style_to_itself() -> None:
    markup = hostile()._repr_html_()
    check(markup)
    assert markup == fragment(hostile())
    (style,) = re.findall(r"<style>(.*?)</style>", markup, re.DOTALL)
    rules = re.sub(r"@media[^{]*\{", "", style)
    for selectors in re.findall(r"([^{}]+)\{", rules):
        for selector in selectors.split(","):
            assert selector.strip().startswith(".mtpgraph-explain"), selector


def test_text_shows_lines_and_remedies(broken: tuple[Explanation, Path]) -> None:
    explanation, path = broken
    said = render(explanation)
    assert str(explanation) == said
    assert "2 graph breaks." in said
    for one in explanation.breaks:
        assert f"{path}:{one.line}: {one.code}\n" in said
        assert f"instead: {one.remedy}" in said
    assert "the host waits for the device here" in said
    assert re.search(r"\n +12 cache\.add_\(1\)\n +-> add_; writes cache; 32 B\n", said)


def test_text_holds_all_that_a_pass_says() -> None:
    said = render(hostile())
    assert "mutation hazard: it is <b>" in said
    assert "rows mixed: it is <b>" in said
    assert re.search(r"fuse_select left \S+else\.py:3 alone: used `<b>", said)


def test_text_with_colour_says_the_same(broken: tuple[Explanation, Path]) -> None:
    console_of = pytest.importorskip("rich.console").Console
    console = console_of(width=400, record=True, file=io.StringIO())
    print_rich(broken[0], console)
    said = " ".join(console.export_text().split())
    for line in render(broken[0]).splitlines():
        if not set(line) <= {"-"}:
            assert " ".join(line.split()) in said, line


def test_tree_folds_layers(tmp_path: Path) -> None:
    """Five layers from one line: shown once, counted five times."""
    module, _ = load_module(tmp_path, LAYERS)
    net, args = module.make()
    found = explain(net, *args)
    (line,) = lines_of(found.ops)
    assert line.code == "x = layer(x)"
    assert line.bytes == found.bytes
    (block,) = line.inside
    assert block.times == 5
    assert [inside.code for inside in block.inside] == [
        "y = x @ self.weight",
        "return torch.tanh(y) * self.scale",
    ]
    assert [op.name.strip(".()") for op in block.inside[1].first] == ["torch.tanh", "mul"]
    assert len(block.inside[1].ops) == 10
    assert "5 times in a row" in render(found)
    assert "5 times in a row" in check(page(found))


def calls(*frames: tuple[str, int]) -> Op:
    return Op("op", False, frames, "", (), 1, 1, False)


def test_tree_shows_the_same_lines_once() -> None:
    layer = [("layer.py", n) for n in (1, 2, 3)]
    ops = [calls(("step.py", n), at) for n in (10, 20) for at in layer]
    ops.insert(3, calls(("step.py", 15)))
    shown = list(walk(lines_of(ops)))
    assert [(depth, line.line) for depth, line, _ in shown] == [
        (0, 10), (1, 1), (1, 2), (1, 3), (0, 15), (0, 20),
    ]  # fmt: skip
    before = shown[-1][2]
    assert before is not None
    assert before.line == 10


def test_tree_keeps_what_only_looks_alike_apart() -> None:
    first = Op("a", False, (("s.py", 1),), "", (), 1, 1, False)
    second = Op("b", False, (("s.py", 2),), "", (), 1, 1, False)
    lines = lines_of([first, second, first])
    assert [(line.line, line.times) for line in lines] == [(1, 1), (2, 1), (1, 1)]
    lines = lines_of([first, second] * 3 + [first])
    assert [(line.line, line.times) for line in lines] == [(0, 3), (1, 1)]
    assert sum(line.bytes for line in lines) == 14


@pytest.mark.parametrize(
    ("number", "said"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (15428834, "15.4 MB"), (999_999, "1e+03 kB")],
)
def test_words_size(number: int, said: str) -> None:
    assert size(number) == said.replace("1e+03 kB", "1000 kB")


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_page_fits_the_screen(broken: tuple[Explanation, Path], tmp_path: Path, width: int) -> None:
    """Nothing sticks out at the side on a phone or a desktop."""
    inside = html.escape(broken[0].html(), quote=True)
    probe = (
        "<script>const frame = document.querySelector('iframe'); frame.onload = () => {"
        "const root = frame.contentDocument.documentElement;"
        "document.title = root.scrollWidth + ' in ' + root.clientWidth; }</script>"
    )
    outer = tmp_path / "outer.html"
    frame = f'<iframe style="width: {width}px; height: 800px; border: 0" srcdoc="{inside}">'
    outer.write_text(f"<title>-</title>{frame}</iframe>{probe}")
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
        "--disable-background-networking --disable-component-update --virtual-time-budget=4000"
    )
    done = subprocess.run(
        [str(CHROMIUM), *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom",
         outer.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    measured = re.search(r"<title>(\d+) in (\d+)</title>", done.stdout)
    assert measured is not None
    # a bar to scroll down takes its share
    assert measured[1] == measured[2]
    assert width - 20 < int(measured[2]) <= width
