"""The small model of the serving tests."""

from __future__ import annotations

from tests.unit.serving.conftest import model

__all__ = ["model"]
