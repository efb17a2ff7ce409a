"""Scoring ranks that die are replaced while a ready-first run trains; no group is lost or doubled."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest

import rillflow
from rillflow.app.facts import Given
from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.errors import ClusterError
from rillflow.runs import layout
from rillflow.runs.reader import read_rollouts
from rillflow.workers import program
from rillflow.workers.backend import Backend, Place, RankCall, RankDied, Replacement
from rillflow.workers.inline import InlineBackend
from rillflow.workers.start import ray_backend

sys.path.insert(0, str(Path(__file__).parent))
from test_ahead import RAY, ran
from test_ready_first import LONG, READY, once

from tests.flows import whole_runs
from tests.flows.test_judges import PAIRWISE, POLICY

SCORERS = (
    "placement.pools={ main = 1, answers = 1, scorers = 2 }",
    'placement.roles={ sampler = "answers", reward = "scorers" }',
)
STEPS = 12
SETTINGS = (*SCORERS, READY, *LONG, f"algorithm.steps={STEPS}", "evaluate=none")
INLINE = 'placement.backend="inline"'
SLOW_REWARD = """
import time

def small(prompts, completions, **columns):
    time.sleep(0.05)
    return [sum(letter < "5" for letter in text) / 4 for text in completions]
"""
SCORE = "reward.score_groups"


class Killing(InlineBackend):
    """Kills a rank after every few of its calls, by default the first scoring rank."""

    def __init__(self, most: int, every: int, call: str = SCORE, pool: str = "scorers") -> None:
        super().__init__()
        self.left, self.every, self.calls, self.call, self.pool = most, every, 0, call, pool

    def submit(self, place: Place, work: RankCall, *arguments: Any, results: int = 1) -> tuple[Any, ...]:
        made = super().submit(place, work, *arguments, results=results)
        if place == Place(self.pool, 0) and str(arguments[0]) == self.call:
            self.calls += 1
            if self.left and self.calls % self.every == 0:
                self.left -= 1
                self.kill(place)
        return made


def assert_whole(run: Path, said: str, deaths: int) -> None:
    """Check that no death restarted all ranks, and that a replay without deaths has the same bits."""
    assert said.count("a new process takes its place") == deaths and "all ranks start again" not in said
    assert set(once(run).values()) == {3} and len(once(run)) == STEPS * 5
    lines = [json.loads(line) for line in (run / layout.DECISIONS).read_text().splitlines()]
    assert sum(event[0] == "lost" for line in lines for event in line["events"]) >= deaths
    assert rillflow.open_run(run).replay(settings=[INLINE]).difference is None


@pytest.mark.parametrize("freshness", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_rank_that_scores_and_dies_is_replaced_while_training_goes_on(
    tmp_path: Path, freshness: int, capsys: pytest.CaptureFixture[str]
) -> None:
    given = Given(backend=lambda _: Killing(most=2, every=10))
    ran(tmp_path, freshness, INLINE, *SETTINGS, reward=SLOW_REWARD, is_quiet=False, given=given)
    assert_whole(tmp_path / "run", " ".join(capsys.readouterr().out.split()), deaths=2)


def test_a_rank_that_dies_again_and_again_ends_the_run_with_its_first_death(tmp_path: Path) -> None:
    given = Given(backend=lambda _: Killing(most=1000, every=1))
    with pytest.raises(RankDied, match="rank 0 of pool 'scorers' was killed") as caught:
        ran(tmp_path, 2, INLINE, *SETTINGS, "run.restarts=1", reward=SLOW_REWARD, given=given)
    assert "was lost 2 times" in str(caught.value.__notes__)


class NodeGone(Killing):
    """Finds no node for a new process."""

    def replace(self, places: Collection[Place]) -> Replacement:
        done = Future[None]()
        done.set_exception(ClusterError("rank 0 did not finish its start in 75 s", why="no node has room"))
        return Replacement([*places], done)


@pytest.mark.parametrize(
    ("pool", "call"),
    [("scorers", SCORE), pytest.param("answers", "sampler.advance", marks=pytest.mark.slow)],
)
def test_a_run_goes_on_without_a_rank_that_cannot_be_replaced(
    tmp_path: Path, pool: str, call: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evaluations use the remaining ranks."""
    given = Given(backend=lambda _: NodeGone(most=1, every=10, call=call, pool=pool))
    more = ("placement.pools={ main = 1, answers = 2, scorers = 2 }", "evaluate.every=3")
    settings = [each for each in SETTINGS if not each.startswith(("evaluate", "placement.pools"))]
    ran(tmp_path, 2, INLINE, *settings, *more, reward=SLOW_REWARD, is_quiet=False, given=given)
    said = " ".join(capsys.readouterr().out.split())
    assert f"rank 0 of pool '{pool}' could not be replaced" in said and "all ranks start again" not in said
    assert "the run goes on with 1 of 2 such replicas" in said
    assert set(once(tmp_path / "run").values()) == {3} and len(once(tmp_path / "run")) == STEPS * 5
    assert rillflow.open_run(tmp_path / "run").replay().difference is None


class Again(Killing):
    """Kills the new process as well, while it makes its role."""

    def submit(self, place: Place, work: RankCall, *arguments: Any, results: int = 1) -> tuple[Any, ...]:
        made = super().submit(place, work, *arguments, results=results)
        if place == Place("scorers", 0) and work is program.start and self.epochs.get(place) == 1:
            self.kill(place)
        return made


def test_a_new_process_that_dies_in_its_start_is_replaced_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = Given(backend=lambda _: Again(most=1, every=10))
    ran(tmp_path, 2, INLINE, *SETTINGS, reward=SLOW_REWARD, is_quiet=False, given=given)
    assert_whole(tmp_path / "run", " ".join(capsys.readouterr().out.split()), deaths=2)


def test_a_run_whose_only_rank_cannot_be_replaced_ends_with_the_reason(tmp_path: Path) -> None:
    given = Given(backend=lambda _: NodeGone(most=1000, every=10))
    one = "placement.pools={ main = 1, answers = 1, scorers = 1 }"
    with pytest.raises(RankDied, match="could not be replaced: rank 0 did not finish its start in 75 s"):
        ran(tmp_path, 2, INLINE, *SETTINGS, one, "run.restarts=1", reward=SLOW_REWARD, given=given)


def kill_scorers(run: Path, deaths: int) -> None:
    """Kill a scoring process, identified by its children, after every third step."""
    for death in range(1, deaths + 1):
        while (
            not (run / layout.METRICS).exists()
            or len((run / layout.METRICS).read_text().splitlines()) < 3 + 3 * death
        ):
            time.sleep(0.02)
        there = psutil.Process().children(recursive=True)
        ranks = [each for each in there if "RankProcess" in each.name() and each.children()]
        ranks[death % len(ranks)].kill()


@RAY
@pytest.mark.slow
@pytest.mark.parametrize("deaths", [1, 3])
def test_a_process_that_scores_and_is_killed_is_replaced_while_training_goes_on(
    tmp_path: Path, deaths: int, capsys: pytest.CaptureFixture[str]
) -> None:
    killer = threading.Thread(target=kill_scorers, args=(tmp_path / "run", deaths), daemon=True)
    killer.start()
    ran(tmp_path, 2, 'placement.backend="ray"', *SETTINGS, reward=SLOW_REWARD, is_quiet=False)
    killer.join(1)
    assert not killer.is_alive()
    assert_whole(tmp_path / "run", " ".join(capsys.readouterr().out.split()), deaths)


JUDGES = (
    "algorithm.steps=8",
    'schedule={mode="ahead",freshness=2}',
    READY,
    "placement.pools={ main = 1, answers = 1, scorers = 2 }",
    'placement.roles={ sampler = "answers", reward = "scorers" }',
)


def judged(folder: Path, backend: Callable[[float], Backend], *settings: str) -> Path:
    """Run with a policy whose judge was trained by another run."""
    (folder / "run.toml").write_text(PAIRWISE.replace("kv_heads = 1", "kv_heads = 2"))
    (folder / "use.toml").write_text(POLICY.replace("kv_heads = 1", "kv_heads = 2"))
    whole_runs.ran(folder / "run.toml", "judge", "evaluate=none")
    told = [f"run.dir={json.dumps(str(folder / 'use'))}", *JUDGES, *settings]
    launch(load_recipe(folder / "use.toml", told), given=Given(backend=backend))
    return folder / "use"


def assert_judged(run: Path, said: str) -> None:
    assert said.count("a new process takes its place") == 1 and "all ranks start again" not in said
    groups = Counter(row.row.group for step in layout.rollout_files(run) for row in read_rollouts(run, step))
    assert set(groups.values()) == {3} and len(groups) == 8 * 4
    lines = [json.loads(line) for line in (run / layout.DECISIONS).read_text().splitlines()]
    assert {event[1] for line in lines for event in line["events"] if event[0] == "run"} == {0, 1}


@pytest.mark.slow
def test_a_replica_of_a_judge_that_dies_is_replaced_while_the_other_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = judged(tmp_path, lambda _: Killing(most=1, every=3, call="reward.score"), INLINE)
    assert_judged(run, " ".join(capsys.readouterr().out.split()))
    assert rillflow.open_run(run).replay().difference is None


@RAY
@pytest.mark.slow
def test_a_rank_of_a_judge_that_is_killed_takes_its_tp_group_along_and_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Any] = []

    def backend(deadline_s: float) -> Backend:
        made.append(ray_backend(deadline_s, start_s=120.0))
        return made[0]

    def kill() -> None:
        metrics = tmp_path / "use" / layout.METRICS
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
            time.sleep(0.02)
        os.kill(made[0]._ranks[Place("scorers", 3)].seat.pid, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    four = JUDGES[3].replace("scorers = 2", "scorers = 4")
    tp = "placement.train_parallel.scorers.tp=2"
    run = judged(tmp_path, backend, 'placement.backend="ray"', four, tp)
    assert_judged(run, " ".join(capsys.readouterr().out.split()))
    assert {place.rank for place, epoch in made[0].epochs.items() if epoch} == {2, 3}
