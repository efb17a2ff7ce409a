"""Saved flight: the state of a checkpoint names the replicas whose rows it holds, and no other one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from rillflow.controller.saved_flight import FlightSave


def test_rows_of_a_replica_that_died_before_they_were_written_are_not_in_the_checkpoint() -> None:
    save = FlightSave(executor=cast(Any, None), step=4, folder=Path(), version=3, replicas={0, 1}, scored={})
    save.saved = {0: (7, []), 1: (9, [])}
    save.lose(0)
    save.write()
    assert save.finish(1.0)["saves"] == {"1": 9}
