"""An explanation for the terminal: plain, or with colour where ``rich`` is there."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .record import Explanation
from .sections import Section, sections

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 100


def render(explanation: Explanation) -> str:
    """Plain text. Lines of the user's are not wrapped, so that they can be searched for."""
    parts = ["\n".join(_section(section)) for section in sections(explanation)]
    return "\n\n".join(parts) + "\n"


def _section(section: Section) -> list[str]:
    lines = [section.title, "-" * len(section.title)]
    for text in section.prose:
        lines += textwrap.wrap(text, WIDTH)
    lines += section.text
    if section.rows:
        lines += _table(section)
    return lines


def _table(section: Section) -> list[str]:
    rows = [section.head, *section.rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(section.head))]
    return [_row(row, widths, section.right) for row in rows]


def _row(row: Sequence[str], widths: Sequence[int], right: Sequence[int]) -> str:
    cells = [
        cell.rjust(width) if i in right else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def print_rich(explanation: Explanation, console: "Console") -> None:
    """The same sections through ``rich``."""
    from rich.table import Table
    from rich.text import Text

    for number, section in enumerate(sections(explanation)):
        console.rule(Text(section.title, style="bold"), align="left", style="dim")
        for i, text in enumerate(section.prose):
            verdict = ("bold green" if explanation.ok else "bold red") if number + i == 0 else ""
            console.print(Text(text, style=verdict))
        for text in section.text:
            console.print(Text(text, style=_style(text)), soft_wrap=True)
        if section.rows:
            table = Table(box=None, pad_edge=False, header_style="dim")
            for i, name in enumerate(section.head):
                table.add_column(name, justify="right" if i in section.right else "left")
            for row in section.rows:
                table.add_row(*(Text(cell) for cell in row))
            console.print(table)
        console.print()


def _style(text: str) -> str:
    told = text.lstrip()
    if told.startswith("instead:"):
        return "green"
    if told.startswith("->"):
        return "cyan" if "*" in told else "dim"
    return ""
