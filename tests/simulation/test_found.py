"""Regressions found by the simulation: each case failed before its fix."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rillflow.controller.checkpoint import save_checkpoint
from rillflow.errors import RunDirectoryError
from rillflow.runs import durable, layout
from rillflow.runs.reader import Evaluation
from rillflow.runs.run_directory import RunDirectory
from tests.simulation.disk import FakeDisk
from tests.simulation.seeds import Play, folder, ran, settled, undisturbed
from tests.simulation.timeline import DriverKilled, Timeline
from tests.simulation.world import Scenario

AHEAD = Scenario(
    steps=6, freshness=2, checkpoint_every=1, evaluate_every=0, checkpoint_s=0.0, rows=40, has_scorer=False
)


@pytest.mark.parametrize("event", [190, 200, 230, 240, 245])
def test_a_step_that_outlives_the_sampler_keeps_its_own_version(event: int) -> None:
    """Steps that a dead sampler left behind had already published, and their version was used instead."""
    require(AHEAD, event, "kill rank")


@pytest.mark.parametrize("event", [309, 318])
def test_a_loss_of_power_takes_no_line_of_a_saved_step(event: int) -> None:
    """Checkpoints were flushed to disk, but the metrics lines of the same steps were not."""
    require(Scenario(steps=5, checkpoint_every=1), event, "power")


CHUNKS_AHEAD = Scenario(
    steps=6,
    freshness=2,
    chunks=2,
    replicas=2,
    checkpoint_every=4,
    checkpoint_s=20.0,
    evaluate_every=2,
    rows=40,
    has_scorer=False,
)
ONE_REPLICA = replace(CHUNKS_AHEAD, freshness=1, replicas=1)


@pytest.mark.parametrize(
    ("seed", "scenario"),
    [
        (37, replace(ONE_REPLICA, checkpoint_every=1, checkpoint_s=5.0, evaluate_every=3)),
        (
            43,
            Scenario(
                steps=6,
                checkpoint_every=0,
                checkpoint_s=5.0,
                evaluate_every=0,
                rows=2,
                replicas=2,
                has_scorer=False,
            ),
        ),
    ],
)
def test_seeds_that_lost_lines(seed: int, scenario: Scenario) -> None:
    assert ran(seed, scenario).problems == []


@pytest.mark.parametrize(
    ("seed", "scenario"),
    [
        (3130, CHUNKS_AHEAD),
        (3375, replace(ONE_REPLICA, checkpoint_every=0, checkpoint_s=0.0, evaluate_every=0, has_scorer=True)),
    ],
)
def test_a_step_that_is_half_trained_is_not_saved_as_the_one_before(seed: int, scenario: Scenario) -> None:
    """The simulated policy counted an update at its last part; the real one counts each optimiser step."""
    assert ran(seed, scenario).problems == []


@pytest.mark.parametrize(
    ("seed", "scenario"),
    [
        (
            41047,
            Scenario(
                steps=6, freshness=1, chunks=2, replicas=2, checkpoint_every=1, rows=40, has_reference=True
            ),
        ),
        (41111, Scenario(steps=6, freshness=2, chunks=2, evaluate_every=2, rows=40, has_reference=True)),
    ],
)
def test_a_reference_that_moved_on_is_not_saved_with_the_step_before(seed: int, scenario: Scenario) -> None:
    """The update of the next step had failed, and the reference had followed the policy once more."""
    assert ran(seed, scenario).problems == []


def test_an_evaluation_that_a_dead_scorer_took_along_is_missing_alone() -> None:
    """The oracle allowed a missing evaluation, but then compared all evaluations."""
    scenario = replace(
        CHUNKS_AHEAD, replicas=1, checkpoint_every=0, checkpoint_s=5.0, rows=6, has_scorer=True
    )
    assert ran(3209, scenario).problems == []


def test_a_resume_drops_no_rows_of_a_process_that_had_died_before_it_saved_them() -> None:
    """The resumed process had to drop a group that it never had: a KeyError."""
    scenario = replace(
        CHUNKS_AHEAD,
        is_ready_first=True,
        drops=True,
        publishes=2,
        chunks=1,
        replicas=1,
        checkpoint_every=2,
        checkpoint_s=0.0,
        evaluate_every=3,
    )
    assert ran(5559, scenario).problems == []


def test_a_loss_of_power_takes_no_evaluation_of_a_resumed_run(tmp_path: Path) -> None:
    """It is written after the checkpoint of its step, and nothing flushed its digest and its line."""
    for seed in range(10):
        at = tmp_path / str(seed)
        at.mkdir()
        disk = FakeDisk(at)
        with disk.watched(quiet()), RunDirectory.open(at / "run", {}) as run:
            run.log_evaluation(0, Evaluation(count=1, mean_reward=0.5))
        disk.restart(Random(seed), power=True)
        for name in (layout.EVALUATIONS, layout.DIGESTS):
            assert (at / "run" / name).read_text().endswith("}\n"), seed


def test_a_disk_that_fails_while_a_resume_drops_rollouts_is_named(tmp_path: Path) -> None:
    """The error was a bare OSError."""
    disk = FakeDisk(tmp_path)
    with disk.watched(quiet()), RunDirectory.open(tmp_path / "run", {}) as run:
        durable.replace(layout.rollout_file(run.path, 3, 1, 1), [b"rows"])
        disk.fails_once = True
        with pytest.raises(RunDirectoryError, match=r"cannot write .*step-000003.*Input/output error"):
            run.rewind(2)
        run.rewind(2)
        assert not layout.written_rollouts(run.path)


def test_a_driver_that_dies_leaves_no_half_of_an_old_checkpoint(tmp_path: Path) -> None:
    """The driver died while it removed files of an old one, and the rest looked like a damaged checkpoint."""
    deaths = 0
    for event in range(1, 60):
        at = tmp_path / str(event)
        at.mkdir()
        with FakeDisk(at).watched(Timeline(Random(0), {event: Timeline.die}, "")), suppress(DriverKilled):
            deaths += 1
            for step in range(1, 4):
                save_checkpoint(at, step, written, {"step": step}, 1)
            deaths -= 1
        assert all((path / "manifest.json").exists() for path in at.glob("step-*")), event
    assert deaths > 40


def written(folder: Path) -> Mapping[str, Any]:
    """Write two files of a checkpoint."""
    for name in ("one", "two"):
        (folder / name).write_text(name)
    return {}


def quiet() -> Timeline:
    """Return a timeline without faults."""
    return Timeline(Random(0), {}, "")


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
