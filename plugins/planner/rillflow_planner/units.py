"""Units: readers of numbers that describe a device; each must have a unit.

"450 GB/s" ─> 4.5e11        0.45 ─> an error: no unit
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, TypeAlias

from rillflow.placement.tables import Reader, checked, number

_TEXT = re.compile(r"\s*([0-9][0-9_,]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z$/€ ]+?)\s*")
_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def quantity(what: str, units: Mapping[str, float], least: float, most: float, examples: str) -> Reader:
    """Return a reader of texts with a number and a unit, in the first unit; implausible values fail.

    Args:
        what: measured quantity, in words.
        units: factor of each unit relative to the first, such as bytes.
        least: smallest plausible value.
        most: largest plausible value.
        examples: units for the error message.
    """

    def made(value: object) -> float | None:
        found = _TEXT.fullmatch(str(value))
        if found is None or found[2].strip() not in units:
            return None
        number = float(found[1].replace("_", "").replace(",", "")) * units[found[2].strip()]
        return number if least <= number <= most else None

    bounds = f"between {least:.3g} and {most:.3g} {next(iter(units))}"
    why = f"a {what} is text in quotes with a number and a unit, {bounds}"
    return checked(made, why, f"write it in quotes with a unit, such as {examples}")


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
Share: TypeAlias = Annotated[float, number(math.ulp(0.0), 1.0, "it must be a share above 0 and at most 1")]
"""A share of a device's number, above 0 and at most 1."""
Part: TypeAlias = Annotated[float, number(0.0, 1.0, "it must be a share from 0 to 1")]
"""A share from 0 to 1."""
Seconds: TypeAlias = Annotated[float, DURATION]
"""A duration as text, such as ``30 us``."""
Rate: TypeAlias = Annotated[float, RATE]
"""A bandwidth as text, such as ``450 GB/s``."""
