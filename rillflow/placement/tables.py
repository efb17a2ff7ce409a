"""Tables: parse a file's table key by key.

table, a record's class ─> the record, or an error that locates the unknown, missing or invalid key

A field's type determines its parser: ``Annotated[float, number(1.0)]`` is a number of at least 1;
``Annotated[float, number(1.0), "size"]`` has another key than its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, replace
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from rillflow.errors import PlanError, nearest

Reader = Callable[[object, str], Any]
"""Function that converts a value of a file, or raises an error with its place."""


def read(kind: Any, data: object, where: str, over: Any = None, **known: object) -> Any:
    """Read a record from a table.

    Args:
        kind: class of the record.
        data: the table.
        where: name of the table in errors.
        over: record whose fields the table overrides; None: the table needs all fields without default.
        known: values of fields that are not in the table.

    Raises:
        PlanError: see ``values``.
    """
    names, readers = _columns(kind)
    own = {key: reader for key, reader in readers.items() if names[key] not in known}
    needed = {field.name for field in fields(kind) if field.default is field.default_factory is MISSING}
    said = values(data, own, where, [] if over else [key for key in own if names[key] in needed])
    found = {names[key]: value for key, value in said.items()}
    return replace(over, **found) if over else kind(**known, **found)


def named(kind: Any, data: object, where: str) -> dict[str, Any]:
    """Read records from a table of tables; the key of each is its name."""
    return {key: read(kind, one, f"{where}.{key}", name=key) for key, one in TABLE(data, where).items()}


def values(
    data: object, readers: Mapping[str, Reader], where: str, needed: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the values of a table, each converted by its key's reader.

    Raises:
        PlanError: it is not a table, or a key is unknown, missing, or has an invalid value.
    """
    table = TABLE(data, where)
    odd = next((key for key in table if key not in readers), None)
    if odd is not None:
        raise PlanError(
            f"{where} has the unknown key {odd!r}",
            why=f"known keys are {', '.join(readers)}",
            fix=nearest(odd, readers),
        )
    for missing in sorted(set(needed) - set(table)):
        raise PlanError(f"{where} has no {missing!r}", why=f"required keys are {', '.join(sorted(needed))}")
    return {key: readers[key](value, f"{where}.{key}") for key, value in table.items()}


def checked(made: Callable[[Any], Any], why: str, fix: str = "", known: Iterable[str] = ()) -> Reader:
    """Return a reader that applies ``made``.

    On None it raises an error that names the nearest known value.
    """

    def reader(value: object, where: str) -> Any:
        found = made(value)
        if found is None:
            raise PlanError(
                f"{where} is {value!r}", why=why, fix=nearest(str(value), known) if known else fix
            )
        return found

    return reader


def number(least: float, most: float = math.inf, why: str = "") -> Reader:
    """Return a reader of plain numbers within bounds."""

    def made(value: Any) -> float | None:
        is_finite = type(value) in (int, float) and math.isfinite(value)
        return float(value) if is_finite and least <= value <= most else None

    return checked(made, why or f"it must be a finite number, {least:g} or more")


def whole(least: int, most: int = 1_000_000) -> Reader:
    """Return a reader of integers within bounds."""
    why = f"it must be a whole number from {least} to {most:,}"
    return checked(lambda value: value if type(value) is int and least <= value <= most else None, why)


def one_of(known: Iterable[str]) -> Reader:
    """Return a reader that accepts only the known texts."""
    why = f"it must be {' or '.join(known)}"
    return checked(lambda value: value if value in tuple(known) else None, why, known=known)


def kind_of(wanted: type, why: str) -> Reader:
    """Return a reader of values of one type."""
    return checked(lambda value: value if isinstance(value, wanted) else None, why)


@lru_cache
def _columns(kind: Any) -> tuple[dict[str, str], dict[str, Reader]]:
    """Return the field name and the reader for each key of a record's table; annotations can set both."""
    names, readers = {}, {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        reader, *keys = hint.__metadata__ if get_origin(hint) is Annotated else (_plain(hint),)
        key = keys[0] if keys else name
        names[key], readers[key] = name, reader
    return names, readers


def _plain(hint: Any) -> Reader:
    """Return the default reader of a type without annotation."""
    if get_origin(hint) is Literal:
        return one_of(get_args(hint))
    return {str: TEXT, bool: YES, int: whole(0)}.get(hint, TABLE)


TEXT, TABLE = kind_of(str, "it must be text in quotes"), kind_of(Mapping, "it must be a table")
YES = kind_of(bool, "it must be true or false")
Count: TypeAlias = Annotated[int, whole(1)]
"""A positive integer."""
