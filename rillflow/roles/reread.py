"""Reread: the rows of a policy as another model's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rillflow.records.batch import Batch


@dataclass(frozen=True, kw_only=True)
class Reread:
    """Rows that another tokeniser has read; see ``assembly.other_tokens``."""

    rows: Batch
    """``tokens`` of B rows, one at least of each."""
    why: Sequence[str]
    """Of each row why it could not be read, and its tokens stand for nothing; empty where it could."""
