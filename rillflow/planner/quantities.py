"""Quantities: a number is never without its unit.

"450 GB/s" ─> 4.5e11        0.45 ─> refused: of what?
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from rillflow.errors import PlanError

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

    def read(self, value: object, where: str) -> float:
        """The number in the first unit.

        Raises:
            PlanError: no unit, a unit of another quantity, or a value nobody has.
        """
        if isinstance(value, bool) or not isinstance(value, str):
            raise PlanError(
                f"{where} is {value!r}, without a unit",
                why=f"a {self.what} is a text with its unit",
                fix=f'write it as in "{self.examples.split(", ")[0]}"; units: {self.examples}',
            )
        found = _TEXT.fullmatch(value)
        if found is None or found[2].strip() not in self.units:
            raise PlanError(
                f"{where} is {value!r}",
                why=f"a {self.what} is a number and a unit",
                fix=f"units: {self.examples}",
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

MEMORY = Quantity(what="memory", units=_BYTES, least=1e6, most=1e15, examples="80 GB, 64 GiB, 512 MB, 1 TB")
RATE = Quantity(
    what="bandwidth",
    units={
        "B/s": 1.0,
        **{unit + "/s": size for unit, size in _BYTES.items()},
        **_scaled("b/s", 0.125),
        **_scaled("bit/s", 0.125),
    },
    least=1e3,
    most=1e15,
    examples="450 GB/s, 3.35 TB/s, 400 Gb/s",
)
FLOPS = Quantity(
    what="computing speed",
    units={**_scaled("FLOP/s"), **_scaled("FLOPS")},
    least=1e6,
    most=1e18,
    examples="989 TFLOP/s, 64 GFLOP/s, 2.5 PFLOP/s",
)
PRICE = Quantity(
    what="price",
    units={"$/h": 1.0, "€/h": 1.0, "$/hour": 1.0},
    least=0.0,
    most=1e6,
    examples="2.5 $/h, 2.5 €/h",
)
DURATION = Quantity(
    what="duration",
    units={"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0},
    least=0.0,
    most=1e6,
    examples="1.5 s, 30 us, 20 ms",
)
