"""A whole launch with models and rewards on simulated ranks: deaths change no bit and lose no row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from rillflow.app.facts import Given
from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.errors import ClusterError
from rillflow.runs import layout
from rillflow.runs.reader import rollout_columns
from rillflow.workers.backend import Backend, Place
from tests.flows.conftest import SUMS, Tiny
from tests.simulation.backend import SimulatedBackend
from tests.simulation.timeline import DriverKilled, Timeline

STEPS = 5
REST = f"""
steps = {STEPS}
{SUMS}[evaluate]
problems = 4
every = 2
[placement]
backend = "inline"
pools = {{ main = 1, answers = 1, scorers = 1 }}
roles = {{ sampler = "answers", reward = "scorers" }}
"""
MOVING = ("algorithm.loss.kl=0.1", "algorithm.reference=moving", "algorithm.reference_rate=0.25")
SETTINGS = {
    "following": [*MOVING, "placement.roles.reference=main", "run.checkpoint_every=0"],
    "in order": ["run.checkpoint_every=2"],
    "ahead": ['schedule={mode="ahead",freshness=1}', "run.checkpoint_every=1"],
    "ready first": [
        'schedule={mode="ahead",freshness=2}',
        "schedule.mode=ready_first",
        "run.checkpoint_every=2",
    ],
}
EVENTS = 300
"""Approximate number of events of such a run."""
SEEDS = [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 25))]


class Launches(Tiny):
    """Runs of a tiny recipe on simulated ranks; undisturbed runs are named after their settings."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.backend: SimulatedBackend

    def start(
        self,
        name: str,
        kind: str,
        seed: object,
        fault: Callable[[Timeline], None] | None = None,
        restarts: int = 0,
    ) -> None:
        """Start a run, or resume it; the fault strikes at a random event, if the run reaches it."""
        chance = Random(str(seed))
        plan = {chance.randint(40, EVENTS): fault} if fault is not None else {}
        timeline = Timeline(chance, plan, "")

        def own(deadline_s: float) -> Backend:
            self.backend = SimulatedBackend(timeline, deadline_s)
            return self.backend

        settings = [f"run.dir={self.folder / name}", f"run.restarts={restarts}", *SETTINGS[kind]]
        loaded = load_recipe(self.recipe, settings)
        try:
            launch(loaded, quiet=True, given=Given(backend=own))
        finally:
            timeline.is_over = False

    def kill(self, pool: str) -> Callable[[Timeline], None]:
        """Return a fault that kills a rank."""
        return lambda _: self.backend.kill(Place(pool, 0)) if self.backend.places else None


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    made = Launches(tmp_path_factory.mktemp("simulated"))
    made.write(REST)
    for kind in ("following", "in order", "ahead"):
        assert made.run(kind, *SETTINGS[kind]) == 0
    return made


@pytest.mark.parametrize("kind", ["in order", "ahead"])
@pytest.mark.parametrize("seed", SEEDS)
def test_crash_equivalence_of_a_launch_on_simulated_ranks(runs: Launches, kind: str, seed: int) -> None:
    """The driver dies at a random event, then the trainer; the third start finishes."""
    name = f"{kind} {seed}"
    with pytest.raises(DriverKilled):
        runs.start(name, kind, f"{seed} driver", Timeline.die)
    try:
        runs.start(name, kind, f"{seed} trainer", runs.kill("main"))
    except ClusterError as error:
        assert "rank 0 of pool 'main' has died" in str(error)
    runs.start(name, kind, seed)
    runs.assert_same(kind, name)


@pytest.mark.parametrize("pool", ["answers", "scorers"])
def test_a_rank_that_dies_takes_no_step_of_the_trainer_along(runs: Launches, pool: str) -> None:
    name = f"without {pool}"
    with pytest.raises(ClusterError, match=f"rank 0 of pool '{pool}' has died"):
        runs.start(name, "in order", 1, runs.kill(pool))
    runs.start(name, "in order", 1)
    runs.assert_same_weights("in order", name)  # the metrics of the dead rank are lost
    assert [line["step"] for line in runs.lines(name)] == [*range(1, STEPS + 1)]


@pytest.mark.parametrize(
    ("pool", "seed"),
    [
        ("scorers", 1),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [("scorers", 4), ("answers", 5)]),
    ],
)
def test_crash_equivalence_of_a_reference_that_follows(runs: Launches, pool: str, seed: int) -> None:
    """The reference follows the policy in a step whose update fails because its rows are lost."""
    name = f"following without {pool} {seed}"
    try:
        runs.start(name, "following", seed, runs.kill(pool))
    except ClusterError as error:
        assert f"rank 0 of pool '{pool}' has died" in str(error)
    runs.start(name, "following", seed)
    runs.assert_same_weights("following", name)


@pytest.mark.parametrize("kind", ["in order", "ahead"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_trainer_that_dies_is_started_again_by_the_run(runs: Launches, kind: str, seed: int) -> None:
    name = f"again {kind} {seed}"
    runs.start(name, kind, seed, runs.kill("main"), restarts=1)
    runs.assert_same(kind, name)


@pytest.mark.parametrize("seed", SEEDS)
def test_exactly_once_and_bounded_staleness_of_a_launch_ready_first(runs: Launches, seed: int) -> None:
    """The driver, the sampler and the trainer die one after the other."""
    name = f"ready first {seed}"
    for number, fault in enumerate((Timeline.die, runs.kill("answers"), runs.kill("main"))):
        try:
            runs.start(name, "ready first", f"{seed} {number}", fault)
        except (DriverKilled, ClusterError):
            continue
    runs.start(name, "ready first", seed)
    run, rows = runs.folder / name, Counter[tuple[int, int, int]]()
    files = layout.rollout_files(run)
    assert [*files] == [*range(1, STEPS + 1)]
    for step in files:
        columns = rollout_columns(run, step)
        rows.update(zip(columns["epoch"], columns["prompt_id"], columns["sample"], strict=True))
        for versions in columns["versions"]:
            sampled = [version for version in versions if version >= 0]
            assert step - 3 <= sampled[0] and sampled == sorted(sampled) and sampled[-1] < step
    assert {*rows.values()} == {1} and len(rows) == STEPS * 8
