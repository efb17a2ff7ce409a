"""An error of a request costs the same for every size."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette", reason="the door is the extra `service`")

from rillflow.errors import StreamError
from rillflow.serving.http_body import checked_request
from rillflow_parts.endpoint.openai_protocol import ChatRequest, CompletionRequest


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ({"prompt": [0.5] * 10**6}, "prompt.0 is 0.5"),
        ({"prompt": [[1], [0.5] * 10**6]}, "prompt.1.0 is 0.5"),
        ({"prompt": ["a", *[1] * 10**6]}, "prompt"),
        ({"prompt": "1", "stop": [1] * 10**6}, "stop.0 is 1"),
        ({"prompt": "1", "metadata": {"a": float("inf")}}, "metadata"),
        ({"prompt": "1", "metadata": {"a": [0] * 5000}}, "at most 4,096 values"),
        ({"prompt": "1", "max_tokens": 2**40}, "max_tokens is 1099511627776"),
        ({"prompt": "1", "user": "x" * 2000}, "user is xxx"),
    ],
)
def test_the_first_error_is_named_and_short(says: dict[str, object], words: str) -> None:
    with pytest.raises(StreamError, match=words) as caught:
        checked_request(CompletionRequest, says)
    assert len(f"{caught.value}") < 700


def test_a_list_has_one_error_whatever_its_length() -> None:
    with pytest.raises(ValueError, match="validation error") as caught:
        ChatRequest.model_validate({"messages": [1] * 10**5, "tools": [1] * 10**5})
    assert caught.value.error_count() < 5  # type: ignore[attr-defined]
