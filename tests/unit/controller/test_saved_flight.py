"""Saved flight: the state of a checkpoint names the replicas whose rows it holds, and no other one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from rillflow.controller.saved_flight import FlightSave
from rillflow.controller.schedules.ready_first import _flight
from tests.unit.controller.test_async_rollout import Log


def test_rows_of_a_replica_that_died_before_they_were_written_are_not_in_the_checkpoint() -> None:
    save = FlightSave(executor=cast(Any, None), step=4, folder=Path(), version=3, replicas={0, 1}, scored={})
    save.saved = {0: (7, []), 1: (9, [])}
    save.lose(0)
    save.write()
    assert save.finish(1.0)["saves"] == {"1": 9}


def test_decisions_after_a_checkpoint_of_an_older_version_are_dropped(tmp_path: Path) -> None:
    log = Log()
    log.log_decisions([["draw", 2], ["begin", 0, [0, 0]]])
    history = SimpleNamespace(repeat=None, log=log, path=tmp_path, blocked="")
    parts = SimpleNamespace(kept=SimpleNamespace(), history=history)
    decisions, flight = _flight(cast(Any, parts), None, needs_rows=True)
    assert (log.events, decisions.head, flight) == ([], None, None)
