"""Trained: find the models that a run has trained so far, by role.

run directory ─ newest whole checkpoint, or the one of a step ─> the role's Hugging Face directory
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from rillflow.app.plugins import KIND, other_kind
from rillflow.config.user_paths import expanded
from rillflow.controller.checkpoint import latest_checkpoint
from rillflow.errors import RunDirectoryError
from rillflow.runs import layout
from rillflow.runs.layout import checkpoint_step, kept_steps
from rillflow.runs.reader import read_config


def model_directory(run: Path, role: str, step: int | None = None) -> Path:
    """Return the directory of a role's model in a checkpoint; ``step`` None takes the newest whole one.

    Raises:
        RunDirectoryError: there is no such checkpoint, or the run trains no such role.
        ConfigError: the run trains no language model.
    """
    _require_language_model(run)
    return _of_role(run, _checkpoint(run, step), role)


def _require_language_model(run: Path) -> None:
    has_config = layout.is_run_directory(run) and (run / layout.CONFIG).is_file()
    config = read_config(run) if has_config else {}
    if KIND in config:
        raise other_kind(run, config[KIND])


def _of_role(run: Path, checkpoint: Path, role: str) -> Path:
    found = checkpoint / role
    if not found.is_dir():
        there = sorted({path.parent.name for path in found.parent.glob("*/*config.json")})
        raise RunDirectoryError(
            f"{run} has no {role.replace('_', ' ')}",
            why=f"it trains the {', the '.join(there).replace('_', ' ')}"
            if there
            else "its checkpoint holds no model",
            fix="give another run",
        )
    return found


def named_model(
    path: str | None, base: Path, *roles: str, hold: Callable[[Path, int], bool] = lambda *_: True
) -> str | None:
    """Return a recipe's path; replace a run directory by a model of its newest checkpoint.

    Args:
        path: relative to ``base``; None stays None.
        base: the recipe's folder.
        *roles: roles of the model in a run; the first that the run trains counts.
        hold: keeps the checkpoint of a step in a run directory, and returns whether it is still there; the
            run may be training.

    Raises:
        RunDirectoryError: the run has no checkpoint, or trains none of the roles.
    """
    run = base / expanded(path or "")
    if path is None or not layout.is_run_directory(run):
        return path
    _require_language_model(run)
    step = max(kept_steps(run / layout.CHECKPOINTS), default=None)
    while True:
        if step is not None and not hold(run, step):
            step = max(kept_steps(run / layout.CHECKPOINTS), default=None)
            continue
        checkpoint = _checkpoint(run, None, math.inf if step is None else step + 1)
        if checkpoint_step(checkpoint) == step:
            break
        step = checkpoint_step(checkpoint)  # the newest one is damaged
    role = next((role for role in roles if (checkpoint / role).is_dir()), roles[0])
    return str(Path(path) / _of_role(run, checkpoint, role).relative_to(run))


def newest_model(path: str, base: Path, role: str) -> str:
    """Return a recipe's path; replace a run directory by a model of its newest checkpoint, unverified."""
    run = base / expanded(path)
    if not layout.is_run_directory(run):
        return path
    _require_language_model(run)
    newest = next(iter(layout.checkpoint_folders(run / layout.CHECKPOINTS)), None)
    return path if newest is None else str(newest / role)


def _checkpoint(run: Path, step: int | None, before: float = math.inf) -> Path:
    folder = run / layout.CHECKPOINTS
    if step is None:
        newest = latest_checkpoint(folder, before=before)
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
            why=f"it has checkpoints of the steps {', '.join(map(str, there))}" if there else "it has none",
            fix=f"use --checkpoint {there[-1]}" if there else "wait for the first one",
        )
    return chosen
