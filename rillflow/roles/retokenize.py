"""Reread: the policy's rows as another model's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rillflow.records.batch import Batch


@dataclass(frozen=True, kw_only=True)
class Reread:
    """Rows encoded again by another tokeniser; see ``assembly.other_tokens``."""

    rows: Batch
    """``tokens`` of B rows, at least one per row."""
    why: Sequence[str]
    """Reason why each row could not be read, its tokens then being a placeholder; empty if it could."""
