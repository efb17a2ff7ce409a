"""Columns: align rows of cells as lines of text, and format seconds for a cell.

rows ─> lines: text columns flush left, the others flush right, each as wide as its widest cell
"""

from __future__ import annotations

from collections.abc import Sequence

from rillflow.runs.formatting import duration, number


def columns(rows: Sequence[Sequence[str]], *, left: int = 1, text: int = 0, indent: int = 2) -> list[str]:
    """Return the rows as aligned lines.

    Args:
        rows: cells, the same number in every row; the first row is the head.
        left: number of leading columns that are flush left.
        text: number of trailing columns that are flush left too.
        indent: blanks before each line.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if place < left or place >= len(row) - text else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((" " * indent + "  ".join(cells)).rstrip())
    return lines


def seconds(value: float) -> str:
    """Format three digits. Example: ``seconds(0.00123) == "1.23 ms"``, ``seconds(12.34) == "12.3 s"``."""
    if value >= 60:
        return duration(value)
    return f"{number(value)} s" if value >= 0.9995 else f"{number(1000 * value)} ms"
