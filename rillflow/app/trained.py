"""Trained: find the models that a run has trained so far, by role.

run directory ─ newest whole checkpoint, or the one of a step ─> the role's Hugging Face directory
                                                    an adapter there ─ write_merged ─> a plain model
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rillflow.config.user_paths import expanded
from rillflow.controller.checkpoint import latest_checkpoint
from rillflow.errors import ModelError, RunDirectoryError
from rillflow.runs import layout
from rillflow.runs.durable import write_error
from rillflow.runs.layout import checkpoint_step, kept_steps


def model_directory(run: Path, role: str, step: int | None = None) -> Path:
    """Return the directory of a role's model in a checkpoint; ``step`` None takes the newest whole one.

    Raises:
        RunDirectoryError: there is no such checkpoint, or the run trains no such role.
    """
    return _of_role(run, _checkpoint(run, step), role)


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
    newest = next(iter(layout.checkpoint_folders(run / layout.CHECKPOINTS)), None)
    return path if newest is None else str(newest / role)


def write_merged(
    source: Path,
    out: Path,
    dtype: Literal["float32", "bfloat16"],
    base: Literal["trained", "full"] = "trained",
) -> None:
    """Write a plain model from an adapter and its base.

    Args:
        source: the adapter's directory, or the run whose policy it is.
        out: the directory to write; it must not exist.
        dtype: dtype of the weights.
        base: for a quantised base, ``trained`` merges into the dequantised weights that the adapter was
            trained with, ``full`` into the directory's own weights.

    Raises:
        ModelError: there is no adapter, or its base is missing.
        RunDirectoryError: the run has no checkpoint, or the directory exists or cannot be written.
    """
    from rillflow.models.adapters import merge, restore
    from rillflow.models.config import ModelConfig
    from rillflow.models.language_model import choose_device, load_model, save_model

    folder = model_directory(source, "policy") if layout.is_run_directory(source) else source
    if out.exists():
        raise RunDirectoryError(
            f"{out} already exists",
            why="existing files are never overwritten",
            fix="choose another directory",
        )
    config = ModelConfig(path=str(folder.absolute()), dtype=dtype)
    how: dict[str, Any] = {"seed": 0, "device": choose_device("cpu"), "base": Path()}
    model = load_model(config, **how)
    if model.adapter is None:
        raise ModelError(f"{folder} holds a whole model", why="it has no adapter to merge")
    full = (
        load_model(ModelConfig(path=model.adapter.base, dtype=dtype), **how).module
        if base == "full"
        else None
    )
    restore(model.module, model.module.dtype, full and dict(full.named_parameters()))
    merge(model.module)
    try:
        save_model(replace(model, adapter=None), out)
    except OSError as error:
        raise write_error(out, error) from error


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
