"""Evaluations and the video of a run, each in environments of its own, which have numbers after the actors'.

    weights, statistics ─> evaluate(step) ─> evaluations.jsonl, a line on the screen
                        └> record(step) ──> RUN/media/episode-after-step-N.webp, or a note why there is none

Where there is room for one copy of a simulator only, the environments of the actors are in the way, and
evaluations before the last step are left out with a note. After the last step, ``close_environments`` ends
those of the actors, and the last evaluation plays its episodes one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rillflow.errors import ConfigError
from rillflow.runs.reader import read_evaluations
from rillflow_classic.build import Parts
from rillflow_classic.environments.make import make_video_environment
from rillflow_classic.environments.vector import EnvironmentFailure, VectorEnvironment
from rillflow_classic.evaluation import (
    cut_note,
    evaluation_environment,
    greedy_actor,
    judged_episodes,
    play,
    record_video,
)
from rillflow_classic.fragment import Array, FinishedEpisode
from rillflow_classic.running_plan import RunningPlan
from rillflow_classic.seeds import seed_of
from rillflow_classic.workers.actor import Actor
from rillflow_classic.workers.population import PopulationSystem

if TYPE_CHECKING:
    from rillflow.app.plugin_recipe import OpenRun
    from rillflow_classic.recipe import LoadedClassicRecipe

EVALUATED = 1
"""Added to the seed of an evaluation's episodes."""
COPY = "{copy}"
"""Text in arguments that stands for the number of an environment."""
SAID_S = 5.0
"""Seconds after which a line says that an evaluation goes on; each further line takes twice as long."""


class Patience:
    """Says that an evaluation goes on, and ends it when the user wants to stop.

    Args:
        name: what goes on, for the lines.
        say: shows a line.
        is_over: whether the user wants to stop.
        clock: returns seconds.
    """

    def __init__(
        self,
        name: str,
        say: Callable[[str], None],
        is_over: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._say, self._is_over, self._clock = name, say, is_over, clock
        self._began_s, self._next_s = clock(), SAID_S
        self.has_ended = False
        """Whether the user wanted to stop before the last episode was over."""

    def __call__(self, played: Sequence[FinishedEpisode], steps: int) -> bool:
        """Look at what has been played after some steps of every slot; return whether to end."""
        if (elapsed_s := self._clock() - self._began_s) >= self._next_s:
            self._next_s *= 2
            self._say(f"{self._name}: {len(played)} are over after {elapsed_s:.0f} s, {steps:,} steps a slot")
        self.has_ended = self._is_over()
        return self.has_ended


class RunEvaluations:
    """Evaluates and films the weights of a run's plan.

    Args:
        loaded: the recipe.
        run: the open run.
        parts: what environments are made from.
        plan: has the learners and the statistics.
    """

    def __init__(
        self, loaded: LoadedClassicRecipe, run: OpenRun, parts: Parts, plan: RunningPlan | PopulationSystem
    ) -> None:
        recipe = loaded.recipe
        self._run, self._parts, self._plan = run, parts, plan
        self._settings, self._seed, self._id = recipe.evaluate, recipe.run.seed, recipe.environment.id
        self._copy = parts.evaluation_copy
        self._statistics: Mapping[str, Array] | None = None
        self._evaluated = {record.step for record in read_evaluations(run.directory.path)}

    def close_environments(self) -> None:
        """Close the environments of the actors after the last step."""
        if self._plan.statistics is not None:
            self._statistics = self._plan.statistics.newest()
        self._plan.close_environments()

    def evaluate(self, step: int) -> bool:
        """Evaluate a step that has no evaluation; return False if the user stopped it."""
        settings, seed = self._settings, seed_of(self._seed, step, EVALUATED)
        if not settings.episodes or step in self._evaluated:
            return True
        if (environment := self._environment(step, seed)) is None:
            return True
        limit, count = settings.episode_limit, environment.num_slots // len(set(environment.agents))
        bound = f"; evaluate.episode_limit cuts each after {limit:,} steps" if limit else ""
        name = f"step {step}: an evaluation of {settings.episodes} episodes goes on{bound}"
        asked = self._run.interruption
        patience = Patience(name, self._run.progress.note, lambda: asked.requested)
        with self._player(environment, seed) as player:
            each = settings.episodes // count
            played = play(player, environment.num_slots, each, most_steps=limit, ends=patience)
        if patience.has_ended:
            return False
        self._log(step, played)
        return True

    def record(self, step: int) -> None:
        """Film an episode; what fails is a note, because the run has its results."""
        seed, reason = seed_of(self._seed, step, EVALUATED), "it shows no pictures"
        try:
            environment = make_video_environment(self._parts.environment, seed=seed, copy=self._copy)
            with self._player(environment, seed, steps=1) as player:
                name = f"episode-after-step-{step}"
                if record_video(player, environment, self._run.directory.path, name) is not None:
                    return
        except (Exception, SystemExit) as error:  # noqa: BLE001  graphics and the user's class raise anything
            reason = f"{type(error).__name__}: {error}"
        self._run.progress.note(f"there is no video of {self._id}: {reason}")

    def _environment(self, step: int, seed: int) -> VectorEnvironment | None:
        """Make the environments of an evaluation, or one if there is room for one only; None with a note."""
        given, limit = self._parts.environment, self._settings.episode_limit
        try:
            return evaluation_environment(
                given, self._settings.episodes, seed=seed, copy=self._copy, most_steps=limit
            )
        except (ConfigError, EnvironmentFailure) as error:
            self._run.progress.note(
                f"step {step}: no evaluation, because no environment can be made beside those of the actors: "
                f"{error.what}; see {COPY} in environment.arguments"
            )
        return None

    def _log(self, step: int, played: Sequence[FinishedEpisode]) -> None:
        """Write the result of an evaluation."""
        found, limit = judged_episodes(played, self._settings.success), self._settings.episode_limit
        self._run.directory.log_evaluation(step, found)
        self._evaluated.add(step)
        self._run.progress.note(f"step {step}: {found.text}")
        if note := cut_note(played, limit):
            self._run.progress.note(f"step {step}: {note}")

    @contextmanager
    def _player(self, environment: VectorEnvironment, seed: int, steps: int = 16) -> Iterator[Actor]:
        """Yield a player of the present weights in an environment, which it closes."""
        try:
            if (statistics := self._statistics) is None and self._plan.statistics is not None:
                statistics = self._plan.statistics.newest()
            if statistics is not None:
                environment.restore(statistics, frozen=True)
            policies = {name: learner.policy for name, learner in self._plan.learners.items()}
            yield greedy_actor(environment, policies, self._parts.routes, seed, steps)
        finally:
            environment.close()
