"""The fields of requests change only on purpose, because other engines send them."""

from __future__ import annotations

from pathlib import Path

from rillflow_service.requests import OF_ENGINES, OF_STORES, OF_STREAMS
from tests.unit.config.test_public_settings import settings

COMMITTED = Path(__file__).parent / "settings.txt"


def test_requests_are_as_committed() -> None:
    assert settings([*OF_STREAMS, *OF_STORES, *OF_ENGINES]) == COMMITTED.read_text().splitlines(), (
        "if on purpose: python -m plugins.service.tests.test_public_settings"
    )


if __name__ == "__main__":
    COMMITTED.write_text("\n".join(settings([*OF_STREAMS, *OF_STORES, *OF_ENGINES])) + "\n")
