"""Fingerprint: what a run keeps of its data, so that rows may be added to it and none may change.

rows of the first start ──> Fingerprint ── kept ──┬─> first_changed ─> the row that is another now, or is gone
rows of a later start ────> Fingerprint ──────────┘
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

from rillflow.tasks.example import Example


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """A task's data, row by row."""

    drawn: int
    """Rows of the source that held-out ones are drawn from, its first: all there were at the first start."""
    examples: Sequence[Example]
    """Every row of the source, in order."""
    apart: Sequence[Example]
    """The rows of a held-out file."""

    @cached_property
    def rows(self) -> Sequence[str]:
        """Of every row of the source, the first letters of its SHA-256; a plan asks for none."""
        return row_digests(self.examples)

    @cached_property
    def held_out(self) -> Sequence[str]:
        """The same of the rows of a held-out file."""
        return row_digests(self.apart)

    @property
    def digest(self) -> str:
        """The first letters of the SHA-256 of all of it."""
        return hashlib.sha256(json.dumps([*self.rows, "", *self.held_out]).encode()).hexdigest()[:16]


def row_digests(rows: Iterable[Example]) -> tuple[str, ...]:
    """Every row's digest: eight letters, of what a reward or a model is given of it and its place."""
    return tuple(hashlib.sha256(json.dumps(row.plain()).encode()).hexdigest()[:8] for row in rows)


def first_changed(kept: Sequence[str], now: Sequence[str], *, may_grow: bool) -> int | None:
    """The place of the first row that is not as it was, or is gone; None where all are as they were.

    Rows after those that were kept count where ``may_grow`` is False.
    """
    pairs = enumerate(zip_longest(kept, now[: len(kept)] if may_grow else now))
    return next((place for place, (old, new) in pairs if old != new), None)
