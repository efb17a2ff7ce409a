"""Pending: a result is there when every rank has answered, those included whose results nobody needs."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from rillflow.cluster.inline import InlineBackend
from rillflow.workers.pending import Pending
from rillflow.workers.values import Reference


def test_a_result_that_nobody_needs_is_waited_for_too() -> None:
    taken, watched = Future[Any](), Future[Any]()
    pending = Pending(
        "policy.update",
        given="",
        places=(),
        references=[Reference(value=taken, facts=taken)],
        others=[Reference(value=watched, facts=watched)],
        is_partial=False,
        sources=(),
        backend=InlineBackend(),
    )
    seen = [pending.is_ready]
    for one in (taken, watched):
        one.set_result(None)
        seen.append(pending.is_ready)
    assert seen == [False, False, True]
