"""Schema: what a Section class says about its keys.

Recipe ─ walk ─> policy.lr, policy.model.new.hidden, ...      every key a user may write
       ─ at("policy", "lr") ─> the field and its section      for an error's words
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from rillflow.config.section import Section

Data: TypeAlias = Mapping[str, Any]
"""Plain data as TOML gives it: texts, numbers, truth values, lists and tables."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of a schema."""

    path: tuple[str, ...]
    """Its place, from the root."""
    section: type[Section]
    """The section it is a key of."""
    field: FieldInfo
    """What may stand there."""

    @property
    def dotted(self) -> str:
        """As a user writes it. Example: ``policy.lr``."""
        return ".".join(self.path)

    @property
    def is_section(self) -> bool:
        """Whether it holds further keys rather than a value."""
        return bool(subsections(self.field))


@dataclass(frozen=True, kw_only=True)
class SettingPlace:
    """Where in a recipe something stands."""

    dotted: str
    """As a user writes it. Example: ``rollout.stop[0]``."""
    section: type[Section]
    """The section it stands in."""
    field: FieldInfo | None
    """What may stand there; None where the section has no key of this name."""
    default: Any = None
    """What stands there where nothing is given, as the sections around have it."""


def subsections(field: FieldInfo) -> tuple[type[Section], ...]:
    """The sections a field may hold: none for a value, several where one is chosen by name."""
    annotation = field.annotation
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return tuple(member for member in members if isinstance(member, type) and issubclass(member, Section))


def chosen(field: FieldInfo, value: object) -> type[Section] | None:
    """The section that ``value`` stands for; None where it stands for none, or for an unknown choice."""
    candidates = subsections(field)
    if len(candidates) <= 1 or not isinstance(field.discriminator, str):
        return candidates[0] if candidates else None
    tag = value[field.discriminator] if isinstance(value, Mapping) and field.discriminator in value else None
    return next((one for one in candidates if tag in tags(one, field.discriminator)), None)


def tags(section: type[Section], discriminator: str) -> tuple[str, ...]:
    """The names by which a section is chosen."""
    annotation = section.model_fields[discriminator].annotation
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def walk(section: type[Section], prefix: tuple[str, ...] = ()) -> Iterator[Key]:
    """Every key of a schema, sections before their content, every choice of a section included."""
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
        rest = rest[1:]  # a validator puts the name of the choice into its place, a user does not
    if inner is not None and rest:
        return at(inner, rest, value, dotted, default)
    index = "".join(f"[{part}]" for part in rest if isinstance(part, int))
    return SettingPlace(dotted=dotted + index, section=section, field=field, default=default)
