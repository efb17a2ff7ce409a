"""What a remote sampler does when its run is away, comes back, or is another one."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from rillflow.errors import StreamError
from rillflow_links.remote import patience
from rillflow_links.remote.client import LeaseEnded, RunClient, RunEnded, WeightsGone, WrongToken
from rillflow_links.remote.patience import RetryPatience, Stopped
from rillflow_links.remote.sampler import RemoteSampler, SamplerLimits
from rillflow_links.remote.transport import RunAddress, RunAnswer, Unreachable
from rillflow_links.remote.weight_copy import WeightCopy

ABOUT = {
    "config": {"model_type": "llama"},
    "vocabulary": 9,
    "context": 8,
    "stop_tokens": [0],
    "stop": [],
    "session": "one",
}


class ScriptedTransport:
    """Answers by a function of path and number of the request."""

    def __init__(self, answer: Callable[[str, int], RunAnswer]) -> None:
        self._answer, self._count = answer, 0

    def ask(self, method: str, path: str, body: bytes | None, wait_s: float) -> RunAnswer:
        """See Transport."""
        self._count += 1
        return self._answer(path, self._count)

    def close(self) -> None:
        """See Transport."""


def said(status: int, **what: object) -> RunAnswer:
    return RunAnswer(status=status, body=json.dumps(what).encode())


def sampler(
    answer: Callable[[str, int], RunAnswer], lines: list[str], patience_s: float = 60.0
) -> RemoteSampler:
    client = RunClient(ScriptedTransport(answer))
    limits = SamplerLimits(rows=4, patience_s=patience_s)
    return RemoteSampler(client, WeightCopy(None, lines.append), limits, torch.device("cpu"), lines.append)


@pytest.mark.parametrize(
    ("status", "path", "kind"),
    [
        (401, "rows/take", WrongToken),
        (409, "rows/take", LeaseEnded),
        (410, "rows/take", RunEnded),
        (410, "weights", WeightsGone),
        (422, "rows/take", StreamError),
        (503, "rows/take", Unreachable),
    ],
)
def test_refusals_have_their_own_classes(status: int, path: str, kind: type[Exception]) -> None:
    answer = said(status, what="no", why="because", fix="")
    client = RunClient(ScriptedTransport(lambda *_: answer))
    with pytest.raises(kind, match="no"):
        client.take(1, lease_s=1, wait_s=0) if path == "rows/take" else client.manifest(-1, 0)


def test_an_answer_of_something_else_is_tried_again() -> None:
    client = RunClient(ScriptedTransport(lambda *_: RunAnswer(status=200, body=b"<html>")))
    with pytest.raises(Unreachable, match="not the run's"):
        client.model()


def test_a_wrong_token_ends_the_sampler_at_once() -> None:
    with pytest.raises(WrongToken, match="the token is wrong"):
        sampler(lambda *_: said(401, what="the token is wrong", why="", fix=""), []).run()


def test_another_model_at_the_address_ends_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "FIRST_S", 0.01)
    lines: list[str] = []

    def answer(path: str, count: int) -> RunAnswer:
        if count == 1:
            return said(200, **ABOUT)
        if count < 5:
            raise Unreachable("cut off")
        if path == "model":
            return said(200, **{**ABOUT, "vocabulary": 10})
        return RunAnswer(status=204, body=b"")

    with pytest.raises(StreamError, match="trains another model now: its vocabulary differs"):
        sampler(answer, lines).run()
    assert "no answer: cut off" in lines[0]


def test_the_end_of_the_run_ends_the_sampler() -> None:
    def answer(path: str, _: int) -> RunAnswer:
        if path == "model":
            return said(200, **ABOUT)
        if path == "rows/take":
            return said(410, what="no more rows", why="the run has ended", fix="")
        return RunAnswer(status=204, body=b"")

    assert sampler(answer, []).run() == "the run has ended (the run has ended)"


def test_a_run_that_never_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "FIRST_S", 0.01)

    def answer(_: str, __: int) -> RunAnswer:
        raise Unreachable("nobody listens", why="connection refused")

    with pytest.raises(StreamError, match="did not answer for"):
        sampler(answer, [], patience_s=0.05).run()


def test_patience_ends_when_the_sampler_leaves() -> None:
    def away() -> None:
        waits.stop()
        raise Unreachable("away")

    waits = RetryPatience(60.0, lambda _: None, lambda: None)
    with pytest.raises(Stopped):
        waits.during(away)


@pytest.mark.parametrize("url", ["http://host:1", "http://host:1/", "http://host:1/v1"])
def test_an_address_may_have_its_version(url: str) -> None:
    assert RunAddress.of_url(url, "t").url == "http://host:1/v1"
