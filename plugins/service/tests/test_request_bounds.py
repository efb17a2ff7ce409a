"""Every field of every request of streams, engines and stores has a bound."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from rillflow_service.requests import OF_ENGINES, OF_STORES, OF_STREAMS
from tests.parts.endpoint.test_request_bounds import unbounded_in

ELSEWHERE = (
    "Create.columns[].",
    "Create.stages[].",
    "Keep.columns[].",
    "SampledRow.logprobs",
    "PutRows.rows[].logprobs",
)
"""Bounded elsewhere: the JSON of a schema has at most 64 KiB, and ``Schema`` checks its names and types;
``RowRules`` refuses a log probability that is not finite, or above 0, and counts the refusal."""


@pytest.mark.parametrize("model", (*OF_STREAMS, *OF_ENGINES, *OF_STORES))
def test_every_field_has_a_bound(model: type[BaseModel]) -> None:
    assert [each for each in unbounded_in(model) if not each.startswith(ELSEWHERE)] == []
