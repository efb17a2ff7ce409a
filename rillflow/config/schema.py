"""Schema: the base class of every config record; list its keys, and find a setting in it.

Recipe ─ walk ─> policy.lr, policy.model.new.hidden, ...      every key a user may write
       ─ at("policy", "lr") ─> the field and its section      for an error's words
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.fields import FieldInfo


class Section(BaseModel):
    """A frozen group of settings; an unknown key or a value of another type is an error.

    Example:
        class Optimizer(Section):
            lr: float = Field(1e-5, gt=0, description="Learning rate.")
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    renamed: ClassVar[Mapping[str, str]] = {}
    """New names of settings by their old names; an error about an old name gives the new one."""

    @model_validator(mode="before")
    @classmethod
    def _over_defaults(cls, data: object) -> object:
        """Merge a given inner section over the class's default section."""
        if not isinstance(data, Mapping):
            return data
        there = [name for name in presets(cls) if name in data and isinstance(data[name], Mapping)]
        return {**data, **{name: {**presets(cls)[name], **data[name]} for name in there}}


S = TypeVar("S", bound=Section)
Data: TypeAlias = Mapping[str, Any]
"""Plain data as in TOML: texts, numbers, booleans, lists and tables."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of a schema."""

    path: tuple[str, ...]
    """Key path, from the root."""
    section: type[Section]
    """Section that has the key."""
    field: FieldInfo
    """Type and limits of its value."""

    @property
    def dotted(self) -> str:
        """Key as a user writes it. Example: ``policy.lr``."""
        return ".".join(self.path)

    @property
    def is_section(self) -> bool:
        """Whether the key holds further keys rather than a value."""
        return bool(subsections(self.field))


@dataclass(frozen=True, kw_only=True)
class SettingPlace:
    """Place of a setting in a recipe."""

    dotted: str
    """Place as a user writes it. Example: ``rollout.stop[0]``."""
    section: type[Section]
    """Section that contains the place."""
    field: FieldInfo | None
    """Field at the place; None if the section has no key of this name."""
    default: Any = None
    """Default at the place, as the sections around it define."""


def value_of(section: Section, setting: str) -> Any:
    """Return the value at a dotted key."""
    found: Any = section
    for part in setting.split("."):
        found = vars(found)[part]
    return found


def with_values(section: S, values: Mapping[str, Any]) -> S:
    """Return the section with other values, by dotted key; they are not checked."""
    for setting, value in values.items():
        name, _, rest = setting.partition(".")
        inner = with_values(vars(section)[name], {rest: value}) if rest else value
        section = section.model_copy(update={name: inner})
    return section


@cache
def presets(section: type[Section]) -> dict[str, dict[str, Any]]:
    """Return the settings of inner sections that a class has defaults of its own for, by section."""
    return {
        name: field.default.model_dump(exclude_unset=True)
        for name, field in section.model_fields.items()
        if isinstance(field.default, Section)
    }


def subsections(field: FieldInfo) -> tuple[type[Section], ...]:
    """Return the sections that a field may hold: none for a value, several if one is chosen by name."""
    annotation = field.annotation
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return tuple(member for member in members if isinstance(member, type) and issubclass(member, Section))


def chosen(field: FieldInfo, value: object) -> type[Section] | None:
    """Return the section that ``value`` selects; None without a known section."""
    candidates = subsections(field)
    if len(candidates) <= 1 or not isinstance(field.discriminator, str):
        return candidates[0] if candidates else None
    tag = value[field.discriminator] if isinstance(value, Mapping) and field.discriminator in value else None
    return next((one for one in candidates if tag in tags(one, field.discriminator)), None)


def tags(section: type[Section], discriminator: str) -> tuple[str, ...]:
    """Return the names that select a section."""
    annotation = section.model_fields[discriminator].annotation
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def walk(section: type[Section], prefix: tuple[str, ...] = ()) -> Iterator[Key]:
    """Yield every key of a schema, sections before their content, with every choice of a section."""
    for name, field in section.model_fields.items():
        key = Key(path=(*prefix, name), section=section, field=field)
        yield key
        for inner in subsections(field):
            yield from walk(inner, key.path)


def at(
    section: type[Section], place: Sequence[str | int], data: object, path: str = "", preset: object = None
) -> SettingPlace:
    """Follow a validator's place through the schema and the data; ``preset`` is the section's default."""
    name, rest = str(place[0]), place[1:]
    dotted = f"{path}.{name}" if path else name
    if name not in section.model_fields:
        return SettingPlace(dotted=dotted, section=section, field=None)
    field = section.model_fields[name]
    value = data[name] if isinstance(data, Mapping) and name in data else None
    default = vars(preset)[name] if isinstance(preset, section) else field.get_default()
    inner = chosen(field, value)
    if inner is not None and field.discriminator:
        rest = rest[1:]  # a validator adds the name of the choice to its place, a user does not
    if inner is not None and rest:
        return at(inner, rest, value, dotted, default)
    index = "".join(f"[{part}]" for part in rest if isinstance(part, int))
    return SettingPlace(dotted=dotted + index, section=section, field=field, default=default)
