"""Config: the settings of a recipe with ``kind = "classic"``, beside those of environment and network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import Field

from rillflow.app.any_recipe import DirectoryConfig
from rillflow.config.load import validate
from rillflow.config.schema import Section
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.networks.config import NetworkConfig

S = TypeVar("S", bound=Section)


class AlgorithmSettings(Section):
    """Settings that every algorithm has; each adds its own."""

    name: str = Field(description="Name of the algorithm.")
    steps: int = Field(gt=0, description="Steps of the run: items of the algorithm's plan.")


class ActorsConfig(Section):
    """Workers: how many actors, what they act in, and how fragments reach the learner."""

    actors: int = Field(1, gt=0, description="Actors.")
    slots: int = Field(8, gt=0, description="Environments of each actor that step together.")
    steps: int = Field(128, gt=0, description="Steps of each environment in a fragment.")
    ring: int = Field(
        1, gt=0, description="Groups of environments that an actor steps in turn; each has ``slots`` of them."
    )
    place: Literal["inline", "process", "ray"] = Field(
        "inline", description="Where workers run: in this process, in processes of this machine, or on Ray."
    )
    inference: Literal["actor", "policy", "trainer"] = Field(
        "actor", description="Where actions are computed: at the actor, at policy workers, or at the trainer."
    )
    policy_workers: int = Field(1, gt=0, description='Policy workers, for inference = "policy".')
    transport: Literal["calls", "shared_memory", "tcp"] = Field(
        "calls", description="How fragments travel: as results of calls, or through streams."
    )
    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description='Address of this machine for the workers, for transport = "tcp".',
    )
    batch: int = Field(
        1, gt=0, description="Fragments of a batch, for plans that take fragments of a stream as they come."
    )
    reuses: int = Field(
        1,
        gt=0,
        description="Number of batches that each fragment of a stream may be in, for plans that take "
        "fragments as they come.",
    )
    max_lag: int | None = Field(
        None,
        ge=0,
        description="Updates after which a waiting fragment of a stream is dropped; left out, none is. With "
        "prefetch, a batch may be one update older when it is used.",
    )
    depth: int = Field(
        2,
        gt=0,
        description="Places of a stream for the fragments of each group of environments; a group without a "
        "free place waits.",
    )
    prefetch: bool = Field(
        True, description="Whether a thread assembles the next batch of a stream during an update."
    )
    buffer_workers: int = Field(
        0,
        ge=0,
        description="Workers that recompute the fragments of a stream with the newest weights before the "
        "trainer takes them, for algorithms with a ``reanalyse`` function.",
    )
    trainers: int = Field(1, gt=0, description="Ranks of the trainer, data-parallel.")
    executor: Literal["pull", "static"] = Field(
        "pull",
        description="How all actors are run: by calls, or as a static plan on threads of this process.",
    )
    threads: int = Field(
        1,
        gt=0,
        description='Threads that step the actors, for executor = "static"; results do not depend on it.',
    )


class EpisodesConfig(Section):
    """Evaluation: whole episodes of the newest weights, with the most likely actions."""

    every: int = Field(0, ge=0, description="Steps between evaluations; 0 evaluates only before and after.")
    episodes: int = Field(20, ge=0, description="Episodes of an evaluation; 0 for none.")
    episode_limit: int = Field(
        30_000,
        ge=0,
        description="Steps after which an evaluation cuts an episode; 0 for no bound. Atari's own limit is "
        "27,000.",
    )
    success: float | None = Field(None, description="Smallest return of a successful episode.")
    from_training: bool = Field(
        False,
        description="Whether a worker also judges each version of the weights by its first ``episodes`` "
        "whole training episodes; episodes in which several versions acted are left out.",
    )
    video: bool = Field(True, description="Whether to record one episode after the last step.")


class PopulationConfig(Section):
    """Population-based training: several members, of which the worst copy the best and change settings."""

    members: int = Field(4, gt=1, description="Members; each has the actors of ``[workers]`` for itself.")
    every: int = Field(10, gt=0, description="Steps between two exchanges.")
    share: float = Field(
        0.25, gt=0, le=0.5, description="Share of the members that copy others; as many are copied."
    )
    perturb: dict[str, tuple[float, float]] = Field(
        min_length=1,
        description="Lowest and highest value of each setting of ``[algorithm]`` that members change. The "
        "first member begins with the recipe's values, the others draw theirs between these.",
    )


class CheckpointsConfig(DirectoryConfig):
    """Directory and checkpoints of a classic run."""

    checkpoint_every: int = Field(
        20,
        gt=0,
        description="Steps between checkpoints. After each, every environment begins a new episode, so that "
        "a resumed run makes the same steps.",
    )


class ClassicRecipe(Section):
    """A whole run; ``recipe.recipe_class`` gives ``[algorithm]`` the algorithm's own settings."""

    kind: Literal["classic"]
    environment: EnvironmentSettings
    network: NetworkConfig = NetworkConfig()
    policies: dict[str, str] = Field(
        {},
        description="Regular expression of its agents' names by policy, first match wins; left out, one "
        "policy acts for all.",
    )
    algorithm: AlgorithmSettings
    workers: ActorsConfig = ActorsConfig()
    evaluate: EpisodesConfig = EpisodesConfig()
    population: PopulationConfig | None = None
    run: CheckpointsConfig = CheckpointsConfig()

    @property
    def routes(self) -> dict[str, str] | None:
        """Policy by regular expression of its agents; None for one policy."""
        return {pattern: name for name, pattern in self.policies.items()} or None


def perturbed(settings: S, values: Mapping[str, float]) -> S:
    """Return settings with other values of some numbers; whole numbers are rounded.

    Raises:
        ConfigError: a value is outside its setting's limits.
    """
    given: dict[str, Any] = settings.model_dump()
    changed = {name: round(each) if isinstance(given[name], int) else each for name, each in values.items()}
    return validate(type(settings), {**given, **changed}, "the changed settings")
