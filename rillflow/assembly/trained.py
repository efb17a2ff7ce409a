"""Trained: the models that a run has made so far, found by their roles.

run directory ─ newest whole checkpoint, or the one of a step ─> the role's Hugging Face directory
"""

from __future__ import annotations

from pathlib import Path

from rillflow.dataflow.checkpoint import kept_steps, latest_checkpoint
from rillflow.errors import RunDirectoryError
from rillflow.observe import layout


def model_directory(run: Path, role: str, step: int | None = None) -> Path:
    """The directory of a role's model in a checkpoint: the newest whole one if ``step`` is None.

    Raises:
        RunDirectoryError: there is no such checkpoint, or the run trains no such role.
    """
    found = _checkpoint(run, step) / role
    if not found.is_dir():
        there = sorted(path.parent.name for path in found.parent.glob("*/config.json"))
        raise RunDirectoryError(
            f"{run} has no {role.replace('_', ' ')}",
            why=f"it trains the {', the '.join(there).replace('_', ' ')}" if there else "it trains nothing",
            fix="name another run",
        )
    return found


def _checkpoint(run: Path, step: int | None) -> Path:
    folder = run / layout.CHECKPOINTS
    if step is None:
        newest = latest_checkpoint(folder)
        if newest is None:
            raise RunDirectoryError(
                f"{run} has no checkpoint",
                why="the first one is written after run.checkpoint_minutes, or when a phase ends",
                fix="wait for it, or set run.checkpoint_every",
            )
        return newest.path
    chosen = folder / f"step-{step:06d}"
    if not chosen.is_dir():
        there = kept_steps(folder)
        raise RunDirectoryError(
            f"{run} has no checkpoint of step {step}",
            why=f"it has those of steps {', '.join(map(str, there))}" if there else "it has none",
            fix=f"--checkpoint {there[-1]}" if there else "wait for the first one",
        )
    return chosen
