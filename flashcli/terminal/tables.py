"""Tables for people: lines of cells, the first line their heads, as text for a terminal or as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

Lines = Sequence[Sequence[str]]


def text(lines: Lines) -> str:
    """Columns two spaces apart. A line without a last cell is a remark: it may be wider than its columns."""
    widths = [max(len(line[column]) for line in lines if line[-1]) for column in range(len(lines[0]))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def markdown(lines: Lines) -> str:
    """A Markdown table. What would end a cell, or a line, is written so that it does not."""
    head, *body = [[" ".join(cell.replace("|", r"\|").splitlines()) for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *body))
