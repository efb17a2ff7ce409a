"""The openai client, unmodified, against `rillflow serve`."""

from __future__ import annotations

from typing import Any

import pytest

openai = pytest.importorskip("openai")


@pytest.fixture(scope="module")
def client(served: Any) -> Any:
    return openai.OpenAI(base_url=served.url, api_key=served.token)


def test_a_chat_is_answered(client: Any, served: Any) -> None:
    turns = [{"role": "user", "content": "17+25"}]
    said = client.chat.completions.create(model=served.model, messages=turns, temperature=0)
    assert said.choices[0].message.content == "I think 42."
    assert said.choices[0].finish_reason == "stop"
