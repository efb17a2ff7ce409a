"""Recipe: a classic run's checked settings, and the methods that the commands call.

run.toml + --set ─> algorithm.name ─ registry ─> its settings ─> LoadedClassicRecipe ─┬─ train ─> ClassicLoop
                                                                                      ├─ look ─> Report
                                                                                      └─ graphs ─> Graph
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import create_model

from rillflow.app.any_recipe import origins, with_directory
from rillflow.app.plugin_recipe import OpenRun, PluginRecipe
from rillflow.app.plugin_sections import validated, with_sections
from rillflow.config.load import Override, apply_overrides
from rillflow.config.problems import shown, together
from rillflow.config.schema import Data, Section
from rillflow.errors import ConfigError, nearest
from rillflow.runs.reader import read_starts
from rillflow_classic.algorithm import ClassicAlgorithm
from rillflow_classic.algorithms.registry import algorithm_of, located
from rillflow_classic.config import AlgorithmSettings, ClassicRecipe, perturbed
from rillflow_classic.schedule import adjustable, stretched, with_schedules

if TYPE_CHECKING:
    from rillflow.app.check_report import Report
    from rillflow.graph.graph import Graph

MAY_CHANGE = (
    *("algorithm.steps", "environment.run", "environment.processes", "environment.step_timeout_s"),
    *("workers.threads", "evaluate"),
    *(f"run.{name}" for name in ("dir", "tags", "threads", "keep_checkpoints", "restarts")),
)
"""Settings, or sections, that a resumed run of every algorithm may change."""


@dataclass(frozen=True, kw_only=True)
class LoadedClassicRecipe(PluginRecipe):
    """A checked recipe."""

    recipe: ClassicRecipe
    """The settings."""
    algorithm: ClassicAlgorithm
    """The algorithm that they name."""

    @classmethod
    def of(cls, path: Path, data: Data, overrides: Sequence[Override]) -> LoadedClassicRecipe:
        """Check a recipe.

        Raises:
            ConfigError: the recipe cannot run; it lists every reason that the settings alone show.
        """
        asked = apply_overrides(data, overrides)
        named = asked.get("algorithm")
        named = named.get("name") if isinstance(named, Mapping) else None
        algorithm = algorithm_of(located(named, path.parent))
        recipe = with_directory(validated(recipe_class(algorithm), asked, str(path)), path)
        problems = [*_contradictions(recipe, algorithm), *_of_policies(recipe, algorithm)]
        problems += _of_population(recipe)
        if problems:
            raise together(problems, str(path))
        given = origins(path, data, overrides)
        return cls(recipe=recipe, algorithm=algorithm, path=path, base=path.parent, given=given)

    @property
    def may_change(self) -> Sequence[str]:
        """Settings that a resumed run may change: no fragment or weight so far depends on them."""
        population = self.recipe.population
        chosen = population.perturb if population else ()
        return (*MAY_CHANGE, *adjustable(self.recipe.algorithm, chosen))

    @property
    def suggested(self) -> Mapping[str, str]:
        """Commands to suggest at the end of a run."""
        return {"play it": shlex.join(["rillflow", "play", str(self.directory)])}

    @property
    def phase(self) -> str:
        """Name of the algorithm."""
        return self.algorithm.name

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return self.recipe.algorithm.steps

    @property
    def settings(self) -> Section:
        """Settings of the algorithm, as its own class; an actor in another process receives them."""
        given, own = self.recipe.algorithm.model_dump(), self.algorithm.config
        return own.model_validate({name: given[name] for name in own.model_fields})

    def look(self, report: Report, *, runs_code: bool) -> None:
        """Add the size of a batch; with ``runs_code``, make one environment and the learners."""
        workers, population = self.recipe.workers, self.recipe.population
        each = workers.actors * workers.ring * workers.slots * workers.steps
        report.say(
            "batch",
            [
                f"{workers.actors} actors x {workers.ring} environment groups x {workers.slots} environments "
                f"x {workers.steps} steps = {each:,} environment steps in one fragment of every actor",
                f"{self.steps:,} steps of {self.phase}"
                + (f", in each of {population.members} members" if population else ""),
            ],
        )
        if runs_code:
            from rillflow_classic.run import look_at_environment

            report.attempt(look_at_environment, self)

    def graphs(self) -> list[Graph]:
        """Return the plan as a graph; actors are made, and nothing runs."""
        from rillflow_classic.run import drawn

        return [drawn(self)]

    def train(self, run: OpenRun) -> None:
        """Make the remaining steps."""
        from rillflow_classic.run import ClassicLoop

        schedules = stretched(self.recipe.algorithm, read_starts(run.directory.path), self.steps)
        for each in schedules:
            run.progress.note(str(each))
        algorithm = with_schedules(self.recipe.algorithm, schedules)
        followed = replace(self, recipe=self.recipe.model_copy(update={"algorithm": algorithm}))
        ClassicLoop(followed, run).run()


def recipe_class(algorithm: ClassicAlgorithm) -> type[ClassicRecipe]:
    """Return the recipe's class with the settings of an algorithm."""
    own = algorithm.config
    settings = create_model(own.__name__, __base__=(AlgorithmSettings, own), __doc__=own.__doc__)
    fields: Any = {"algorithm": (settings, ...)}
    kind = with_sections(ClassicRecipe, shared_only=True)
    derived: Any = create_model  # its type is that of no class that is known here
    made: type[ClassicRecipe] = derived("ClassicRecipe", __base__=kind, **fields)
    return made


@dataclass(frozen=True)
class Need:
    """A setting that needs others to have certain values."""

    applies: bool
    """Whether the recipe has the setting."""
    by: str
    """The setting, as section and name."""
    values: Mapping[str, Sequence[Any]]
    """Possible values by setting."""
    why: str
    """Why there are no other values."""


def _needs_of_algorithm(recipe: ClassicRecipe, algorithm: ClassicAlgorithm) -> Sequence[Need]:
    name, is_alone = "algorithm.name", len(recipe.policies) < 2
    return (
        Need(
            algorithm.calls_actors,
            name,
            {"workers.transport": ["calls"]},
            "its plan calls methods of the actors, and fragments of a stream come without a call",
        ),
        Need(
            algorithm.calls_actors or not algorithm.is_in_step,
            name,
            {"workers.executor": ["pull"]},
            "its plan calls an actor, or takes fragments as they come; a static plan has a fixed pattern",
        ),
        Need(
            not (algorithm.sums_gradients and is_alone),
            name,
            {"workers.trainers": [1]},
            "several trainers need one policy whose learner sums its gradients over ranks",
        ),
        Need(
            algorithm.reanalyse is None,
            name,
            {"workers.buffer_workers": [0]},
            "buffer workers call the algorithm's reanalyse function, and it has none",
        ),
    )


def _needs_of_workers(recipe: ClassicRecipe) -> Sequence[Need]:
    workers = recipe.workers
    return (
        Need(
            workers.trainers > 1,
            "workers.trainers",
            {"workers.place": ["process", "ray"], "workers.inference": ["actor", "policy"]},
            "trainer ranks are processes of their own, and this process acts for none of them",
        ),
        Need(
            workers.executor == "static",
            "workers.executor",
            {"workers.place": ["inline"], "workers.transport": ["calls"]},
            "a static plan runs the actors on threads of this process, and passes fragments by reference",
        ),
        Need(
            recipe.population is not None,
            "population.members",
            {
                "workers.transport": ["calls"],
                "workers.inference": ["actor"],
                "evaluate.from_training": [False],
            },
            "each member calls the actors in its own process, and no evaluation worker sees their episodes",
        ),
        Need(
            workers.inference != "actor",
            "workers.inference",
            {"workers.transport": ["shared_memory", "tcp"]},
            "actions that are computed elsewhere arrive through a stream",
        ),
        Need(
            workers.buffer_workers > 0,
            "workers.buffer_workers",
            {"workers.transport": ["shared_memory", "tcp"]},
            "buffer workers recompute the fragments of a stream",
        ),
        Need(
            workers.place == "ray",
            "workers.place",
            {"workers.transport": ["calls", "tcp"]},
            "workers of several machines share no memory",
        ),
    )


def _contradictions(recipe: ClassicRecipe, algorithm: ClassicAlgorithm) -> Iterator[ConfigError]:
    tables = {name: table for name, table in recipe.model_dump().items() if isinstance(table, dict)}
    values = {f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()}
    for need in (*_needs_of_algorithm(recipe, algorithm), *_needs_of_workers(recipe)):
        for key, allowed in need.values.items() if need.applies else ():
            if values[key] not in allowed:
                yield ConfigError(
                    f"{key} is {shown(values[key])} and {need.by} is {shown(values[need.by])}",
                    why=need.why,
                    fix=f"set {key} = {' or '.join(map(shown, allowed))}",
                )


def _of_policies(recipe: ClassicRecipe, algorithm: ClassicAlgorithm) -> Iterator[ConfigError]:
    names, wanted = sorted(recipe.policies), sorted(algorithm.policies)
    if names != wanted and (wanted or len(names) > 1):
        why, fix = "it trains one policy for all agents", 'remove [policies], or choose "two_trainers"'
        if wanted:
            why = f"it trains the policies {shown(wanted)}"
            lines = ", ".join(f'{each} = "..."' for each in wanted)
            fix = f"write [policies] with {lines}: a regular expression of the agents' names for each"
        what = f"[policies] names {shown(names)} and algorithm.name is {shown(algorithm.name)}"
        yield ConfigError(what, why, fix)
    for name, pattern in recipe.policies.items():
        try:
            re.compile(pattern)
        except re.error as error:
            yield ConfigError(
                f"policies.{name} is {shown(pattern)}",
                why=f"it is not a regular expression: {error}",
                fix="write for example 'agent_[02]'",
            )


def _of_population(recipe: ClassicRecipe) -> Iterator[ConfigError]:
    settings = recipe.algorithm
    values = {name: each for name, each in settings.model_dump().items() if name != "steps"}
    numbers = sorted(name for name, each in values.items() if type(each) in (int, float))
    for name, bounds in recipe.population.perturb.items() if recipe.population else ():
        what = f"population.perturb.{name} is {list(bounds)}"
        if name not in numbers:
            why = f"the numbers among the settings of the algorithm are {', '.join(numbers)}"
            yield ConfigError(f"population.perturb names {name!r}", why=why, fix=nearest(name, numbers))
            continue
        if not 0 < bounds[0] < bounds[1]:
            yield ConfigError(
                what,
                why="values are drawn by their logarithm, between a lowest value above 0 and a higher one",
                fix=f"write for example {name} = [1e-4, 1e-2]",
            )
            continue
        for bound in bounds:
            try:
                perturbed(settings, {name: bound})
            except ConfigError as error:
                yield ConfigError(f"{what}, which reaches {bound:g}", why=error.why, fix="narrow the bounds")
