"""The written run of the tests of run directories."""

from __future__ import annotations

from tests.unit.runs.conftest import make_run

__all__ = ["make_run"]
