"""The small model of the tests of rows that others write."""

from __future__ import annotations

from tests.parts.endpoint.conftest import model

__all__ = ["model"]
