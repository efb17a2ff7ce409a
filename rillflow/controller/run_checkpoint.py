"""Run checkpoint: write a checkpoint of a run directory, in order with the lines that the run has written.

lines so far ─ flushed ─> save_checkpoint, which keeps the best one too ─> a mark in the run's evidence
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rillflow.controller.checkpoint import save_checkpoint
from rillflow.runs.reader import best_checkpoint
from rillflow.runs.run_directory import RunDirectory


def save_in(
    run: RunDirectory,
    step: int,
    write: Callable[[Path], Mapping[str, Any]],
    state: Mapping[str, Any],
    keep: int,
) -> None:
    """Write a checkpoint of a run after its lines so far; the one with the best evaluation is kept too.

    Args:
        run: the run directory.
        step: see ``save_checkpoint``, as ``write``, ``state`` and ``keep``.
    """
    run.require_lock()
    run.evidence.flush()  # a resume from this checkpoint goes on after these lines
    best = best_checkpoint(run.path)
    spare = None if best is None else best.step
    save_checkpoint(run.checkpoints, step, write, state, keep, run=run.id, spare=spare)
    run.evidence.of_checkpoint(step)
