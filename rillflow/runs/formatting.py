"""Format numbers, durations, sizes and tables of text for people."""

from __future__ import annotations

import math
from collections.abc import Sequence

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")

_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_BIDI = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_VISIBLE: dict[int, int | str] = {
    **_PICTURES,
    **{code: f"<U+{code:04X}>" for code in (*range(0x80, 0xA0), *_BIDI)},
}


def visible(text: str) -> str:
    """Replace control characters by visible symbols, and text-direction controls by text like ``<U+202E>``.

    Otherwise text of a model or a file could send commands to the terminal, or reorder the displayed text.
    """
    return text.translate(_VISIBLE)


def number(value: float) -> str:
    """Format three digits. Example: ``number(0.01234) == "0.0123"``, ``number(12345) == "12,345"``."""
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else f"{'-' if value < 0 else ''}infinite"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-")
    return f"{value:.{max(0, 2 - math.floor(math.log10(size)))}f}"


def duration(seconds: float) -> str:
    """Format two units. Example: ``duration(75) == "1 min 15 s"``, ``duration(0.25) == "250 ms"``."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def seconds(value: float) -> str:
    """Format three digits. Example: ``seconds(0.00123) == "1.23 ms"``, ``seconds(12.34) == "12.3 s"``."""
    if value >= 60:
        return duration(value)
    return f"{number(value)} s" if value >= 0.9995 else f"{number(1000 * value)} ms"


def size(num_bytes: float) -> str:
    """Format bytes in binary units. Example: ``size(3 * 2**20) == "3.0 MiB"``."""
    for unit in _UNITS[:-1]:
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} {_UNITS[-1]}"


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
