"""Plugin sections: sections and single settings that plugins add to a recipe, by dotted key.

    Recipe, what every plugin adds ─ with_sections ─> a derived class: --set, check, config.json, pages
    recipe, "run.trackers" ─ section_of ─> the section, for the plugin that brought it
    config.json of a run ─ known_settings, as_kept ─> without what plugins took away or Rillflow got since

The core names no section of a plugin, except to say which plugin ships it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from pydantic import BeforeValidator, Field, create_model
from pydantic_core import to_jsonable_python

from rillflow.app.plugins import PROVIDERS, absent, brought, discovered, imported, installed
from rillflow.config.load import validate
from rillflow.config.problems import together
from rillflow.config.schema import Data, Section, subsections
from rillflow.errors import ConfigError
from rillflow.runs import layout
from rillflow.runs.integrity import read_recovered
from rillflow.runs.old_settings import present

S = TypeVar("S", bound=Section)
SHARED = "run"
"""Section that every kind of recipe has; a kind of its own gets the sections of plugins below it alone."""


def plugin_settings() -> Mapping[str, str]:
    """Return the single settings that plugins add to sections of the core, by dotted key, with their classes.

    Raises:
        ConfigError: two plugins bring one key.
    """
    return brought(lambda plugin: plugin.settings, "setting")


def plugin_sections() -> Mapping[str, type[Section]]:
    """Return the classes of sections and settings of plugins by key, without those that cannot be imported.

    Raises:
        ConfigError: two plugins bring one key.
    """
    return _imported_sections()[0]


def _imported_sections() -> tuple[dict[str, type[Section]], dict[str, ConfigError]]:
    """Return the classes by key, and the errors of those that cannot be imported."""
    classes, errors = dict[str, type[Section]](), dict[str, ConfigError]()
    for key, path in {**brought(lambda plugin: plugin.sections, "section"), **plugin_settings()}.items():
        try:
            classes[key] = imported(path, f"the section {key} of a plugin")
        except ConfigError as error:
            errors[key] = error
    return classes, errors


def plugin_changes() -> Sequence[str]:
    """Return the settings of plugins that a resumed run may change."""
    return [key for plugin in installed().values() for key in plugin.may_change]


def with_sections(kind: type[S], *, shared_only: bool = False) -> type[S]:
    """Return a recipe's class with the sections of all plugins.

    Args:
        kind: the class without them.
        shared_only: whether to add only those below ``run``, for a kind of recipe that a plugin brings.

    Raises:
        ConfigError: two plugins bring one key; or a key is the core's, or in a section that does not exist.
    """
    every = plugin_sections().items()
    return _composed(
        kind, tuple((key, one) for key, one in every if not shared_only or key.startswith(f"{SHARED}."))
    )


@cache
def _composed(kind: type[S], added: tuple[tuple[str, type[Section]], ...], above: str = "") -> type[S]:
    """Return a class with further sections and settings, by their keys below it."""
    fields: dict[str, Any] = {}
    bases = list[type[S]]()
    deeper = dict[str, list[tuple[str, type[Section]]]]()
    for key, section in added:
        name, _, rest = key.partition(".")
        if bool(rest) != (name in kind.model_fields):
            raise ConfigError(
                f"a plugin adds the section {above}{key}",
                why=f"there is no section {above}{name}" if rest else "this key is a setting of the core",
                fix="correct the key in its Plugin",
            )
        if rest:
            deeper.setdefault(name, []).append((rest, section))
        elif issubclass(section, kind):
            bases.append(section)  # it has the setting
        else:
            fields[name] = _field(section)
    for name, entries in deeper.items():
        field = kind.model_fields[name]
        inner = _composed(subsections(field)[0], tuple(entries), f"{above}{name}.")
        is_preset = isinstance(field.default, Section)
        default = inner(**field.default.model_dump(exclude_unset=True)) if is_preset else field.default
        is_optional = field.default is None
        fields[name] = (inner | None if is_optional else inner, default)
    if not fields and not bases:
        return kind
    base = tuple(bases) or kind
    made: Any = create_model(kind.__name__, __base__=base, __module__=kind.__module__, **fields)
    made.__doc__ = kind.__doc__
    return cast(type[S], made)


def _field(section: type[Section]) -> Any:
    """Return the type and default of a plugin's section; ``none`` stands for the default."""
    description = (section.__doc__ or "").partition("\n")[0]
    if any(field.is_required() for field in section.model_fields.values()):
        return (section | None, Field(None, description=description))
    default = section()
    none_is_default = BeforeValidator(lambda value: default if value is None else value)
    return (Annotated[section, none_is_default], Field(default, description=description))


def section_of(recipe: Section, key: str, kind: type[S]) -> S | None:
    """Return a section of a recipe by its dotted key; None if the recipe does not have it.

    Example:
        section_of(facts.recipe, "run.trackers", TrackersConfig)
    """
    value: Any = recipe
    for name in key.split("."):
        if not isinstance(value, Section) or name not in type(value).model_fields:
            return None
        value = vars(value)[name]
    return value if isinstance(value, kind) else None


def own_settings(section: Section, kind: type[S]) -> S:
    """Return a section without the sections that plugins added, as its importable class; ranks receive it."""
    given = {name: vars(section)[name] for name in kind.model_fields}
    own = kind.model_construct(**given)
    private = {**(section.__pydantic_private__ or {})}
    object.__setattr__(own, "__pydantic_private__", private or None)  # a frozen section refuses assignments
    return cast(S, own)


def sections_for_ranks(recipe: Section) -> Mapping[str, Section]:
    """Return the sections of plugins in a recipe by dotted key; ranks receive them."""
    every = {key: section_of(recipe, key, kind) for key, kind in plugin_sections().items()}
    return {key: section for key, section in every.items() if section is not None}


def validated(kind: type[S], data: Data, title: str) -> S:
    """Return a recipe's data as its record; see ``validate``.

    Raises:
        ConfigError: also if the data have something whose plugin is not installed or cannot be loaded.
    """
    for key, error in _missing_sections(title).items():
        if _value(data, key) is not None:
            raise error
    try:
        return validate(kind, data, title)
    except ConfigError as error:
        broken = discovered().broken.values()
        if broken and "has no section" in str(error):  # a broken plugin may bring it
            raise together([error, *broken], title) from error
        raise


def known_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's config without the sections of shipped plugins that are not installed."""
    kept = dict(config)
    for key in _missing_sections(""):
        kept = _without(kept, key)
    return kept


def as_kept(settings: Mapping[str, Any], recipe: Section, run: Path) -> dict[str, Any]:
    """Return a start's config with sections and settings as the run has them, where that changes nothing.

    A section or setting that the run lacks is left out if it has its default: its plugin was installed, or
    Rillflow got it, since. A setting whose default changed what an older run did is translated in
    ``runs.old_settings``. A section of a plugin that is gone stays as it was; a recipe that names it is
    refused.

    Args:
        settings: the start's config.
        recipe: its recipe, which has the defaults.
        run: the run directory.
    """
    if not (run / layout.CONFIG).is_file():
        return dict(settings)
    kept: Any = present(read_recovered(run, layout.CONFIG))
    for key, default in _absent_settings(recipe, kept):
        if _value(settings, key) == default:
            settings = _without(settings, key)
    for key in _missing_sections(""):
        if _has(kept, key):
            settings = _with(settings, key.split("."), _value(kept, key))
    return dict(settings)


def _absent_settings(section: Section, kept: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings, or whole sections, that a run lacks, with their defaults as JSON."""
    for name, field in type(section).model_fields.items():
        value = vars(section)[name]
        if not _has(kept, f"{above}{name}"):
            yield f"{above}{name}", to_jsonable_python(field.get_default(call_default_factory=True))
        elif isinstance(value, Section):
            yield from _absent_settings(value, kept, f"{above}{name}.")


def _missing_sections(title: str) -> Mapping[str, ConfigError]:
    """Return the errors of sections and settings that are known and not there, by key.

    Args:
        title: what names the section.
    """
    classes, errors = _imported_sections()
    named = {
        key: absent(seam, key, f"{title}: {mark.format(key)}")
        for seam, mark in (("sections", "[{}]"), ("settings", "{}"))
        for key in PROVIDERS[seam]
        if key not in {*classes, *errors}
    }
    return errors | {key: error for key, error in named.items() if error is not None}


def _has(data: Any, key: str) -> bool:
    name, _, rest = key.partition(".")
    is_there = isinstance(data, Mapping) and name in data
    return is_there and (not rest or _has(data[name], rest))


def _value(data: Any, key: str) -> Any:
    """Return the value at a dotted key; None if there is none."""
    for name in key.split("."):
        data = data[name] if isinstance(data, Mapping) and name in data else None
    return data


def _without(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    name, _, rest = key.partition(".")
    if not _has(data, key):
        return dict(data)
    if rest:
        return {**data, name: _without(data[name], rest)}
    return {other: value for other, value in data.items() if other != name}


def _with(data: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    name, *rest = path
    return {**data, name: _with(data.get(name) or {}, rest, value) if rest else value}
