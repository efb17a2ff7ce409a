"""Problems: turn a validator's errors into sentences that a user can act on.

pydantic's error ─ explain ─> ConfigError(key and value, why, fix) ─ together ─> one error that names them all
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rillflow.config.schema import Data, Section, SettingPlace, at, subsections, tags, walk
from rillflow.errors import ConfigError, RillflowError, nearest

_LONGEST_VALUE = 60

_RULES = {
    "greater_than": "it must be greater than {gt:g}",
    "greater_than_equal": "it must be at least {ge:g}",
    "less_than": "it must be less than {lt:g}",
    "less_than_equal": "it must be at most {le:g}",
    "finite_number": "it must be a finite number",
    "literal_error": "it must be {expected}",
    "string_pattern_mismatch": "it must match {pattern}",
    "string_too_short": "it must have at least {min_length} characters",
    "too_short": "it must have {min_length} or more entries",
    "int_type": "it must be a whole number",
    "int_from_float": "it must be a whole number",
    "float_type": "it must be a number",
    "bool_type": "it must be true or false",
    "string_type": "it must be a text in quotes",
    "tuple_type": "it must be a list in brackets",
}


def together(problems: Sequence[RillflowError], title: str) -> RillflowError:
    """Return the only problem, or an error that lists them all under ``title``."""
    if len(problems) == 1:
        return problems[0]
    lines = [f"{title} has {len(problems)} problems"]
    for number, problem in enumerate(problems, 1):
        lines.append(f"{number}. " + str(problem).replace("\n", "\n   "))
    return ConfigError("\n".join(lines))


def explain(error: ErrorDetails, schema: type[Section], data: Data) -> ConfigError:
    """Return one of pydantic's errors as a ConfigError about the given data."""
    place = at(schema, error["loc"], data)
    kind, context = error["type"], error.get("ctx", {})
    if place.field is None:
        return _unknown(place, error["input"], schema)
    if kind == "missing":
        return _missing(place.dotted, place.field)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _unchosen(place.dotted, place.field, error["input"])
    if kind == "value_error" and isinstance(error["input"], Mapping):
        conflict = f"{place.dotted}: {context['error']}"
        return ConfigError(conflict, why="these settings contradict each other", fix="change one of them")
    if subsections(place.field):
        return _not_a_section(place.dotted, place.field, error["input"])
    rule = _RULES[kind].format(**context) if kind in _RULES else error["msg"]
    what = f"{place.dotted} is {shown(error['input'])}"
    fix = _remedy(place.field, place.default, kind, error["input"])
    return ConfigError(what, why=_because(rule, place.field), fix=fix)


def shown(value: object) -> str:
    """Return a value as a recipe has it, shortened if it is long. Example: ``shown(True) == "true"``."""
    if isinstance(value, Mapping):
        text = "{" + ", ".join(f"{key} = {shown(entry)}" for key, entry in value.items()) + "}"
    elif isinstance(value, list | tuple):
        text = "[" + ", ".join(map(shown, value)) + "]"
    elif isinstance(value, bool | str):
        text = json.dumps(value, ensure_ascii=False)
    else:
        text = "none" if value is None else str(value)
    return text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "…"


def _because(rule: str, field: FieldInfo) -> str:
    return f"{rule} ({field.description})" if field.description else rule


def _remedy(field: FieldInfo, default: object, kind: str, value: object) -> str:
    if isinstance(value, str):
        if kind in ("int_type", "float_type", "bool_type") and _is_literal(value):
            return f"write {value} without quotes"
        if kind == "literal_error":
            return nearest(value, _choices(field.annotation))
    if kind == "string_type":
        return f'write "{value}", with quotes' if isinstance(value, int | float) else "write it in quotes"
    if field.is_required():
        return "give another value"
    return f"leave it out for the default, {shown(default)}"


def _choices(annotation: Any) -> list[str]:
    """Return the texts that a setting, also an optional setting, may have."""
    inner = [each for part in get_args(annotation) for each in (get_args(part) or [part])]
    return [each for each in inner if isinstance(each, str)]


def _is_literal(text: str) -> bool:
    if text in ("true", "false"):
        return True
    try:
        float(text)
    except ValueError:
        return False
    return True


def _unknown(place: SettingPlace, value: object, schema: type[Section]) -> ConfigError:
    parent, _, name = place.dotted.rpartition(".")
    kind = "section" if isinstance(value, Mapping) else "key"
    inside = f"[{parent}]" if parent else "a recipe"
    known = place.section.model_fields
    what = f"{place.dotted} = {shown(value)}: {inside} has no {kind} {name!r}"
    if name in place.section.renamed:
        new = place.section.renamed[name]
        if "." in new:
            fix = f"write {new}{_choosing(new, schema)}"
            return ConfigError(what, why=f"{place.dotted} is now {new}", fix=fix)
        fix = f"write {f'{parent}.{new}' if parent else new}"
        return ConfigError(what, why=f"{name!r} was renamed to {new!r}", fix=fix)
    why = f"it has the keys {', '.join(known)}"
    return ConfigError(what, why=why, fix=_meant(place, schema))


def _choosing(dotted: str, schema: type[Section]) -> str:
    """Return the names that choose a section with a setting, in words; empty if its section is not chosen."""
    parent, _, name = dotted.rpartition(".")
    if parent not in schema.model_fields:
        return ""
    field = schema.model_fields[parent]
    if not isinstance(field.discriminator, str) or name == field.discriminator:
        return ""
    choices = [each for each in subsections(field) if name in each.model_fields]
    names = [f'"{tag}"' for each in choices for tag in tags(each, field.discriminator)]
    return f", with {parent}.{field.discriminator} = {' or '.join(names)}"


def _meant(place: SettingPlace, schema: type[Section]) -> str:
    """Suggest a fix for an unknown key: another spelling or section, or a key described by its words."""
    parent, _, name = place.dotted.rpartition(".")
    known = place.section.model_fields
    spelling = nearest(name, known)
    if spelling.startswith("did you mean"):
        return spelling
    elsewhere = sorted({key.dotted for key in walk(schema) if key.path[-1] == name})
    if place.dotted in elsewhere:
        return f"remove {name!r}: another choice of [{parent}] has it, the one that the recipe names does not"
    if elsewhere:
        return f"{name!r} is in another section: {' or '.join(elsewhere)}"
    words = name.replace("_", " ").lower()
    described = [key for key, field in known.items() if words in (field.description or "").lower()]
    return f"did you mean {described[0]!r}?" if described else "remove it"


def _missing(dotted: str, field: FieldInfo) -> ConfigError:
    parent, _, name = dotted.rpartition(".")
    what = f"{dotted} is missing"
    if subsections(field):
        first = subsections(field)[0].model_fields
        needed = [key for key, inner in first.items() if inner.is_required()]
        keys = f" with {', '.join(needed)}" if needed else ""
        return ConfigError(what, why="a recipe needs this section", fix=f"add [{dotted}]{keys}")
    return ConfigError(
        what,
        why=_because("it has no default", field),
        fix=f"add {name} = ... to [{parent}], or --set {dotted}=...",
    )


def _unchosen(dotted: str, field: FieldInfo, value: object) -> ConfigError:
    """Return the error for a section that is chosen by name, with a wrong name or none."""
    tag = str(field.discriminator)
    names = [name for one in subsections(field) for name in tags(one, tag)]
    if isinstance(value, Mapping) and tag in value:
        return ConfigError(
            f"{dotted}.{tag} is {shown(value[tag])}",
            why=f"it must be one of {', '.join(map(shown, names))}",
            fix=nearest(str(value[tag]), names),
        )
    return ConfigError(
        f"{dotted}.{tag} is missing",
        why=f"it selects the settings of [{dotted}]: {', '.join(map(shown, names))}",
        fix=f"add {tag} = {shown(names[0])} to [{dotted}]",
    )


def _not_a_section(dotted: str, field: FieldInfo, value: object) -> ConfigError:
    known = list(dict.fromkeys(name for one in subsections(field) for name in one.model_fields))
    return ConfigError(
        f"{dotted} is {shown(value)}",
        why=f"{dotted} is a section with the keys {', '.join(sorted(known))}",
        fix=f"write [{dotted}] and its keys below it, or --set {dotted}.{known[0]}=...",
    )
