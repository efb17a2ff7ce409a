"""Logged: the numbers that a user's function logs while it is called, as sums and counts by name.

    log_metric("length", 12) ──> Logged ──> answer frame ──> Score.logged ── merged over rows ──> Mean

The function asks for it with a parameter named ``log_metric``, as in TRL. Standard library only.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping

LOG_METRIC = "log_metric"
"""Parameter that receives the callable."""
MAX_NAMES = 64
"""Largest number of names in one call."""
NAME_CHARACTERS = 100
"""Longest name."""

Sums = Mapping[str, tuple[float, int]]
"""Total and count of the values of each name."""


class Logged:
    """The logged values of one call; call the object to add a value.

    Example:
        log_metric = Logged()
        log_metric("length", 12)
        log_metric("length", 14)
        log_metric.sums == {"length": (26.0, 2)}
    """

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, int]] = {}
        """Total and count by name."""

    def __call__(self, name: str, value: float) -> None:
        """Add a value to the mean of a name.

        Raises:
            TypeError, ValueError: the name is no short text, the value is no number, or there are too many
                names.
        """
        if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARACTERS or not name.isprintable():
            raise ValueError(
                f"log_metric: the name {reprlib.repr(name)} is not a text of 1 to {NAME_CHARACTERS} "
                "characters"
            )
        if isinstance(value, str | bytes):
            raise TypeError(f"log_metric: the value of {name!r} is {reprlib.repr(value)}, not a number")
        if name not in self.sums and len(self.sums) == MAX_NAMES:
            raise ValueError(f"log_metric: one call logs at most {MAX_NAMES} names; {name!r} is one more")
        total, count = self.sums.get(name, (0.0, 0))
        self.sums[name] = (total + float(value), count + 1)


def merged(parts: Iterable[Sums]) -> dict[str, tuple[float, int]]:
    """Return the sums over several calls."""
    found: dict[str, tuple[float, int]] = {}
    for part in parts:
        for name, (total, count) in part.items():
            before, times = found.get(name, (0.0, 0))
            found[name] = (before + total, times + count)
    return found


def sums_of(value: object) -> dict[str, tuple[float, int]]:
    """Return the sums in a message from another process.

    Raises:
        ValueError: the value has another form.
    """
    if not isinstance(value, Mapping) or len(value) > MAX_NAMES:
        raise ValueError(f"logged metrics {reprlib.repr(value)}")
    found = {}
    for name, entry in value.items():
        match entry:
            case [int() | float() as total, int() as count] if len(name) <= NAME_CHARACTERS and count > 0:
                found[name] = (float(total), count)
            case _:
                raise ValueError(f"a logged metric {reprlib.repr(name)}: {reprlib.repr(entry)}")
    return found
