"""Sections: the settings of a run of a language model, as a recipe writes them.

run.toml ─ load_recipe (``app.recipe``) ─> Recipe: sections, each checked alone ─> Resolved (``app.resolved``)

A section neither completes nor judges another one: ``app.defaults`` chooses what a recipe leaves open, and
``app.contradictions`` finds settings that do not fit together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, Union

from pydantic import Field, create_model, field_validator

from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.config import AlgorithmConfig, WarmStartConfig
from rillflow.algorithms.registry import ALGORITHMS
from rillflow.app.any_recipe import DirectoryConfig
from rillflow.app.plugin_sections import with_sections
from rillflow.app.schedules import added_schedules
from rillflow.config.schema import Section, tags
from rillflow.controller.schedules.in_order import InOrder
from rillflow.controller.schedules.registry import SCHEDULES
from rillflow.controller.schedules.schedule import Schedule
from rillflow.models.config import ModelConfig
from rillflow.rewards.config import CostConfig, RewardConfig
from rillflow.rollout.config import RolloutConfig, Temperature
from rillflow.tasks.config import TaskConfig
from rillflow.training.config import TrainConfig
from rillflow.workers.config import PlacementConfig

if TYPE_CHECKING:
    AnyAlgorithm: TypeAlias = AlgorithmConfig
    AnySchedule: TypeAlias = Schedule
else:
    AnySchedule = Union[tuple(SCHEDULES.values())]  # noqa: UP007  dynamic
    AnyAlgorithm = Union[tuple(algorithm.config for algorithm in ALGORITHMS.values())]  # noqa: UP007  dynamic


class RunConfig(DirectoryConfig):
    """Directory, device and checkpoints of a run of a language model."""

    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N.")
    checkpoint_minutes: float = Field(
        5.0,
        ge=0,
        description="Minutes between checkpoints, or longer if writing one takes over 2% of that time; 0 "
        "for none.",
    )
    checkpoint_every: int = Field(
        0, ge=0, description="Steps between further checkpoints; 0 leaves it to checkpoint_minutes."
    )
    stop_s: float = Field(
        20.0,
        ge=0,
        description="Seconds after SIGTERM or Ctrl-C in which open steps may end; then they are abandoned.",
    )
    max_skipped: int = Field(
        5,
        ge=0,
        description="Optimiser steps that may be skipped because a number is not finite; one more stops "
        "the run.",
    )
    rollouts_every: int = Field(
        1, ge=0, description="Steps between two steps whose rollouts are written; 0 writes none."
    )
    rollouts_share: float = Field(
        1.0, gt=0, le=1, description="Share of the prompts whose rollouts are written in such a step."
    )


class PolicyConfig(TrainConfig):
    """The trained model and its optimiser settings: the policy, or the model that is trained instead.

    A setting with "auto" in its description has the shown default only where nothing is known of device and
    model; ``load_recipe`` chooses (``app.defaults``).
    """

    model: ModelConfig
    lr: float = Field(
        1e-5,
        gt=0,
        description='Peak learning rate; left out or "auto", by size of the model, algorithm and adapter.',
    )
    warmup_steps: int = Field(
        0,
        ge=0,
        description='Optimiser steps of linear warm-up; left out or "auto", 10, 5 or 0 by the number of all.',
    )
    gradient_checkpointing: bool = Field(
        False,
        description="Recompute activations in the backward pass to save memory; left out or "
        '"auto", by device and model size.',
    )


class CriticConfig(Section):
    """The critic, if the algorithm has one; all other settings are the policy's."""

    path: str | None = Field(
        None,
        description="Initial weights: a model's directory, or a run (its critic, else its reward model, "
        "else its policy). Left out, the policy's weights with a new head.",
    )
    lr: float | None = Field(None, gt=0, description="Peak learning rate; left out, the policy's.")


class EvaluateConfig(Section):
    """Evaluation on held-out prompts."""

    every: int = Field(0, ge=0, description="Steps between evaluations; 0 evaluates only before and after.")
    problems: int = Field(500, ge=0, description="Held-out prompts to evaluate at most; 0 for none.")
    temperature: Temperature = Field(0.0, description="Sampling temperature of the answers; 0 is greedy.")
    samples: int = Field(1, gt=0, description="Completions of each held-out prompt, for pass@k.")
    sets: dict[str, str] = Field(
        {},
        description="Further evaluation sets: prompt files by name. Each has its own line in "
        "evaluations.jsonl.",
    )
    patience: int = Field(
        0,
        ge=0,
        description="Evaluations in a row without a better held-out result after which the run stops; 0 "
        "for never.",
    )
    success: float | None = Field(
        None, description="Smallest reward that counts as right, if rewards are not only 0 and 1."
    )


class Recipe(Section):
    """A whole run.

    Example:
        load_recipe(Path("recipes/arithmetic/run.toml"), ["policy.lr=1e-5"]).recipe
    """

    run: RunConfig = RunConfig()
    task: TaskConfig = TaskConfig()
    policy: PolicyConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    cost: CostConfig = CostConfig()
    critic: CriticConfig = CriticConfig()
    warm_start: WarmStartConfig | None = None
    algorithm: AnyAlgorithm = Field(discriminator="name")
    schedule: AnySchedule = Field(InOrder(), discriminator="mode")
    evaluate: EvaluateConfig = EvaluateConfig()
    placement: PlacementConfig = PlacementConfig()
    algorithms: ClassVar[Mapping[str, Algorithm]] = ALGORITHMS
    """Algorithms that ``[algorithm]`` may name."""

    @field_validator("evaluate", mode="before")
    @classmethod
    def _none_is_never(cls, value: object) -> object:
        return EvaluateConfig(problems=0) if value is None else value

    @property
    def chosen(self) -> Algorithm:
        """Algorithm that ``[algorithm]`` names."""
        return self.algorithms[self.algorithm.name]


def recipe_class(algorithms: Sequence[Algorithm] = ()) -> type[Recipe]:
    """Return a recipe class with the sections and schedules of plugins that may also name these algorithms.

    An algorithm replaces a shipped one of its name.

    Raises:
        ConfigError: two plugins bring one section.
    """
    kind = _with_orders(with_sections(Recipe), tuple(added_schedules().values()))
    if not algorithms:
        return kind
    named = {name: each for each in algorithms for name in tags(each.config, "name")}
    known = {**ALGORITHMS, **named}
    choices: Any = Union[tuple(each.config for each in known.values())]  # noqa: UP007  made at run time
    made = _derived(kind, algorithm=(choices, Field(discriminator="name")))
    made.algorithms = known
    return made


@cache
def _with_orders(kind: type[Recipe], added: tuple[type[Schedule], ...]) -> type[Recipe]:
    """Return a recipe class with further schedules, always the same one: its objects can be compared."""
    if not added:
        return kind
    orders: Any = Union[(*SCHEDULES.values(), *added)]
    return _derived(kind, schedule=(orders, Field(InOrder(), discriminator="mode")))


def _derived(kind: type[Recipe], **fields: Any) -> type[Recipe]:
    derived: Any = create_model  # its type is that of no class that is known here
    made: type[Recipe] = derived("Recipe", __base__=kind, **fields)
    return made
