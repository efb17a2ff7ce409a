"""Skipping: an update that is not finite is left out on all ranks, told, and kept as a bundle.

Trainer.step ─ NotFiniteError, here or on another rank ─> Skipped.add ─┬─> Skip: the reason, the rows
                                                                       └─> bundle: what a replay needs
bundle/
  bundle.json                      the reason, and of each aim its loss and weight
  rows-0-00000.safetensors         the rows of the first aim on the first rank, every field of them
  policy/, policy.optimizer/       the role at that moment, as a checkpoint has it
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
from rillflow.records.batch import Batch
from rillflow.records.stored import save_batch

ABOUT = "bundle.json"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Skip:
    """One update that was left out."""

    reason: str
    """What was not finite, and where."""
    rows: list[list[int]]
    """The ids (epoch, prompt, sample) of its rows, those of all ranks."""


class Skipped:
    """What is done with updates that are not finite.

    Args:
        folder: where the first one of a step is kept as a bundle.
        save: writes the role into a folder; every rank calls it.
    """

    def __init__(self, folder: Path, save: Callable[[Path], None]) -> None:
        self._folder = folder
        self._save = save
        self._skips: list[Skip] = []

    def add(self, skip: Skip, rows: Sequence[Batch], aims: list[dict[str, Any]], rank: int) -> None:
        """Note a skip; the first since ``take`` is kept as a bundle, as far as the disk allows.

        Args:
            skip: what was left out.
            rows: this rank's, by aim.
            aims: what a replay needs to know of each.
            rank: which part of the rows this one has; -1 where another rank has the same.
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
            _log.warning("the bundle %s is not whole: %s", self._folder, error)

    def take(self) -> list[Skip]:
        """The skips since the last call."""
        taken, self._skips = self._skips, []
        return taken


def leave_out(role: Any, folder: Path) -> None:
    """Let a role that is trained leave updates out and keep them in a folder; on all ranks."""
    role.trainer.skipped = Skipped(folder, role.save)


def taken_skips(role: Any) -> list[Skip]:
    """What a role has left out since the last call."""
    return list(role.trainer.skipped.take())
