"""Recipe: the record of a run's settings; `rillflow run` reads it, and a run directory keeps it.

run.toml + --set ─ load_recipe ─> LoadedRecipe ─┬─ recipe  ─> launch
                                                ├─ base    ─> the folder that its paths are relative to
                                                └─ given   ─> which settings are not defaults
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, Union

from pydantic import Field, create_model, field_validator, model_validator

from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.config import AlgorithmConfig, OnlineConfig, WarmStartConfig
from rillflow.algorithms.registry import ALGORITHMS
from rillflow.app.any_recipe import AnyRecipe, DirectoryConfig, origins, with_directory
from rillflow.app.consistency import inconsistencies
from rillflow.app.corrections import with_correction
from rillflow.app.default_pools import with_pools
from rillflow.app.device_defaults import AUTO, choices, with_values, without_auto
from rillflow.app.phases import phase_plans
from rillflow.app.plugin_recipe import PluginRecipe
from rillflow.app.plugins import recipe_loader
from rillflow.app.role_table import ROLES, Start
from rillflow.config.load import Override, apply_overrides, parse_override, read_toml, validate
from rillflow.config.problems import together
from rillflow.config.schema import Data, Section, tags
from rillflow.errors import ConfigError
from rillflow.models.config import ModelConfig
from rillflow.rewards.config import CostConfig, RewardConfig
from rillflow.rollout.config import RolloutConfig, Temperature
from rillflow.tasks.config import TaskConfig
from rillflow.training.config import TrainConfig
from rillflow.workers.config import PlacementConfig

KIND = "kind"
"""Key of a recipe that a plugin runs."""

if TYPE_CHECKING:
    AnyAlgorithm: TypeAlias = AlgorithmConfig
else:
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
    model; ``load_recipe`` chooses (``app.device_defaults``).
    """

    model: ModelConfig
    lr: float = Field(
        1e-5,
        gt=0,
        description='Peak learning rate; left out or "auto", by size of the model, algorithm and adapter.',
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

    Raises:
        ConfigError: two settings contradict each other.
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
    evaluate: EvaluateConfig = EvaluateConfig()
    placement: PlacementConfig = PlacementConfig()
    algorithms: ClassVar[Mapping[str, Algorithm]] = ALGORITHMS
    """Algorithms that ``[algorithm]`` may name."""

    @field_validator("evaluate", mode="before")
    @classmethod
    def _none_is_never(cls, value: object) -> object:
        return EvaluateConfig(problems=0) if value is None else value

    @model_validator(mode="after")
    def _placed(self) -> Recipe:
        """Give the sampler a pool of its own if it runs ahead and the recipe names no pools."""
        return with_pools(self)

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        problems = inconsistencies(self)
        if problems:
            raise together(problems, "the recipe")
        return self

    @model_validator(mode="after")
    def _corrected(self) -> Recipe:
        """Give a policy loss the default correction if its tokens may be off-policy."""
        if not isinstance(self.algorithm, OnlineConfig):
            return self
        algorithm = with_correction(self.algorithm, self.rollout.engine)
        return self.model_copy(update={"algorithm": algorithm})

    @property
    def chosen(self) -> Algorithm:
        """Algorithm that ``[algorithm]`` names."""
        return self.algorithms[self.algorithm.name]

    @property
    def total_steps(self) -> int:
        """Steps of all phases."""
        return sum(plan.config.steps for plan in phase_plans(self))

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that the phases call, in the order of their first call."""
        return tuple(dict.fromkeys(role for plan in phase_plans(self) for role in plan.roles))

    @property
    def trained_role(self) -> str:
        """Role whose model the section ``policy`` describes: the first role that starts from it."""
        own = (role for role in self.roles if role in ROLES and ROLES[role].start is Start.SECTION)
        return next(own, self.roles[0])

    @property
    def shares_reference(self) -> bool:
        """Whether the reference is the policy's own module with an earlier adapter."""
        placement, adapter = self.placement, self.policy.model.adapter
        roles = ("policy", "reference")
        pools = {(placement.pool_of(role), placement.mesh_of(role)) for role in roles}
        return adapter is not None and set(roles) <= set(self.roles) and len(pools) == 1

    @property
    def has_policy(self) -> bool:
        """Whether there is a policy; without one, nothing is sampled and no answer is scored."""
        return "policy" in self.roles


@dataclass(frozen=True, kw_only=True)
class LoadedRecipe(AnyRecipe):
    """A checked recipe of a language model; a default that device and model determine is ``auto: REASON``."""

    recipe: Recipe
    """The checked settings."""

    @property
    def named(self) -> Sequence[str]:
        """Dotted keys of the settings that the recipe or the command line names."""
        return [key for key, origin in self.given.items() if not origin.startswith(f"{AUTO}: ")]


@dataclass(frozen=True, kw_only=True)
class RecipeSource:
    """An unchecked recipe."""

    path: Path
    """The recipe's file; ``recipe`` for a dict."""
    data: Data
    """Its sections."""
    overrides: Sequence[Override]
    """Settings to change."""

    @classmethod
    def of(
        cls, source: str | Path | Mapping[str, Any], overrides: Sequence[str] | Mapping[str, Any]
    ) -> RecipeSource:
        """Read a recipe and its overrides; see ``load_recipe``."""
        path = Path("recipe") if isinstance(source, Mapping) else Path(source)
        data = source if isinstance(source, Mapping) else read_toml(path)
        if isinstance(overrides, Mapping):
            found = [Override(path=tuple(key.split(".")), value=value) for key, value in overrides.items()]
        else:
            found = [parse_override(text) for text in overrides]
        return cls(path=path, data=data, overrides=found)


def open_recipe(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] | Mapping[str, Any] = (),
    algorithms: Sequence[Algorithm] = (),
) -> LoadedRecipe | PluginRecipe:
    """Read a recipe of any kind; its ``kind`` names the plugin that runs it.

    Raises:
        ConfigError: see ``load_recipe``, or the recipe's kind is unknown or not installed.
    """
    found = RecipeSource.of(source, overrides)
    if KIND not in found.data:
        return load_recipe(source, overrides, algorithms)
    return recipe_loader(found.data[KIND], found.path)(found.path, found.data, found.overrides)


def require_language_model(recipe: LoadedRecipe | PluginRecipe) -> LoadedRecipe:
    """Return a recipe of a language model; refuse one of another kind."""
    if isinstance(recipe, LoadedRecipe):
        return recipe
    raise other_kind(f"the recipe of {recipe.directory}")


def other_kind(what: str) -> ConfigError:
    """Return the error of a command for language models that was given something else."""
    return ConfigError(
        f"{what} trains no language model",
        why="it names another kind, and this command is for language models",
        fix="rillflow run, check, graph, sweep and the commands that read a run directory accept every kind",
    )


def load_recipe(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] | Mapping[str, Any] = (),
    algorithms: Sequence[Algorithm] = (),
) -> LoadedRecipe:
    """Read a recipe and apply overrides.

    Args:
        source: the TOML file, or its sections; paths in a dict are relative to the present folder.
        overrides: ``KEY=VALUE`` texts as for ``--set``, or values by dotted keys.
        algorithms: custom algorithms that the recipe may name.

    Raises:
        ConfigError: the recipe cannot run; it lists every reason that the settings alone show.
    """
    found = RecipeSource.of(source, overrides)
    path, data, settings = found.path, found.data, found.overrides
    if KIND in data:
        raise other_kind(str(path))
    kind, asked = recipe_class(algorithms), without_auto(apply_overrides(data, settings))
    recipe = validate(kind, asked, str(path))
    chosen = choices(recipe, path.parent)
    values = {each.setting: each.value for each in chosen}
    if with_values(recipe, values) != recipe:  # validated again: other settings may depend on these
        filled = apply_overrides(
            asked, [Override(path=tuple(key.split(".")), value=values[key]) for key in values]
        )
        recipe = validate(kind, filled, str(path))
    recipe = with_values(recipe, values)
    recipe = with_directory(recipe, path)
    given = origins(path, data, settings)
    given |= {each.setting: f"{AUTO}: {each.reason}" for each in chosen}
    return LoadedRecipe(recipe=recipe, path=path, base=path.parent, given=given)


def recipe_class(algorithms: Sequence[Algorithm]) -> type[Recipe]:
    """Return a recipe class that may also name these algorithms; they replace shipped ones by name."""
    if not algorithms:
        return Recipe
    named = {name: each for each in algorithms for name in tags(each.config, "name")}
    known = {**ALGORITHMS, **named}
    choices: Any = Union[tuple(each.config for each in known.values())]  # noqa: UP007  made at run time
    made = create_model("Recipe", __base__=Recipe, algorithm=(choices, Field(discriminator="name")))
    made.algorithms = known
    return made
