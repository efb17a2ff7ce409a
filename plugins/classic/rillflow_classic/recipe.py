"""Recipe: the settings of a classic run, checked, with the commands that it answers.

run.toml + --set ─> algorithm.name ─ registry ─> its settings ─> LoadedClassicRecipe ─┬─ run ─> launch
                                                                                      ├─ check ─> Report
                                                                                      └─ graphs ─> Graph
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic import Field, create_model

from rillflow.app.check_report import Report
from rillflow.app.recipe import leaves, run_name
from rillflow.app.tracker_checks import require_tracker
from rillflow.config.load import Override, apply_overrides, validate
from rillflow.config.problems import shown, together
from rillflow.config.schema import Data, Section
from rillflow.errors import ConfigError, RillflowError, nearest
from rillflow.runs import layout
from rillflow.runs.json_lines import read_json
from rillflow_classic.algorithm import ClassicAlgorithm
from rillflow_classic.algorithms.registry import algorithm_of
from rillflow_classic.config import (
    ActorsConfig,
    AlgorithmSettings,
    ClassicRunConfig,
    EpisodesConfig,
    PopulationConfig,
    perturbed,
)
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.networks.config import NetworkConfig

if TYPE_CHECKING:
    from rillflow.controller.interrupt import Interruption
    from rillflow.graph.graph import Graph
    from rillflow.records.metrics import Metrics
    from rillflow.runs.summary import Summary

ONLY = "policy"
"""Name of the policy where there is one."""


class ClassicRecipe(Section):
    """A whole run.

    Raises:
        ConfigError: two settings contradict each other.
    """

    kind: Literal["classic"]
    environment: EnvironmentSettings
    network: NetworkConfig = NetworkConfig()
    policies: dict[str, str] = Field(
        {},
        description="Regular expression of its agents' names by policy, first match wins; left out, one "
        "policy acts for all.",
    )
    workers: ActorsConfig = ActorsConfig()
    evaluate: EpisodesConfig = EpisodesConfig()
    population: PopulationConfig | None = None
    run: ClassicRunConfig = ClassicRunConfig()

    @property
    def steps(self) -> int:
        """Steps of the run."""
        found: int = cast(Any, self).algorithm.steps
        return found

    @property
    def routes(self) -> dict[str, str] | None:
        """Policy by regular expression of its agents; None for one policy."""
        return {pattern: name for name, pattern in self.policies.items()} or None


@dataclass(frozen=True, kw_only=True)
class LoadedClassicRecipe:
    """A checked recipe; see ``PluginRecipe``."""

    recipe: ClassicRecipe
    """The settings."""
    algorithm: ClassicAlgorithm
    """The algorithm that they name."""
    path: Path
    """The recipe's file."""
    given: Mapping[str, str]
    """Origin of each given setting, by dotted key: the file's name or ``--set``."""

    @classmethod
    def of(cls, path: Path, data: Data, overrides: Sequence[Override]) -> LoadedClassicRecipe:
        """Check a recipe.

        Raises:
            ConfigError: the recipe cannot run; it lists every reason that the settings alone show.
        """
        asked = apply_overrides(data, overrides)
        named = asked.get("algorithm")
        algorithm = algorithm_of(named.get("name") if isinstance(named, Mapping) else None)
        recipe = validate(recipe_class(algorithm), asked, str(path))
        problems = list(_contradictions(recipe, algorithm))
        if problems:
            raise together(problems, str(path))
        if recipe.run.dir is None:
            run = recipe.run.model_copy(update={"dir": str(Path("runs") / run_name(path))})
            recipe = recipe.model_copy(update={"run": run})
        given = dict.fromkeys(leaves(data), path.name)
        given |= dict.fromkeys(leaves(apply_overrides({}, overrides)), "--set")
        return cls(recipe=recipe, algorithm=algorithm, path=path, given=given)

    @property
    def settings(self) -> Section:
        """Settings of the algorithm, as its own class; an actor in another process receives them."""
        given = cast(Any, self.recipe).algorithm.model_dump()
        own = self.algorithm.config
        return own.model_validate({name: given[name] for name in own.model_fields})

    @property
    def base(self) -> Path:
        """Folder of the file; paths in the recipe are relative to it."""
        return self.path.parent

    @property
    def directory(self) -> Path:
        """See PluginRecipe."""
        return Path(str(self.recipe.run.dir))

    @property
    def tags(self) -> Sequence[str]:
        """See PluginRecipe."""
        return self.recipe.run.tags

    @property
    def threads(self) -> int:
        """See PluginRecipe."""
        return self.recipe.run.threads

    @property
    def is_finished(self) -> bool:
        """See PluginRecipe."""
        mark = self.directory / layout.FINISHED
        return mark.is_file() and bool(read_json(mark)["steps"] == self.recipe.steps)

    def run(
        self,
        *,
        fresh: bool = False,
        quiet: bool = False,
        command: Sequence[str] = (),
        told: Callable[[str, int, Metrics], None] | None = None,
        interruption: Interruption | None = None,
    ) -> Summary:
        """See PluginRecipe."""
        from rillflow_classic.run import launch

        return launch(self, fresh=fresh, quiet=quiet, command=command, told=told, interruption=interruption)

    def check(self, *, every_setting: bool = False, runs_code: bool = True) -> Report:
        """See PluginRecipe; it makes one environment, unless ``runs_code`` is False."""
        report = Report()
        workers, population = self.recipe.workers, self.recipe.population
        each = workers.actors * workers.ring * workers.slots * workers.steps
        report.say(
            "batch",
            [
                f"{workers.actors} actors x {workers.ring} environment groups x {workers.slots} environments "
                f"x {workers.steps} steps = {each:,} environment steps in one fragment of every actor",
                f"{self.recipe.steps:,} steps of {self.algorithm.name}"
                + (f", in each of {population.members} members" if population else ""),
            ],
        )
        if runs_code:
            self._look(report)
        report.say("settings", self._setting_lines(every_setting))
        return report

    def graphs(self) -> list[Graph]:
        """See PluginRecipe."""
        from rillflow_classic.run import drawn

        return [drawn(self)]

    def _look(self, report: Report) -> None:
        """Make one environment and the learners, look for the trackers, and report their problems."""
        from rillflow_classic.build import Parts

        for name, settings in self.recipe.run.trackers.named.items():
            try:
                require_tracker(name, settings, self.base)
            except RillflowError as error:
                report.problems.append(error)
        try:
            parts = Parts.of(self)
            spaces = {"observations": parts.observation_space, "actions": parts.action_space}
            report.say("environment", [f"{name}: {space}" for name, space in spaces.items()])
            parts.learners()
        except RillflowError as error:
            report.problems.append(error)

    def _setting_lines(self, every: bool) -> list[str]:
        data: Any = self.recipe.model_dump(exclude_none=True)
        lines = []
        for dotted in leaves(data):
            value = data
            for name in dotted.split("."):
                value = value[name]
            if every or dotted in self.given:
                lines.append(f"{dotted} = {shown(value)}  ({self.given.get(dotted, 'default')})")
        return lines if every else [*lines, "the other settings have their defaults; --all shows them"]


def recipe_class(algorithm: ClassicAlgorithm) -> type[ClassicRecipe]:
    """Return the recipe's class with the settings of an algorithm."""
    own = algorithm.config
    bases = (own,) if issubclass(own, AlgorithmSettings) else (AlgorithmSettings, own)
    settings = create_model(own.__name__, __base__=bases, __doc__=own.__doc__)
    fields: Any = {"algorithm": (settings, ...)}
    made: type[ClassicRecipe] = create_model("ClassicRecipe", __base__=ClassicRecipe, **fields)
    return made


def _contradictions(recipe: ClassicRecipe, algorithm: ClassicAlgorithm) -> Iterator[ConfigError]:
    workers = recipe.workers
    if algorithm.calls_actors and workers.transport != "calls":
        yield ConfigError(
            f"workers.transport is {shown(workers.transport)} and algorithm.name is {shown(algorithm.name)}",
            why="its plan calls methods of the actors, and fragments of a stream come without a call",
            fix='set workers.transport = "calls"',
        )
    for name, pattern in recipe.policies.items():
        try:
            re.compile(pattern)
        except re.error as error:
            yield ConfigError(
                f"policies.{name} is {shown(pattern)}",
                why=f"it is not a regular expression: {error}",
                fix="write for example 'agent_[02]'",
            )
    if workers.trainers > 1 and not (algorithm.sums_gradients and len(recipe.policies) < 2):
        yield ConfigError(
            f"workers.trainers is {workers.trainers} and algorithm.name is {shown(algorithm.name)}",
            why="several trainers need one policy whose learner sums its gradients over ranks",
            fix="set workers.trainers = 1",
        )
    if workers.trainers > 1 and (workers.place == "inline" or workers.inference == "trainer"):
        yield ConfigError(
            f"workers.trainers is {workers.trainers} and workers.place is {shown(workers.place)}, "
            f"workers.inference {shown(workers.inference)}",
            why="trainer ranks are processes of their own, and this process acts for none of them",
            fix='set workers.place = "process" and workers.inference = "actor"',
        )
    if workers.buffer_workers and (workers.transport == "calls" or algorithm.reanalyse is None):
        yield ConfigError(
            f"workers.buffer_workers is {workers.buffer_workers}, workers.transport is "
            f"{shown(workers.transport)} and algorithm.name is {shown(algorithm.name)}",
            why="they compute fragments of a stream anew, as an algorithm with ``reanalyse`` says",
            fix="set workers.buffer_workers = 0",
        )
    if recipe.evaluate.from_training and (workers.executor == "static" or recipe.population is not None):
        yield ConfigError(
            "evaluate.from_training is true, with a static executor or a population",
            why="an evaluation worker is given the episodes of one plan's rollouts",
            fix="set evaluate.from_training = false; evaluate.every evaluates between steps",
        )
    if workers.executor == "static":
        yield from _of_static(workers, algorithm)
    if recipe.population is not None:
        yield from _of_population(recipe.population, recipe)
    if workers.inference != "actor" and workers.transport == "calls":
        yield ConfigError(
            f"workers.inference is {shown(workers.inference)} and workers.transport is 'calls'",
            why="actions that are computed elsewhere arrive through a stream",
            fix='set workers.transport = "shared_memory"',
        )
    if workers.transport == "shared_memory" and workers.place == "ray":
        yield ConfigError(
            "workers.transport is 'shared_memory' and workers.place is 'ray'",
            why="workers of several machines share no memory",
            fix='set workers.transport = "tcp"',
        )


def _of_static(workers: ActorsConfig, algorithm: ClassicAlgorithm) -> Iterator[ConfigError]:
    if workers.place != "inline" or workers.transport != "calls":
        yield ConfigError(
            f"workers.executor is 'static', workers.place is {shown(workers.place)} and workers.transport is "
            f"{shown(workers.transport)}",
            why="a static plan runs the actors on threads of this process, and passes fragments by reference",
            fix='set workers.place = "inline" and workers.transport = "calls", or workers.executor = "pull"',
        )
    if algorithm.calls_actors or algorithm.pools:
        yield ConfigError(
            f"workers.executor is 'static' and algorithm.name is {shown(algorithm.name)}",
            why="its plan calls workers as their results come, and a static plan has a fixed pattern",
            fix='set workers.executor = "pull"',
        )


def _of_population(population: PopulationConfig, recipe: ClassicRecipe) -> Iterator[ConfigError]:
    settings: Section = cast(Any, recipe).algorithm
    own = sorted(set(type(settings).model_fields) - set(AlgorithmSettings.model_fields))
    numbers = [name for name in own if type(settings.model_dump()[name]) in (int, float)]
    for name, bounds in population.perturb.items():
        if name not in numbers:
            yield ConfigError(
                f"population.perturb names {name!r}",
                why=f"the numbers among the settings of the algorithm are {', '.join(numbers)}",
                fix=nearest(name, numbers),
            )
        elif not 0 < bounds[0] < bounds[1]:
            yield ConfigError(
                f"population.perturb.{name} is {list(bounds)}",
                why="a lowest value above 0 comes before a higher one: values are drawn by their logarithm",
                fix=f"write for example {name} = [1e-4, 1e-2]",
            )
        for bound in bounds if name in numbers else ():
            try:
                perturbed(settings, {name: bound})
            except ValueError as error:
                told = str(error).splitlines()[2].strip()
                yield ConfigError(f"population.perturb.{name} reaches {bound:g}", why=told)
    workers = recipe.workers
    if workers.transport != "calls" or workers.inference != "actor":
        yield ConfigError(
            f"a population has workers.transport = {shown(workers.transport)} and "
            f"workers.inference = {shown(workers.inference)}",
            why="each member calls the actors in its own process",
            fix='set workers.transport = "calls" and workers.inference = "actor"',
        )
