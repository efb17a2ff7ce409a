"""The commit of a results page: the line below its title that names the measured code.

page made now ─ line ─────────────> Measured at commit fc8f5aa (2026-11-24).
older page ─ git log of the page ─> Measured at or before commit be8cd8c (2026-11-22), which wrote it last
"""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEGINNING = "Measured at commit "
OLDER = "Measured at or before commit "


def line(page: Path | None = None) -> str:
    """Return the line for the code as it is, or for the commit that last wrote a page.

    A "+" after the commit says that files of the package or of benchmarks differ from it.
    """
    if not (ROOT / ".git").exists():
        return f"{BEGINNING}unknown: the files come without their history."
    asked = ["log", "-1", "--format=%h (%cs)", *(("--", str(page)) if page else ())]
    commit, _, date = _git(*asked).strip().partition(" ")
    changed = "" if page or not _git("status", "--porcelain", "rillflow", "benchmarks/*.py") else "+"
    return f"{OLDER if page else BEGINNING}{commit}{changed} {date}."


def below_title(text: str, said: str) -> str:
    """Put the line below the first heading of a page."""
    title, _, rest = text.partition("\n")
    return f"{title}\n\n{said}\n{rest}"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
