"""Defaults: values for settings that a recipe leaves out, by its other settings, device and model.

    settings as written ─ Setup ─ RULES, in order ─> value, reason ─> settings, of which a rule below in the
                                                                      table reads the values
    a resumed run ───────────────────────────────────────────────────────────> the values that it began with

    rollout.engine ─> algorithm.old_logprobs, algorithm.loss.correction ─> placement.pools and roles
    policy.model.dtype, policy.lr, policy.warmup_steps, policy.gradient_checkpointing, task.clock

``load_recipe`` chooses, so ``check``, a run and its config.json have the same concrete values.
``benchmarks/results/stale.md`` compares the corrections of stale rows; the formulas: ``formulas.losses``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rillflow.algorithms.config import OnlineConfig
from rillflow.algorithms.sft import SFTConfig
from rillflow.app.any_recipe import AUTO
from rillflow.app.resolved import Resolved, Roles, is_named
from rillflow.app.schedule_needs import default_pools
from rillflow.app.sections import Recipe
from rillflow.config.schema import presets, with_values
from rillflow.errors import ModelError, RunDirectoryError
from rillflow.graph.trace import Listener
from rillflow.rollout.config import NATIVE, VLLM

if TYPE_CHECKING:
    from rillflow.formulas.config import Correction

LARGE = 100_000_000
"""Parameters from which on a model is treated like a published one; the recipes here train smaller ones."""
CORRECTION: Correction = "tis"
"""Importance weight of off-policy tokens if the recipe names none and the sampler's clip does not apply."""
_BFLOAT16 = (8, 0)
"""Compute capability of the first CUDA devices with bfloat16 arithmetic (Ampere)."""


@dataclass(kw_only=True)
class Setup:
    """A recipe with the device and the model that it would run with; read when a rule first needs them."""

    recipe: Recipe
    """The settings, with the values that rules have chosen so far."""
    given: Mapping[str, str]
    """Origin of each given setting; see ``AnyRecipe``."""
    base: Path
    """The recipe's folder."""
    capability: tuple[int, int] | None
    """Compute capability of the CUDA device; None without one."""
    heard: tuple[Listener, ...] | None = None
    """Calls of the step of each phase; None before the algorithm's settings are chosen."""

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
        """Whether the model has at least ``LARGE`` parameters.

        True if the size is unknown: for a hub name, and for a folder without weights.
        """
        from rillflow.app.model_files import sizes_of_directory, sizes_of_new
        from rillflow.models.locate import base_of, locate

        model, sizes = self.recipe.policy.model, None
        with suppress(ModelError, RunDirectoryError):  # the checks raise it
            if model.new is not None:
                sizes = sizes_of_new(model.new)
            elif self.path is not None:
                found = Path(base_of(locate(self.path, self.base)))
                sizes = sizes_of_directory(found) if found.is_dir() else None
        return sizes is None or not sizes.parameters or sizes.parameters >= LARGE

    @cached_property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained: the recipe's, or one in the model's directory."""
        from rillflow.models.locate import found_adapter, locate

        model = self.recipe.policy.model
        with suppress(ModelError, RunDirectoryError):
            if self.path is not None and found_adapter(locate(self.path, self.base), None) is not None:
                return True
        return model.adapter is not None

    @cached_property
    def reads_clock(self) -> bool:
        """Whether the model's chat template reads the time; a hub name not yet here may."""
        from rillflow.app.model_files import template_text
        from rillflow.models.adapter_tokenizer import tokenizer_source
        from rillflow.models.locate import locate
        from rillflow.models.template_clock import CLOCK

        with suppress(ModelError, RunDirectoryError):  # the checks raise it
            if self.path is not None:
                found = Path(tokenizer_source(locate(self.path, self.base)))
                return not found.is_dir() or CLOCK in template_text(found)
        return False

    @property
    def updates(self) -> int:
        """Optimiser steps of the algorithm."""
        return self.recipe.algorithm.updates

    @cached_property
    def roles(self) -> Roles:
        """The roles of the recipe, whose algorithm has its last settings."""
        return Roles.of(self.recipe, self.heard)

    @property
    def imitates(self) -> bool:
        """Whether the run fits a model to given rows by likelihood: demonstrations, or pairs for a reward."""
        return isinstance(self.recipe.algorithm, SFTConfig) or "policy" not in self.roles.called

    @property
    def has_default_pools(self) -> bool:
        """Whether the recipe names neither pools nor roles, and its sampler works while the trainer does."""
        is_open = not any(is_named(setting, self.given) for setting in ("placement.pools", "placement.roles"))
        return is_open and self.recipe.schedule.is_beside and "policy" in self.roles.called

    @property
    def is_uncorrected(self) -> bool:
        """Whether tokens may be off-policy, and neither recipe nor algorithm says what bounds them."""
        config = self.recipe.algorithm
        if not isinstance(config, OnlineConfig) or config.reads_sampler:
            return False
        is_preset = "correction" in presets(type(config)).get("loss", {})
        may_differ = config.freshness > 0 or self.recipe.rollout.engine != NATIVE
        return may_differ and not is_preset and not is_named("algorithm.loss.correction", self.given)

    @property
    def clips_to_sampler(self) -> bool:
        """Whether the loss may clip the ratio to the sampler in place of the ratio to the trainer.

        A clip of sequence ratios is too narrow for stale rows, and another engine's log probabilities differ
        at every token.
        """
        config = self.recipe.algorithm
        if not isinstance(config, OnlineConfig) or not self.is_uncorrected:
            return False
        clips_tokens = config.loss.ratio == "token" and config.loss.surrogate == "clip"
        is_native = self.recipe.rollout.engine == NATIVE
        return is_native and clips_tokens and not is_named("algorithm.old_logprobs", self.given)


@dataclass(frozen=True)
class Rule:
    """A default for one setting."""

    setting: str
    """Dotted key."""
    value: Any
    """Value if the rule applies; of a function of the setup, its result."""
    applies: Callable[[Setup], bool]
    """Condition."""
    reason: str
    """Reason, for the user."""
    is_shown: bool = True
    """Whether ``check`` shows the value as chosen; otherwise notes explain it."""


def _always(_: Setup) -> bool:
    return True


def _now(_: Setup) -> str:
    return datetime.now().isoformat(timespec="seconds")


RULES = (
    Rule(
        "rollout.engine",
        VLLM,
        lambda setup: setup.recipe.rollout.server is not None,
        "rollout.server names an environment for vLLM",
    ),
    Rule(
        "rollout.engine",
        NATIVE,
        _always,
        "it computes the trainer's log probabilities exactly and needs no second copy of the weights",
    ),
    Rule(
        "algorithm.old_logprobs",
        "sampler",
        lambda setup: setup.clips_to_sampler,
        "tokens may be old, and the loss clips token ratios: the clip bounds present / sampler",
        is_shown=False,
    ),
    Rule(
        "algorithm.loss.correction",
        CORRECTION,
        lambda setup: setup.is_uncorrected,
        "tokens may be off-policy, and no clip bounds the ratio to the sampler",
        is_shown=False,
    ),
    Rule(
        "placement.pools",
        lambda setup: default_pools(setup.recipe, setup.roles.part).pools,
        lambda setup: setup.has_default_pools,
        "the sampler works while the trainer does, so it has ranks of its own",
        is_shown=False,
    ),
    Rule(
        "placement.roles",
        lambda setup: default_pools(setup.recipe, setup.roles.part).roles,
        lambda setup: setup.has_default_pools,
        "the sampler works while the trainer does, so it has ranks of its own",
        is_shown=False,
    ),
    Rule(
        "policy.model.dtype",
        "bfloat16",
        lambda setup: setup.has_bfloat16 and setup.is_large,
        "the CUDA device has bfloat16; master weights and AdamW's moments stay float32",
    ),
    Rule(
        "policy.model.dtype",
        "float32",
        lambda setup: setup.has_bfloat16,
        "the model has less than 100 million parameters, so speed does not need bfloat16",
    ),
    Rule("policy.model.dtype", "float32", _always, "no CUDA device with bfloat16 is used"),
    Rule(
        "policy.lr", 1e-5, lambda setup: not setup.is_large, "the model has less than 100 million parameters"
    ),
    Rule(
        "policy.lr",
        1e-4,
        lambda setup: setup.imitates and setup.has_adapter,
        "supervised training of an adapter: ten times the rate of full fine-tuning",
    ),
    Rule("policy.lr", 1e-5, lambda setup: setup.imitates, "supervised training of all weights"),
    Rule(
        "policy.lr",
        1e-5,
        lambda setup: setup.has_adapter,
        "an adapter: ten times the rate of full fine-tuning",
    ),
    Rule("policy.lr", 1e-6, _always, "full fine-tuning of a model with at least 100 million parameters"),
    Rule(
        "policy.warmup_steps",
        10,
        lambda setup: setup.updates >= 100,
        "a first step of AdamW at the full rate can destroy what the model can do",
    ),
    Rule(
        "policy.warmup_steps",
        5,
        lambda setup: setup.updates >= 50,
        "a first step of AdamW at the full rate can destroy what the model can do",
    ),
    Rule("policy.warmup_steps", 0, _always, "the run has less than 50 optimiser steps"),
    Rule(
        "policy.gradient_checkpointing",
        True,
        lambda setup: setup.on_cuda and setup.is_large,
        "a model with at least 100 million parameters on a CUDA device: activations would need most "
        "of its memory",
    ),
    Rule("policy.gradient_checkpointing", False, _always, "the model is small, or no CUDA device is used"),
    Rule(
        "task.clock",
        _now,
        lambda setup: setup.reads_clock,
        "the chat template reads the time: that of the start, also after a resume",
    ),
    Rule("task.clock", None, _always, "the model's chat template does not read the time"),
)
"""Rules by setting; of a setting's rules the first that applies decides, and a last shown one always does."""
SETTINGS = tuple(dict.fromkeys(rule.setting for rule in RULES if rule.is_shown))
"""Settings that always have a choice, which ``check`` shows, and which a resumed run keeps."""
RECORDED = tuple(rule for rule in RULES if not rule.is_shown)
"""Rules for settings that the config of a run of an earlier version may lack."""


def without_auto(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's sections without the settings of ``SETTINGS`` whose value is ``AUTO``."""
    return _without(data, "")


def _without(data: Mapping[str, Any], above: str) -> dict[str, Any]:
    return {
        name: _without(value, f"{above}{name}.") if isinstance(value, Mapping) else value
        for name, value in data.items()
        if not (value == AUTO and f"{above}{name}" in SETTINGS)
    }


def choices(setup: Setup, rules: Sequence[Rule] = RULES) -> list[Rule]:
    """Return a rule with its value for every setting that the recipe leaves out; ``setup`` receives it."""
    chosen = dict[str, Rule]()
    for rule in rules:
        if rule.setting in chosen or is_named(rule.setting, setup.given) or not rule.applies(setup):
            continue
        value = rule.value(setup) if callable(rule.value) else rule.value
        chosen[rule.setting] = replace(rule, value=value)
        setup.recipe = with_values(setup.recipe, {rule.setting: value})
    return [*chosen.values()]


def on_cuda(resolved: Resolved) -> Resolved:
    """Return the recipe with the choices for a CUDA device with bfloat16, for a plan of other machines."""
    recipe, given, heard = resolved.recipe, resolved.given, resolved.found.heard
    setup = Setup(recipe=recipe, given=given, base=resolved.base, capability=_BFLOAT16, heard=heard)
    chosen = choices(setup)
    return resolved.changed({each.setting: each.value for each in chosen if each.is_shown})


def values_of_run(resolved: Resolved, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a run's config for the settings that the recipe leaves out, except the engine.

    A run whose engine would change is refused instead: the engine also determines the loss's correction.
    """
    kept = {}
    for setting in SETTINGS:
        if setting != "rollout.engine" and resolved.is_open(setting):
            section, _, name = setting.rpartition(".")
            value: Any = config
            for part in section.split("."):
                value = value[part]
            if name in value:  # a run of an earlier version has no clock
                kept[setting] = value[name]
    return kept
