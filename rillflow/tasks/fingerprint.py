"""Fingerprint: digests of a run's data, so that rows may be added to it and none may change.

rows of the first start ──> Fingerprint ── kept ──┬─> first_changed ─> the first row that changed or is gone
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
    """First rows of the source that held-out rows are drawn from: all rows at the first start."""
    examples: Sequence[Example]
    """Every row of the source, in order."""
    apart: Sequence[Example]
    """Rows of a held-out file."""

    @cached_property
    def rows(self) -> Sequence[str]:
        """Shortened SHA-256 of every row of the source, computed on first use."""
        return row_digests(self.examples)

    @cached_property
    def held_out(self) -> Sequence[str]:
        """Shortened SHA-256 of every row of a held-out file."""
        return row_digests(self.apart)

    @property
    def digest(self) -> str:
        """Shortened SHA-256 of all rows."""
        return hashlib.sha256(json.dumps([*self.rows, "", *self.held_out]).encode()).hexdigest()[:16]


def row_digests(rows: Iterable[Example]) -> tuple[str, ...]:
    """Return every row's digest: 8 hex digits over its index, prompt, completion and columns."""
    return tuple(hashlib.sha256(json.dumps(row.plain()).encode()).hexdigest()[:8] for row in rows)


def first_changed(kept: Sequence[str], now: Sequence[str], *, may_grow: bool) -> int | None:
    """Return the index of the first row that changed or is gone; None if there is none.

    With ``may_grow`` False, rows after the kept ones count as changed.
    """
    pairs = enumerate(zip_longest(kept, now[: len(kept)] if may_grow else now))
    return next((place for place, (old, new) in pairs if old != new), None)
