"""Assets: the shared scripts and styles, as files for a server and joined for a page that is one file.

modules ─ joined in order, without their imports ─> the only script of a page without network
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
LIBRARY = "vendor/uPlot.iife.min.js"
"""The chart library; it defines ``uPlot``."""
STYLES = ("vendor/uPlot.min.css", "base.css")
CHARTS = ("dom.js", "numbers.js", "series.js", "heat.js", "chart.js", "controls.js")
"""Modules for charts, each after the ones that it imports."""
_IMPORT = re.compile(r"^import\b[^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(async )?(function|const|class)\b)", re.MULTILINE)


@cache
def asset(name: str) -> str:
    """Return the text of a file of this folder."""
    return (FOLDER / name).read_text("utf-8")


@cache
def style() -> str:
    """Return the style sheets, joined."""
    return "\n".join(map(asset, STYLES))


def joined(modules: Sequence[str]) -> str:
    """Join texts of modules to one module.

    Every module stands after those that it imports, and no two define the same name at the top level.
    """
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", text)) for text in modules)
