"""Copies: the number of each environment of a run, and arguments that contain it.

    actor 0: ring 0: slots, ring 1: slots ... ─ actor 1 ─ ... ─ next member ─ ... ─ evaluation, video
    copies   0, 1, ...                                                               the numbers after all
    {port = "{copy+5005}", log = "sim-{copy}.log"} ── copy 2 ──> {port = 5007, log = "sim-2.log"}

A number is that of one environment at a time. It does not change when a process is replaced or a run resumed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_COPY = re.compile(r"\{copy(?:\+(\d+))?\}")


@dataclass(frozen=True)
class Copies:
    """Environments that are made together."""

    count: int
    """Number of them."""
    first: int = 0
    """Number of the first one in the run."""
    most_steps: int = 0
    """Steps after which an episode is truncated, also if its own limit is higher; 0: never."""

    def limit(self, own: int | None) -> int | None:
        """Return the steps of the longest episode, with a limit of its own; None for no limit."""
        return min(own or self.most_steps, self.most_steps) if self.most_steps else own


def with_copy(value: Any, copy: int) -> Any:
    """Return an argument in which ``{copy}`` and ``{copy+N}`` stand for numbers, at any depth.

    A text that is nothing else becomes the number itself.
    """
    if isinstance(value, dict):
        return {key: with_copy(each, copy) for key, each in value.items()}
    if isinstance(value, list):
        return [with_copy(each, copy) for each in value]
    if not isinstance(value, str):
        return value
    if whole := _COPY.fullmatch(value):
        return copy + int(whole[1] or 0)
    return _COPY.sub(lambda found: str(copy + int(found[1] or 0)), value)


def names_copy(value: Any) -> bool:
    """Return whether an argument depends on the copy."""
    return bool(with_copy(value, 0) != with_copy(value, 1))
