"""Device defaults: values for settings that a recipe leaves out or sets to "auto", by device and model.

    recipe ─ Setup: device, model ─ RULES, the first that applies ─> DeviceDefault: value, reason ─> recipe
    a resumed run ────────────────────────────────────────────────────> the values that it began with

``load_recipe`` chooses, so ``check``, a run and its config.json have the same concrete values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rillflow.algorithms.sft import SFTConfig
from rillflow.app.doctor import cuda_capability
from rillflow.config.schema import Section
from rillflow.errors import ModelError, RunDirectoryError
from rillflow.rollout.config import NATIVE, VLLM

if TYPE_CHECKING:
    from rillflow.app.recipe import Recipe

AUTO = "auto"
"""Value of a setting that leaves the choice to the rules, as if the recipe did not name it."""
LARGE = 100_000_000
"""Parameters from which on a model is treated like a published one; the recipes here train smaller ones."""
_BFLOAT16 = (8, 0)
"""Compute capability of the first CUDA devices with bfloat16 arithmetic (Ampere)."""


@dataclass(frozen=True, kw_only=True)
class DeviceDefault:
    """A value that the rules chose."""

    setting: str
    """Dotted key."""
    value: Any
    """Chosen value."""
    reason: str
    """Why, for the user."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A recipe with the device and the model that it would run with; read when a rule first needs them."""

    recipe: Recipe
    """The settings."""
    base: Path
    """The recipe's folder."""
    capability: tuple[int, int] | None
    """Compute capability of the CUDA device; None without one."""

    @property
    def on_cuda(self) -> bool:
        """Whether the run computes on a CUDA device."""
        return self.capability is not None

    @property
    def has_bfloat16(self) -> bool:
        """Whether the CUDA device computes in bfloat16."""
        return self.capability is not None and self.capability >= _BFLOAT16

    @cached_property
    def path(self) -> str | None:
        """Path of the model; for a run, the policy of its newest checkpoint, which is not verified here."""
        from rillflow.app.trained import newest_model

        path = self.recipe.policy.model.path
        return None if path is None else newest_model(path, self.base, "policy")

    @cached_property
    def is_large(self) -> bool:
        """Whether the model has at least ``LARGE`` parameters; True for a hub name whose size is unknown."""
        from rillflow.app.model_files import sizes_of_directory, sizes_of_new
        from rillflow.models.locate import base_of, locate

        model, sizes = self.recipe.policy.model, None
        with suppress(ModelError, RunDirectoryError):  # the checks raise it
            if model.new is not None:
                sizes = sizes_of_new(model.new)
            elif self.path is not None:
                found = Path(base_of(locate(self.path, self.base)))
                sizes = sizes_of_directory(found) if found.is_dir() else None
        return sizes is None or sizes.parameters >= LARGE

    @cached_property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained: the recipe's, or one in the model's directory."""
        from rillflow.models.locate import found_adapter, locate

        model = self.recipe.policy.model
        with suppress(ModelError, RunDirectoryError):
            if self.path is not None and found_adapter(locate(self.path, self.base), None) is not None:
                return True
        return model.adapter is not None

    @property
    def imitates(self) -> bool:
        """Whether the run fits a model to given rows by likelihood: demonstrations, or pairs for a reward."""
        return isinstance(self.recipe.algorithm, SFTConfig) or not self.recipe.has_policy


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A default for one setting."""

    setting: str
    """Dotted key."""
    value: Any
    """Value if the rule applies."""
    applies: Callable[[Setup], bool]
    """Condition."""
    reason: str
    """Reason, for the user."""


def _always(_: Setup) -> bool:
    return True


RULES = (
    Rule(
        setting="policy.model.dtype",
        value="bfloat16",
        applies=lambda setup: setup.has_bfloat16 and setup.is_large,
        reason="the CUDA device has bfloat16; master weights and AdamW's moments stay float32",
    ),
    Rule(
        setting="policy.model.dtype",
        value="float32",
        applies=lambda setup: setup.has_bfloat16,
        reason="the model has less than 100 million parameters, so speed does not need bfloat16",
    ),
    Rule(
        setting="policy.model.dtype",
        value="float32",
        applies=_always,
        reason="no CUDA device with bfloat16 is used",
    ),
    Rule(
        setting="policy.lr",
        value=1e-5,
        applies=lambda setup: not setup.is_large,
        reason="the model has less than 100 million parameters",
    ),
    Rule(
        setting="policy.lr",
        value=1e-4,
        applies=lambda setup: setup.imitates and setup.has_adapter,
        reason="supervised training of an adapter: ten times the rate of full fine-tuning",
    ),
    Rule(
        setting="policy.lr",
        value=1e-5,
        applies=lambda setup: setup.imitates,
        reason="supervised training of all weights",
    ),
    Rule(
        setting="policy.lr",
        value=1e-5,
        applies=lambda setup: setup.has_adapter,
        reason="an adapter: ten times the rate of full fine-tuning",
    ),
    Rule(
        setting="policy.lr",
        value=1e-6,
        applies=_always,
        reason="full fine-tuning of a model with at least 100 million parameters",
    ),
    Rule(
        setting="policy.gradient_checkpointing",
        value=True,
        applies=lambda setup: setup.on_cuda and setup.is_large,
        reason="a model with at least 100 million parameters on a CUDA device: activations would need most "
        "of its memory",
    ),
    Rule(
        setting="policy.gradient_checkpointing",
        value=False,
        applies=_always,
        reason="the model is small, or no CUDA device is used",
    ),
    Rule(
        setting="rollout.engine",
        value=VLLM,
        applies=lambda setup: setup.recipe.rollout.server is not None,
        reason="rollout.server names an environment for vLLM",
    ),
    Rule(
        setting="rollout.engine",
        value=NATIVE,
        applies=_always,
        reason="it computes the trainer's log probabilities exactly and needs no second copy of the weights",
    ),
)
"""Rules by setting; of a setting's rules the first that applies decides, and the last always does."""
SETTINGS = tuple(dict.fromkeys(rule.setting for rule in RULES))
"""Settings with rules."""


def without_auto(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's sections without the settings of ``SETTINGS`` whose value is ``AUTO``."""
    return _without(data, "")


def _without(data: Mapping[str, Any], above: str) -> dict[str, Any]:
    return {
        name: _without(value, f"{above}{name}.") if isinstance(value, Mapping) else value
        for name, value in data.items()
        if not (value == AUTO and f"{above}{name}" in SETTINGS)
    }


def choices(recipe: Recipe, base: Path) -> list[DeviceDefault]:
    """Return a choice for every setting with rules that the recipe leaves out.

    Args:
        recipe: the checked settings.
        base: the recipe's folder.
    """
    setup = Setup(recipe=recipe, base=base, capability=cuda_capability(recipe.run.device))
    return choices_for(setup)


def choices_for(setup: Setup) -> list[DeviceDefault]:
    """Return the choices for a known device; see ``choices``."""
    made: dict[str, DeviceDefault] = {}
    for rule in RULES:
        if rule.setting not in made and is_open(setup.recipe, rule.setting) and rule.applies(setup):
            made[rule.setting] = DeviceDefault(setting=rule.setting, value=rule.value, reason=rule.reason)
    return [*made.values()]


def on_cuda(recipe: Recipe, base: Path) -> Recipe:
    """Return the recipe with the choices for a CUDA device with bfloat16, for a plan of other machines."""
    found = choices_for(Setup(recipe=recipe, base=base, capability=_BFLOAT16))
    return with_values(recipe, {each.setting: each.value for each in found})


def is_open(recipe: Recipe, setting: str) -> bool:
    """Return whether the recipe leaves this setting out; a choice made here does not count as named."""
    section, _, name = setting.rpartition(".")
    return name not in value_of(recipe, section).model_fields_set


def value_of(recipe: Recipe, setting: str) -> Any:
    """Return the value at a dotted key."""
    found: Any = recipe
    for part in setting.split("."):
        found = vars(found)[part]
    return found


def with_values(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """Return the recipe with these values by dotted key; they still count as left out."""
    for setting, value in values.items():
        recipe = _with(recipe, setting.split("."), value)
    return recipe


def _with(section: Any, place: list[str], value: Any) -> Any:
    name, rest = place[0], place[1:]
    inner = _with(vars(section)[name], rest, value) if rest else value
    made: Section = section.model_copy(update={name: inner})
    if not rest:
        made.model_fields_set.discard(name)
    return made


def values_of_run(recipe: Recipe, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a run's config for the settings that the recipe leaves out, except the engine.

    A run whose engine would change is refused instead: the engine also determines the loss's correction.
    """
    found = {}
    for setting in SETTINGS:
        if setting != "rollout.engine" and is_open(recipe, setting):
            value: Any = config
            for part in setting.split("."):
                value = value[part]
            found[setting] = value
    return found
