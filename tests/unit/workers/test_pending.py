"""Pending: a result is ready when every rank has answered, including ranks whose results are not needed."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from rillflow.errors import ClusterError
from rillflow.workers.arguments import RemoteValue
from rillflow.workers.awaited import await_replies
from rillflow.workers.backend import RECENT, Place, RankDied, RankLost
from rillflow.workers.collectives import Stranded
from rillflow.workers.inline import InlineBackend
from rillflow.workers.pending import Pending, Submission
from rillflow.workers.pending import pending_of as made_pending


def pending_of(taken: Future[Any], watched: Future[Any]) -> Pending:
    """Return the result of two ranks, of which only the first is needed."""
    work = Submission(
        backend=InlineBackend(),
        places=[Place(pool="main", rank=rank) for rank in range(2)],
        references=[RemoteValue(value=taken, facts=taken)],
        others=[RemoteValue(value=watched, facts=watched)],
    )
    return Pending("policy.update", work)


def test_a_result_that_nobody_needs_is_waited_for_too() -> None:
    taken, watched = Future[Any](), Future[Any]()
    pending = pending_of(taken, watched)
    seen = [pending.is_ready]
    for one in (taken, watched):
        one.set_result(None)
        seen.append(pending.is_ready)
    assert seen == [False, False, True]


def test_a_rank_whose_result_nobody_needs_still_fails_the_read() -> None:
    taken, watched = Future[Any](), Future[Any]()
    taken.set_result(1.0)
    watched.set_exception(ValueError("of the second rank"))
    with pytest.raises(ValueError, match="of the second rank"):
        pending_of(taken, watched).read(10.0)


def result_of(backend: InlineBackend, stage: str, error: Exception) -> Pending:
    """Return the result of a call that failed."""
    failed = Future[Any]()
    failed.set_exception(error)
    made = [(Place("main", 0), RemoteValue(value=failed, facts=failed))]
    return made_pending(stage, backend, made, taken=[0], given=[])


def test_a_long_run_remembers_only_its_last_results() -> None:
    backend = InlineBackend()
    for _ in range(RECENT + 1):
        result_of(backend, "policy.generate", ValueError("any"))
    assert len(backend.recent) == RECENT


def test_the_cause_of_a_broken_collective_may_be_a_result_that_nobody_has_waited_for() -> None:
    """Ranks leave their collectives with the call that failed, and the publish behind it fails for that."""
    backend, broken = InlineBackend(), Stranded("a collective broke", why="a rank left it")
    sampled = result_of(backend, "policy.generate", RankLost("has lost its engine", why="it was killed"))
    with pytest.raises(RankDied, match="has lost its engine") as raised:
        result_of(backend, "policy.publish", broken).wait(5.0)
    assert raised.value.__notes__ == ["in policy.generate on rank 0 of pool 'main'"]
    backend.abandon()
    with pytest.raises(Stranded, match="a collective broke"):  # that loss has been dealt with
        result_of(backend, "policy.publish", broken).wait(5.0)
    assert sampled.has_failed


def test_processes_that_do_not_answer_in_time_are_named_with_what_they_did() -> None:
    here, late = Future[Any](), Future[Any]()
    here.set_result(1)
    calls = {Place("main", 0): here, Place("main", 1): late, Place("judge", 0): late}
    with pytest.raises(ClusterError) as raised:
        await_replies("joining its world", calls, InlineBackend(), 0.05, fix="raise placement.start_s")
    names = "rank 1 of pool 'main', rank 0 of pool 'judge'"
    assert raised.value.what == f"{names} did not finish joining its world in 0.05 s"
    assert raised.value.fix == "raise placement.start_s"
