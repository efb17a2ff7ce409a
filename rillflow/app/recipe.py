"""Recipe: load run.toml, choose what it leaves open, and refuse what cannot run.

``open_recipe`` reads a recipe of any kind: a ``kind`` that it names selects the plugin that runs it.

run.toml + --set ─ validate ─> sections ─ defaults ─> settings ─ Resolved ─ consistency ─> a recipe to run
                └─ origins ─> where each setting came from ──────┘
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rillflow.algorithms.algorithm import Algorithm
from rillflow.app.any_recipe import AUTO, keys_of, origins, with_directory
from rillflow.app.consistency import require_consistent
from rillflow.app.defaults import RULES, Rule, Setup, choices, without_auto
from rillflow.app.machine import cuda_capability
from rillflow.app.plugin_sections import validated
from rillflow.app.plugins import KIND, other_kind, recipe_loader
from rillflow.app.resolved import Resolved
from rillflow.app.schedules import with_schedule
from rillflow.app.sections import Recipe, recipe_class
from rillflow.config.load import Override, apply_overrides, parse_override, read_toml
from rillflow.config.schema import Data

if TYPE_CHECKING:
    from rillflow.app.plugin_recipe import PluginRecipe


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
            settings = _overrides(overrides)
        else:
            settings = [parse_override(text) for text in overrides]
        return cls(path=path, data=data, overrides=settings)


def open_recipe(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] | Mapping[str, Any] = (),
    algorithms: Sequence[Algorithm] = (),
) -> Resolved | PluginRecipe:
    """Read a recipe of any kind; its ``kind`` names the plugin that runs it.

    Raises:
        ConfigError: see ``load_recipe``, or the recipe's kind is unknown or not installed.
    """
    read = RecipeSource.of(source, overrides)
    if KIND not in read.data:
        return load_recipe(source, overrides, algorithms)
    return recipe_loader(read.data[KIND], read.path)(read.path, read.data, read.overrides)


def require_language_model(recipe: Resolved | PluginRecipe) -> Resolved:
    """Return a recipe of a language model; refuse one of another kind."""
    if isinstance(recipe, Resolved):
        return recipe
    raise other_kind(f"the recipe of {recipe.directory}", recipe.recipe.kind, is_run=False)


def load_recipe(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] | Mapping[str, Any] = (),
    algorithms: Sequence[Algorithm] = (),
) -> Resolved:
    """Read a recipe and apply overrides.

    Args:
        source: the TOML file, or its sections; paths in a dict are relative to the present folder.
        overrides: ``KEY=VALUE`` texts as for ``--set``, or values by dotted keys.
        algorithms: custom algorithms that the recipe may name.

    Raises:
        ConfigError: the recipe cannot run; it lists every reason that the settings alone show.
    """
    read = RecipeSource.of(source, overrides)
    path, base = read.path, read.path.parent
    if KIND in read.data:
        raise other_kind(path, read.data[KIND], is_run=False)
    kind, written = recipe_class(algorithms), without_auto(apply_overrides(read.data, read.overrides))
    named = {*keys_of(written)}
    given = {key: each for key, each in origins(path, read.data, read.overrides).items() if key in named}
    return resolve(kind, written, given=given, path=path, base=base)


def resolve(
    kind: type[Recipe],
    data: Data,
    *,
    given: Mapping[str, str],
    path: Path,
    base: Path,
    rules: Sequence[Rule] = RULES,
) -> Resolved:
    """Check the sections of a recipe, choose what they leave open, and refuse contradictions.

    Args:
        kind: the class of the settings; see ``recipe_class``.
        data: the sections.
        given: origin of each setting in them.
        path: their file.
        base: folder that paths in them are relative to.
        rules: the rules that choose.

    Raises:
        ConfigError: the recipe cannot run; it lists every reason that the settings alone show.
    """
    recipe = with_schedule(validated(kind, data, str(path)))
    setup = Setup(recipe=recipe, given=given, base=base, capability=cuda_capability(recipe.run.device))
    chosen = choices(setup, rules)
    if setup.recipe != recipe:  # validated again: other settings of a section may not fit a chosen one
        filled = _overrides({each.setting: each.value for each in chosen})
        recipe = with_schedule(validated(kind, apply_overrides(data, filled), str(path)))
    shown = {each.setting: f"{AUTO}: {each.reason}" for each in chosen if each.is_shown}
    recipe, origin = with_directory(recipe, path), {**given, **shown}
    return require_consistent(Resolved(recipe=recipe, path=path, base=base, given=origin, found=setup.roles))


def _overrides(values: Mapping[str, Any]) -> list[Override]:
    return [Override(path=tuple(key.split(".")), value=value) for key, value in values.items()]
