"""The fields of requests change only on purpose, because clients send them."""

from __future__ import annotations

from pathlib import Path

from rillflow_parts.endpoint.openai_protocol import ChatRequest, CompletionRequest
from tests.unit.config.test_public_settings import settings

COMMITTED = Path(__file__).parent / "settings.txt"


def test_requests_are_as_committed() -> None:
    assert settings([ChatRequest, CompletionRequest]) == COMMITTED.read_text().splitlines(), (
        "if on purpose: python -m tests.parts.endpoint.test_public_settings"
    )


if __name__ == "__main__":
    COMMITTED.write_text("\n".join(settings([ChatRequest, CompletionRequest])) + "\n")
