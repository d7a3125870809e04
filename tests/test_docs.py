"""The pages keep their word: their code runs, their schemas are the registered ones."""

import re
from pathlib import Path

import pytest
import torch

import mtpgraph

from .test_import import OPS

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]

# A block that cannot run here (it needs a card, or shows a mistake) has this line in front of it.
NOT_RUN = "<!-- not run -->"

TEST_COMMAND = (
    "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/python -m pytest"
)


def blocks(text: str, language: str) -> list[tuple[int, str, str]]:
    """(line number, code, the line before the fence) of each fenced block in ``language``."""
    found = []
    for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        before = text[: match.start()].rstrip("\n")
        found.append((text[: match.start(1)].count("\n"), match[1], before.rpartition("\n")[2]))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_docs_code_runs(page: str) -> None:
    """The python blocks of a page, in order, in one namespace."""
    namespace: dict[str, object] = {"__name__": "page"}
    for line, code, before in blocks((ROOT / page).read_text(), "python"):
        if before != NOT_RUN:
            # Blank lines in front: an error names the line of the page.
            exec(compile("\n" * line + code, page, "exec"), namespace)


def test_docs_contract_is_more_than_prose() -> None:
    assert len(blocks((ROOT / "docs/contract.md").read_text(), "python")) >= 5


@pytest.mark.parametrize("name", OPS)
def test_docs_state_the_registered_schema(name: str) -> None:
    text = (ROOT / "docs/ops.md").read_text()
    section = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section is not None, f"docs/ops.md has no section '## {name}'"
    (_, schema, _), *_ = blocks(section[1], "text")
    registered = getattr(torch.ops.mtpgraph, name).default._schema
    assert torch._C.parse_schema(f"mtpgraph::{' '.join(schema.split())}") == registered


def test_docs_readme_and_ci_run_the_same_tests() -> None:
    assert TEST_COMMAND in (ROOT / "README.md").read_text()
    script = (ROOT / ".ci/run").read_text()
    for command in TEST_COMMAND.replace(".venv", ".venv-ci").split(" && ")[1:]:
        assert f"\n{command}\n" in script


def test_docs_changelog_has_this_version() -> None:
    assert f"\n## {mtpgraph.__version__}" in (ROOT / "CHANGELOG.md").read_text()
