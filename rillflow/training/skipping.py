"""Skipping: leave out a non-finite update on all ranks, report it, and save it as a bundle.

Trainer.step ─ NotFiniteError, here or on another rank ─> Skipped.add ─┬─> Skip: the reason, the rows
                                                                       └─> bundle: everything a replay needs

bundle/
  bundle.json                      the reason, and each aim's loss and weight
  rows-0-00000.safetensors         the rows of the first aim on the first rank, with all fields
  policy/, policy.optimizer/       the role at that moment, in checkpoint format
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from rillflow.errors import RillflowError
from rillflow.records.batch import Batch, save_batch

ABOUT = "bundle.json"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Skip:
    """One update that was left out."""

    reason: str
    """The non-finite number and its place."""
    rows: list[list[int]]
    """Ids (epoch, prompt, sample) of its rows, from all ranks."""


class Skipped:
    """Collector of non-finite updates; it saves the first one.

    Args:
        folder: folder of the bundle, for the first update of a step.
        save: writes the role into a folder; every rank calls it.
    """

    def __init__(self, folder: Path, save: Callable[[Path], None]) -> None:
        self._folder = folder
        self._save = save
        self._skips: list[Skip] = []

    def add(self, skip: Skip, rows: Sequence[Batch], aims: list[dict[str, Any]], rank: int) -> None:
        """Record a skip; save the first one since ``take`` as a bundle, and only warn if the disk fails.

        Args:
            skip: the update that was left out.
            rows: this rank's rows, by aim.
            aims: each aim's facts for a replay.
            rank: index of this rank's part of the rows; -1 if another rank has the same part.
        """
        self._skips.append(skip)
        if len(self._skips) > 1:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._save(self._folder)
            for aim, batch in enumerate(rows if rank >= 0 else ()):
                save_batch(batch, self._folder / f"rows-{aim}-{rank:05d}.safetensors")
            if rank == 0:
                (self._folder / ABOUT).write_text(json.dumps({"reason": skip.reason, "aims": aims}))
        except (OSError, SafetensorError, RillflowError) as error:
            _log.warning("the bundle %s is incomplete: %s", self._folder, error)

    def take(self) -> list[Skip]:
        """Return the skips since the last call."""
        taken, self._skips = self._skips, []
        return taken


def leave_out(role: Any, folder: Path) -> None:
    """Make a trained role skip non-finite updates and save them in a folder; called on all ranks."""
    role.trainer.skipped = Skipped(folder, role.save)


def taken_skips(role: Any) -> list[Skip]:
    """Return the updates that a role has skipped since the last call."""
    return list(role.trainer.skipped.take())
