"""A flight notes the groups that a dead worker loses; a repeated one knows which decisions are past."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from rillflow.controller.decisions import Decisions
from rillflow.controller.flight import Flight
from rillflow.controller.repeated_flight import RepeatedFlight
from rillflow.controller.source import DataStream, GroupSampling
from rillflow.controller.streamed_stages import StageWorker
from rillflow.roles.sampler import GroupId
from rillflow.workers.arguments import Facts
from rillflow.workers.backend import Place, RankDied
from rillflow.workers.pending import Pending, wait_for_any
from rillflow.workers.restarts import Recovery, RestartBudget
from tests.unit.controller.test_async_rollout import SAMPLES, Log, Scene, prompts

STAGE, PLACE = "reward.score", Place("scorers", 0)


class DyingWorker:
    """A worker that dies with its first groups; the rows of a group serve as its scores."""

    stage, name, room, events = STAGE, "reward 0", 2, ()

    def __init__(self) -> None:
        self.worked = list[Facts]()
        self.recovery = Recovery([PLACE], RestartBudget(1), lambda _: iter([SimpleNamespace(is_ready=True)]))
        self._groups = dict[GroupId, Pending]()
        self._deaths = 0

    def begin(self, rows: Mapping[GroupId, Pending]) -> None:
        self._groups |= rows

    def give_up(self, group: GroupId) -> None: ...

    def forget(self) -> None:
        self._groups.clear()

    def ask(self) -> None: ...

    def hear(self, deadline_s: float) -> Mapping[GroupId, Pending]:
        self.recovery.advance()
        if self._groups and not self._deaths:
            self._deaths += 1
            raise RankDied("the scorer has died", place=PLACE)
        scored, self._groups = self._groups, {}
        return scored


def flight_settings(log: Log, workers: Sequence[StageWorker], said: list[str]) -> dict[str, Any]:
    """Return the settings of a flight of two groups on one replica."""
    return {
        "sync": None,
        "how": GroupSampling(
            groups=2, samples=SAMPLES, sampling=None, replicas=[[0]], deadline_s=5, say=said.append
        ),
        "most_rows": 6,
        "capacity": 4,
        "workers": workers,
        "decisions": Decisions(log),
        "again": [],
    }


def test_groups_of_a_worker_that_dies_are_lost_and_computed_again() -> None:
    log, said = Log(), list[str]()
    data = DataStream(take=lambda count: prompts(0, count), state=dict)
    flight = Flight(Scene(0, 1, 2, 1).executor, data, **flight_settings(log, [DyingWorker()], said))
    flight.draw(2)
    (replica,) = flight.replicas
    for _ in range(2):
        flight.begin(replica)
    complete = list[GroupId]()
    while len(complete) < 2:
        if replica.may_call:
            flight.call(replica)
        if flight.running_calls:
            wait_for_any(flight.running_calls, 5)
        complete += [each.id for each in flight.hear()]
        flight.compute()
        complete += [each.id for each in flight.hear()]
    flight.decisions.flush()
    scoring = [each for each in log.events if each[0] in ("run", "lost")]
    assert sorted(complete) == [(0, 0), (0, 1)]
    assert scoring[0][0] == "run" and scoring[1] == ["lost", *scoring[0][1:]]
    assert said == ["the scorer has died; its groups are scored again, and a new process takes its place"]


def test_a_sampler_call_beside_the_steps_is_past_only_once_its_evaluation_is_over() -> None:
    data = DataStream(take=lambda count: prompts(0, count), state=dict)
    flight = RepeatedFlight(Scene(0, 1, 2, 1).executor, data, **flight_settings(Log(), [], []))
    assert not any(flight.is_past(["beside", step]) for step in range(3))
    flight.after = 1
    assert [flight.is_past(["beside", step]) for step in range(3)] == [True, True, False]
