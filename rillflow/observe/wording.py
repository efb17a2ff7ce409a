"""Numbers, durations and sizes as people read them."""

from __future__ import annotations

import math

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def number(value: float) -> str:
    """Three significant digits. Example: ``number(0.01234) == "0.0123"``, ``number(12345) == "12,345"``."""
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
    """The two largest units. Example: ``duration(75) == "1 min 15 s"``, ``duration(0.25) == "250 ms"``."""
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


def size(num_bytes: float) -> str:
    """Binary units. Example: ``size(3 * 2**20) == "3.0 MiB"``."""
    for unit in _UNITS[:-1]:
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} {_UNITS[-1]}"
