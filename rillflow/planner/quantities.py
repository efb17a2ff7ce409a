"""Quantities: what stands in a file's table, key by key; a number of a device is never without its unit.

"450 GB/s" ─> 4.5e11        0.45 ─> refused: of what?
table, a record's class ─> the record, or what is unknown, missing or wrong, by its place

A field's type says what may stand under its key: ``Annotated[float, RATE]`` is a text with a rate's unit,
``Annotated[float, MEMORY, "memory"]`` stands under another key than its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, replace
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from rillflow.errors import PlanError, nearest

Reader = Callable[[object, str], Any]
"""What makes a value of a file one of ours, or refuses it by its place."""
_TEXT = re.compile(r"\s*([0-9][0-9_,]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z$/€ ]+?)\s*")
_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def read(kind: Any, data: object, where: str, over: Any = None, **known: object) -> Any:
    """The record of a table.

    Args:
        kind: the record's class.
        data: the table.
        where: what it is called in an error.
        over: a record of which the table changes some fields; None: it has all without a default.
        known: the values of fields that it does not have.

    Raises:
        PlanError: as of ``values``.
    """
    names, readers = _columns(kind)
    own = {key: reader for key, reader in readers.items() if names[key] not in known}
    needed = {field.name for field in fields(kind) if field.default is field.default_factory is MISSING}
    said = values(data, own, where, [] if over else [key for key in own if names[key] in needed])
    found = {names[key]: value for key, value in said.items()}
    return replace(over, **found) if over else kind(**known, **found)


def named(kind: Any, data: object, where: str) -> dict[str, Any]:
    """The records of a table of tables; the key of each is its name."""
    return {key: read(kind, one, f"{where}.{key}", name=key) for key, one in TABLE(data, where).items()}


def values(
    data: object, readers: Mapping[str, Reader], where: str, needed: Iterable[str] = ()
) -> dict[str, Any]:
    """The values of a table, each as its key's reader has it.

    Raises:
        PlanError: it is no table; a key that is unknown, missing, or has a value that its reader refuses.
    """
    table = TABLE(data, where)
    odd = next((key for key in table if key not in readers), None)
    if odd is not None:
        raise PlanError(
            f"{where} has the key {odd!r}, which means nothing here",
            why=f"it may have {', '.join(readers)}",
            fix=nearest(odd, readers),
        )
    for missing in sorted(set(needed) - set(table)):
        raise PlanError(f"{where} has no {missing!r}", why=f"needed are {', '.join(sorted(needed))}")
    return {key: readers[key](value, f"{where}.{key}") for key, value in table.items()}


def checked(made: Callable[[Any], Any], why: str, fix: str = "", known: Iterable[str] = ()) -> Reader:
    """A reader of what ``made`` makes something of; None is refused, the nearest known one named."""

    def reader(value: object, where: str) -> Any:
        found = made(value)
        if found is None:
            raise PlanError(
                f"{where} is {value!r}", why=why, fix=nearest(str(value), known) if known else fix
            )
        return found

    return reader


def quantity(what: str, units: Mapping[str, float], least: float, most: float, examples: str) -> Reader:
    """A reader of texts with a unit, which is a number of the first one; what nobody has is refused.

    Args:
        what: is measured, in words.
        units: the factor of each to the first, such as bytes.
        least: below it is a mistake.
        most: above it is a mistake.
        examples: units to show.
    """

    def made(value: object) -> float | None:
        found = _TEXT.fullmatch(str(value))
        if found is None or found[2].strip() not in units:
            return None
        number = float(found[1].replace("_", "").replace(",", "")) * units[found[2].strip()]
        return number if least <= number <= most else None

    bounds = f"between {least:.3g} and {most:.3g} {next(iter(units))}"
    why = f"a {what} is a text, a number and its unit, {bounds}"
    return checked(made, why, f'write it as in "{examples.split(", ")[0]}"; units: {examples}')


def number(least: float, most: float = math.inf, why: str = "") -> Reader:
    """A reader of plain numbers between two others."""

    def made(value: Any) -> float | None:
        is_finite = type(value) in (int, float) and math.isfinite(value)
        return float(value) if is_finite and least <= value <= most else None

    return checked(made, why or f"it must be a finite number, {least:g} or more")


def whole(least: int, most: int = 1_000_000) -> Reader:
    """A reader of whole numbers."""
    why = f"it must be a whole number, {least} or more and at most {most:,}"
    return checked(lambda value: value if type(value) is int and least <= value <= most else None, why)


def one_of(known: Iterable[str]) -> Reader:
    """A reader of one of some texts."""
    why = f"it must be {' or '.join(known)}"
    return checked(lambda value: value if value in tuple(known) else None, why, known=known)


def kind_of(wanted: type, why: str) -> Reader:
    """A reader of what is of one kind."""
    return checked(lambda value: value if isinstance(value, wanted) else None, why)


@lru_cache
def _columns(kind: Any) -> tuple[dict[str, str], dict[str, Reader]]:
    """By key of a record's table the field, and what reads it; a type may say both."""
    names, readers = {}, {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        reader, *keys = hint.__metadata__ if get_origin(hint) is Annotated else (_plain(hint),)
        key = keys[0] if keys else name
        names[key], readers[key] = name, reader
    return names, readers


def _plain(hint: Any) -> Reader:
    """What reads values of a type that says nothing of it."""
    if get_origin(hint) is Literal:
        return one_of(get_args(hint))
    return {str: TEXT, bool: YES, int: whole(0)}.get(hint, TABLE)


def _scaled(unit: str, factor: float = 1.0) -> dict[str, float]:
    return {prefix + unit: factor * size for prefix, size in _DECIMAL.items()}


_BYTES = {**_scaled("B"), **{prefix + "B": size for prefix, size in _BINARY.items()}}
_RATES = {unit + "/s": size for unit, size in _BYTES.items()}
_BITS = {**_scaled("b/s", 0.125), **_scaled("bit/s", 0.125)}
_FLOPS = {**_scaled("FLOP/s"), **_scaled("FLOPS")}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
_PRICES = {"$/h": 1.0, "€/h": 1.0, "$/hour": 1.0}
MEMORY = quantity("memory", _BYTES, 1e6, 1e15, "80 GB, 64 GiB, 512 MB, 1 TB")
RATE = quantity("bandwidth", _RATES | _BITS, 1e3, 1e15, "450 GB/s, 3.35 TB/s, 400 Gb/s")
FLOPS = quantity("computing speed", _FLOPS, 1e6, 1e18, "989 TFLOP/s, 64 GFLOP/s, 2.5 PFLOP/s")
PRICE = quantity("price", _PRICES, 0.0, 1e6, "2.5 $/h, 2.5 €/h")
DURATION = quantity("duration", _TIMES, 0.0, 1e6, "1.5 s, 30 us, 20 ms")
TEXT, TABLE = kind_of(str, "it must be a text in quotes"), kind_of(Mapping, "it must be a table")
YES = kind_of(bool, "it must be true or false")
Count: TypeAlias = Annotated[int, whole(1)]
"""A whole number from 1 on."""
Share: TypeAlias = Annotated[float, number(math.ulp(0.0), 1.0, "it is a share, above 0 up to 1")]
"""Of a device's number, above 0 up to 1."""
Part: TypeAlias = Annotated[float, number(0.0, 1.0, "it is a share, from 0 to 1")]
"""From nothing to all."""
Seconds: TypeAlias = Annotated[float, DURATION]
"""A text such as ``30 us``."""
Rate: TypeAlias = Annotated[float, RATE]
"""A text such as ``450 GB/s``."""
