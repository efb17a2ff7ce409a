"""Asked: the parameters of a request, with their types and bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from urllib.parse import unquote

from starlette.datastructures import QueryParams

from rillflow.serving.http_body import Declined

LARGEST = 2**53
"""Largest whole number that JSON carries in every client."""
LONGEST_TEXT = 1000
"""Most characters of a text."""


class Asked:
    """Parameters of a request's address. Every method raises Declined with status 400 for a wrong value."""

    def __init__(self, parameters: QueryParams) -> None:
        self._parameters = parameters

    def text(self, name: str) -> str:
        """Return a text, empty if it is left out."""
        value: str = self._parameters.get(name, "")
        if len(value) > LONGEST_TEXT:
            raise _wrong(name, value, f"a text of at most {LONGEST_TEXT} characters")
        return value

    def names(self, name: str, most: int) -> list[str]:
        """Return a list of names that commas separate; a comma in a name is %2C, and a % is %25."""
        value = self._parameters.get(name, "")
        found = [unquote(each) for each in value.split(",") if each]
        if len(found) > most or len(value) > 100 * LONGEST_TEXT:
            raise _wrong(name, value, f"at most {most} names")
        return found

    def whole(self, name: str, default: int | None, low: int = 0, high: int = LARGEST) -> int:
        """Return a whole number; without a default it must be given."""
        value = self._parameters.get(name, "")
        if not value and default is not None:
            return default
        is_whole = value.removeprefix("-").isdecimal() and value.isascii() and len(value) <= 20
        if not is_whole or not low <= int(value) <= high:
            raise _wrong(name, value, f"a whole number from {low} to {high}")
        return int(value)

    def number(self, name: str) -> float | None:
        """Return a number, or None if it is left out."""
        value = self._parameters.get(name, "")
        if not value:
            return None
        try:
            found = float(value) if len(value) <= 40 else math.nan
        except ValueError:
            found = math.nan
        if not math.isfinite(found):
            raise _wrong(name, value, "a finite number")
        return found

    def steps(self, name: str) -> tuple[int, int]:
        """Return a range of steps. Example: ``5-8``, ``5-``, ``-8``, ``5``; left out, all steps."""
        value = self._parameters.get(name, "")
        first, dash, last = value.partition("-")
        last = last if dash else first
        ends = [end for end in (first, last) if end]
        if any(not (end.isdecimal() and end.isascii() and len(end) < 17) for end in ends):
            raise _wrong(name, value, "a range of steps, such as 5-8")
        return int(first or 0), int(last or LARGEST)

    def one_of(self, name: str, choices: Sequence[str]) -> str:
        """Return one of some words; left out, the first."""
        value: str = self._parameters.get(name, "") or choices[0]
        if value not in choices:
            raise _wrong(name, value, f"one of {', '.join(choices)}")
        return value


def _wrong(name: str, value: str, wanted: str) -> Declined:
    return Declined(400, f"{name} is {value[:80]!r}", why=f"it should be {wanted}")
