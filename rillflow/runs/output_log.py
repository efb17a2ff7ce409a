"""OutputLog: the file of a run directory for lines that the run's screen does not take any more.

line ─> standard output ─ failed ─> RUN/output.log
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


class OutputLog:
    """The file; it is made by the first line, and an error of the disk ends no run.

    Args:
        path: the file; None: lines are dropped.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        """The file."""

    def write(self, text: str) -> None:
        """Append a line."""
        if self.path is None:
            return
        with (
            suppress(OSError),
            self.path.open("a", encoding="utf-8", errors="backslashreplace") as file,
        ):
            file.write(f"{text}\n")
