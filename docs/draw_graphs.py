"""Draw the graphs of docs/algorithms anew, each by the command above it; ``make docs`` runs this.

page ─ `rillflow graph RECIPE ...` draws it: ─> the command ─> the mermaid block below
"""

from __future__ import annotations

import io
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path

from rillflow.cli.main import main

PAGES = Path(__file__).parent / "algorithms"
BLOCK = re.compile(r"^`rillflow ([^`]+)` draws it:\n\n```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def redrawn(page: str) -> str:
    """A page's text with every graph as its command draws it now; recipes are relative to where we are."""
    return BLOCK.sub(lambda found: found[0].replace(found[2], drawn(found[1])), page)


def drawn(command: str) -> str:
    """What ``rillflow COMMAND`` prints."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        code = main(shlex.split(command))
    if code:
        raise SystemExit(code)
    return printed.getvalue()


if __name__ == "__main__":
    for path in sorted(PAGES.glob("*.md")):
        path.write_text(redrawn(path.read_text("utf-8")), "utf-8")
