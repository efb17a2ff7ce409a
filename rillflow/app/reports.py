"""Reports: the protocol of the service ``reports``, which writes a run as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class RunReports(Protocol):
    """Reports of runs."""

    def write(self, run: Path) -> Path:
        """Write ``report.html`` into a run directory, finished or not, and return its path.

        Raises:
            RunDirectoryError: it is no run directory, one of its files is damaged, or it cannot be written.
        """
        ...

    def comparison(self, run: Path) -> str:
        """Return a run's measured seconds next to its plan's; empty for a run without a plan."""
        ...

    def curves(self, run: Path) -> str:
        """Return the report's first two curves as an element for notebooks."""
        ...
