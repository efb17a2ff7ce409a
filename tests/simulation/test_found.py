"""Faults that the simulation has found: each case failed before its fix."""

from __future__ import annotations

from random import Random

import pytest

from tests.simulation.seeds import Play, folder, ran, settled, undisturbed
from tests.simulation.world import Scenario

AHEAD = Scenario(
    steps=6, freshness=2, checkpoint_every=1, evaluate_every=0, checkpoint_s=0.0, rows=40, has_scorer=False
)


@pytest.mark.parametrize("event", [190, 200, 230, 240, 245])
def test_a_step_that_outlives_the_sampler_keeps_its_own_version(event: int) -> None:
    """Steps that a dead sampler left behind had published already, and their version was taken instead."""
    require(AHEAD, event, "kill rank")


@pytest.mark.parametrize("event", [309, 318])
def test_a_loss_of_power_takes_no_line_of_a_saved_step(event: int) -> None:
    """Checkpoints were flushed to the disk, but not the lines of metrics of the same steps."""
    require(Scenario(steps=5, checkpoint_every=1), event, "power")


@pytest.mark.parametrize("seed", [37, 43])
def test_seeds_that_lost_lines(seed: int) -> None:
    assert ran(seed).problems == []


def require(scenario: Scenario, event: int, kind: str) -> None:
    """Run a scenario with one fault, and again without."""
    _, whole = undisturbed(settled(scenario))
    with folder() as at:
        play = Play(0, scenario, at, Random(event))
        play.start([(event, kind)])
        if not play.is_over:
            play.start([])
        play.judge(whole)
    assert not play.outcome.problems, play.outcome.story[-3000:]
