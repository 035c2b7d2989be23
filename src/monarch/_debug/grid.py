"""A table in plain characters, for terminals and for programs that read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["grid"]


def grid(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table of rows under their heads. Columns of numbers are right-aligned.

    >>> print(grid(["Name", "Rank"], [["b", 0], ["b", 11]]))
    +--------+--------+
    | Name   |   Rank |
    +========+========+
    | b      |      0 |
    +--------+--------+
    | b      |     11 |
    +--------+--------+
    """
    lines = [list(heads), *([str(cell) for cell in row] for row in rows)]
    widths = [max([len(head) + 2, *map(len, cells)]) for head, *cells in zip(*lines, strict=True)]
    right = [bool(rows) and all(isinstance(row[i], int) for row in rows) for i in range(len(heads))]

    def text(cells: list[str]) -> str:
        padded = (
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(cells, widths, right, strict=True)
        )
        return "| " + " | ".join(padded) + " |"

    def rule(mark: str) -> str:
        return "+" + "+".join(mark * (width + 2) for width in widths) + "+"

    drawn = [rule("-"), text(lines[0]), rule("=")]
    for line in lines[1:]:
        drawn += [text(line), rule("-")]
    return "\n".join(drawn if rows else [*drawn, rule("-")])
