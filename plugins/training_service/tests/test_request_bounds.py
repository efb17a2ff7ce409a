"""Every field of every request of the Tinker API has a bound."""

from __future__ import annotations

import pytest

from rillflow_training_service import requests
from tests.parts.endpoint.test_request_bounds import unbounded_in

MODELS = [
    each
    for each in vars(requests).values()
    if isinstance(each, type) and issubclass(each, requests.Request) and each is not requests.Request
]


def test_all_requests_are_looked_at() -> None:
    assert {requests.SampleBody, requests.SaveWeights, requests.Expiry} <= {*MODELS} and len(MODELS) > 20


@pytest.mark.parametrize("model", MODELS)
def test_every_field_has_a_bound(model: type[requests.Request]) -> None:
    assert [*unbounded_in(model)] == []
