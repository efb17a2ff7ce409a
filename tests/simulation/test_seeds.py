"""Seeds of the simulation: after any faults a run loses no row, trains none twice, and has the same bits."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from tests.simulation.seeds import FINISHED, KILLED, Play, folder, ran, settled, undisturbed
from tests.simulation.world import Scenario

SCENARIOS = {
    "in order": Scenario(steps=5),
    "ahead": Scenario(steps=5, freshness=1, checkpoint_every=1),
    "ready first": Scenario(steps=5, freshness=2, is_ready_first=True, replicas=2),
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def require(seeds: range) -> None:
    """Run seeds; fail at the first problem with the last events and the command that repeats it."""
    compared = 0
    for seed in seeds:
        outcome = ran(seed)
        compared += outcome.is_compared
        again = f"python -m tests.simulation --seeds 1 --from {seed} --trace"
        assert not outcome.problems, f"{outcome.problems}\n{outcome.story[-3000:]}\nagain: {again}"
    assert compared > len(seeds) / 4


def test_crash_equivalence_exactly_once_and_bounded_staleness_of_some_seeds() -> None:
    require(range(15))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("hundred", range(10))
def test_crash_equivalence_exactly_once_and_bounded_staleness_of_a_thousand_seeds(hundred: int) -> None:
    require(range(100 * hundred, 100 * hundred + 100))


def test_a_seed_gives_the_same_events_again() -> None:
    first, second = (ran(3).story.splitlines() for _ in range(2))
    assert [line for line in first if "rf-sim" not in line] == [
        line for line in second if "rf-sim" not in line
    ]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["kill", "power"])
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("share", [pytest.param(n, marks=pytest.mark.slow) for n in range(8)])
def test_crash_equivalence_for_a_death_at_every_event(name: str, kind: str, share: int) -> None:
    """The driver or the machine dies at each event of a run in turn."""
    scenario = SCENARIOS[name]
    events, whole = undisturbed(scenario)
    for event in range(1 + share, events + 1, 8):
        with folder() as at:
            play = Play(0, scenario, at, Random(event))
            play.start([(event, kind)])
            assert play.outcome.starts[0].end in (KILLED, FINISHED)
            if not play.is_over:
                play.start([])
            play.judge(whole)
            assert not play.outcome.problems, f"event {event}: {play.outcome.story[-3000:]}"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [*SCENARIOS, pytest.param("one replica", marks=pytest.mark.slow)])
@pytest.mark.parametrize("share", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 100))])
def test_a_rank_that_dies_at_any_event_is_repaired_while_a_restart_is_left(name: str, share: int) -> None:
    """The start that met the death ends in "finished", and the run passes the oracle."""
    alone = replace(SCENARIOS["ready first"], replicas=1)
    scenario = replace(SCENARIOS.get(name, alone), restarts=1)
    events, whole = undisturbed(settled(scenario))
    for event in range(1 + share, events + 1, 100):
        with folder() as at:
            play = Play(0, scenario, at, Random(f"{name} {event}"))
            play.start([(event, "kill rank")])
            story = play.outcome.story[-3000:]
            assert play.outcome.starts[0].end == FINISHED, f"event {event}: {story}"
            play.judge(whole)
            assert not play.outcome.problems, f"event {event}: {story}"
