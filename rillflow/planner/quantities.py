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
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from rillflow.errors import PlanError, nearest

Reader = Callable[[object, str], Any]
"""What makes a value of a file one of ours, or refuses it by its place."""
_TEXT = re.compile(r"\s*([0-9][0-9_,]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z$/€ ]+?)\s*")
_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """What a text may measure, and between which bounds it is believed."""

    what: str
    """In words, for errors."""
    units: dict[str, float]
    """Factor of each unit to the first, such as bytes."""
    least: float
    """Below it is a mistake."""
    most: float
    """Above it is a mistake."""
    examples: str
    """Units to show."""

    def __call__(self, value: object, where: str) -> float:
        """The number in the first unit.

        Raises:
            PlanError: no unit, a unit of another quantity, or a value nobody has.
        """
        found = _TEXT.fullmatch(value) if isinstance(value, str) else None
        if found is None or found[2].strip() not in self.units:
            raise PlanError(
                f"{where} is {value!r}",
                why=f"a {self.what} is a text: a number and its unit",
                fix=f'write it as in "{self.examples.split(", ")[0]}"; units: {self.examples}',
            )
        number = float(found[1].replace("_", "").replace(",", "")) * self.units[found[2].strip()]
        if not self.least <= number <= self.most or not math.isfinite(number):
            unit = next(iter(self.units))
            raise PlanError(
                f"{where} is {value!r}",
                why=f"a {self.what} lies between {self.least:.3g} and {self.most:.3g} {unit}",
                fix="check the number and its unit",
            )
        return number


def _scaled(unit: str, factor: float = 1.0) -> dict[str, float]:
    return {prefix + unit: factor * size for prefix, size in _DECIMAL.items()}


_BYTES = {**_scaled("B"), **{prefix + "B": size for prefix, size in _BINARY.items()}}

_RATES = {unit + "/s": size for unit, size in _BYTES.items()}
_BITS = {**_scaled("b/s", 0.125), **_scaled("bit/s", 0.125)}
_FLOPS = {**_scaled("FLOP/s"), **_scaled("FLOPS")}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
_PRICES = {"$/h": 1.0, "€/h": 1.0, "$/hour": 1.0}
_SPEEDS = "989 TFLOP/s, 64 GFLOP/s, 2.5 PFLOP/s"
MEMORY = Quantity(what="memory", units=_BYTES, least=1e6, most=1e15, examples="80 GB, 64 GiB, 512 MB, 1 TB")
RATE = Quantity(
    what="bandwidth", units=_RATES | _BITS, least=1e3, most=1e15, examples="450 GB/s, 3.35 TB/s, 400 Gb/s"
)
FLOPS = Quantity(what="computing speed", units=_FLOPS, least=1e6, most=1e18, examples=_SPEEDS)
PRICE = Quantity(what="price", units=_PRICES, least=0.0, most=1e6, examples="2.5 $/h, 2.5 €/h")
DURATION = Quantity(what="duration", units=_TIMES, least=0.0, most=1e6, examples="1.5 s, 30 us, 20 ms")


def read(kind: Any, data: object, where: str, **known: object) -> Any:
    """The record of a table; ``known`` are the values of fields that it does not have.

    Raises:
        PlanError: as of ``values``.
    """
    hints = get_type_hints(kind, include_extras=True)
    keys = {_key(field.name, hints[field.name]): field for field in fields(kind) if field.name not in known}
    readers = {key: reader_of(hints[field.name]) for key, field in keys.items()}
    needed = {key for key, field in keys.items() if field.default is MISSING}
    said = values(data, readers, where, needed)
    return kind(**known, **{keys[key].name: value for key, value in said.items()})


def readers_of(kind: Any) -> dict[str, Reader]:
    """What reads the keys of a record's table."""
    return {
        _key(name, hint): reader_of(hint) for name, hint in get_type_hints(kind, include_extras=True).items()
    }


def reader_of(hint: Any) -> Reader:
    """What reads values of a type."""
    if get_origin(hint) is Annotated:
        reader: Reader = hint.__metadata__[0]
        return reader
    if get_origin(hint) is Literal:
        return one_of(*get_args(hint))
    return {str: TEXT, bool: YES, int: whole(0)}.get(hint, TABLE)


def _key(name: str, hint: Any) -> str:
    """The key of a field: its name, or what its type says."""
    return str(hint.__metadata__[1]) if get_origin(hint) is Annotated and hint.__metadata__[1:] else name


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


def checked(
    is_right: Callable[[Any], bool],
    why: str,
    *,
    known: tuple[str, ...] = (),
    made: Callable[[Any], Any] | None = None,
) -> Reader:
    """A reader of what passes a test, perhaps made something else; the nearest of what is known is named."""

    def read(value: object, where: str) -> Any:
        if not is_right(value):
            fix = nearest(str(value), known) if known else ""
            raise PlanError(f"{where} is {value!r}", why=why, fix=fix)
        return value if made is None else made(value)

    return read


def kind(wanted: type, why: str) -> Reader:
    """A reader of what is of one kind."""
    return checked(lambda value: isinstance(value, wanted), why)


def number(least: float, most: float = math.inf, why: str = "", *, is_open: bool = False) -> Reader:
    """A reader of plain numbers between two others; ``is_open``: the least itself is none."""

    def is_right(value: Any) -> bool:
        is_number = type(value) in (int, float) and math.isfinite(value)
        return is_number and least <= value <= most and not (is_open and value == least)

    return checked(is_right, why or f"it must be a finite number, {least:g} or more", made=float)


def whole(least: int, most: int = 1_000_000) -> Reader:
    """A reader of whole numbers."""
    why = f"it must be a whole number, {least} or more and at most {most:,}"
    return checked(lambda value: type(value) is int and least <= value <= most, why)


def one_of(*known: str) -> Reader:
    """A reader of one of some texts."""
    return checked(lambda value: value in known, f"it must be {' or '.join(known)}", known=known)


TEXT, TABLE = kind(str, "it must be a text in quotes"), kind(Mapping, "it must be a table")
YES = kind(bool, "it must be true or false")
Count: TypeAlias = Annotated[int, whole(1)]
"""A whole number from 1 on."""
Share: TypeAlias = Annotated[float, number(0.0, 1.0, "it is a share, above 0 up to 1", is_open=True)]
"""Of a device's number, above 0 up to 1."""
Part: TypeAlias = Annotated[float, number(0.0, 1.0, "it is a share, from 0 to 1")]
"""From nothing to all."""
Seconds: TypeAlias = Annotated[float, DURATION]
"""A text such as ``30 us``."""
Rate: TypeAlias = Annotated[float, RATE]
"""A text such as ``450 GB/s``."""
