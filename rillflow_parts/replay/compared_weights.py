"""Compared weights: find the first tensor of a checkpoint that differs from another checkpoint's.

policy/*.safetensors, policy.optimizer/*.safetensors ─ same digest? ─ no ─> tensor by tensor ─> Difference
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rillflow.controller.checkpoint import AHEAD, COLLECTED
from rillflow.errors import RunDirectoryError
from rillflow.runs.durable import digest_of
from rillflow_parts.replay.comparison import ABSENT, ComparedStep, Difference


def compare_weights(step: ComparedStep, recorded: Path, replayed: Path) -> ComparedStep:
    """Return a compared step with the comparison of the weights and optimiser states in its checkpoints.

    Raises:
        RunDirectoryError: a file is damaged.
    """
    count, found = 0, None
    for name in sorted({*_files(recorded), *_files(replayed)}):
        one, other = recorded / name, replayed / name
        if not (one.is_file() and other.is_file()):
            sides = ["present" if file.is_file() else ABSENT for file in (one, other)]
            found = Difference(step=step.step, place=name, recorded=sides[0], replayed=sides[1])
        elif digest_of(one) == digest_of(other):
            count += len(_names(one))
        else:
            compared, found = _compare(step.step, name, one, other)
            count += compared
        if found is not None:
            break
    return replace(step, compared={**step.compared, "tensors": count}, difference=found)


def _files(checkpoint: Path) -> list[str]:
    """Return the files with the tensors of roles, relative to the checkpoint."""
    files = (file.relative_to(checkpoint) for file in checkpoint.glob("*/**/*.safetensors"))
    return [str(file) for file in files if file.parts[0] not in (AHEAD, COLLECTED)]


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, "pt") as tensors:
            return list(tensors.keys())
    except (OSError, SafetensorError) as error:
        raise RunDirectoryError(f"cannot read {file}", why=str(error), fix="restore the file") from error


def _compare(step: int, name: str, recorded: Path, replayed: Path) -> tuple[int, Difference | None]:
    """Return the number of compared tensors of two files, and the first difference."""
    names = sorted({*_names(recorded), *_names(replayed)})
    with safe_open(recorded, "pt") as one, safe_open(replayed, "pt") as other:
        for index, tensor in enumerate(names):
            both = [side.get_tensor(tensor) if tensor in side.keys() else None for side in (one, other)]  # noqa: SIM118
            found = _first(step, f"{Path(name).parent}, tensor {tensor}", *both)
            if found is not None:
                return index + 1, found
    return len(names), None


def _first(step: int, place: str, recorded: Tensor | None, replayed: Tensor | None) -> Difference | None:
    """Return the first element in which two tensors differ."""
    if (
        recorded is None
        or replayed is None
        or (recorded.shape, recorded.dtype)
        != (
            replayed.shape,
            replayed.dtype,
        )
    ):
        sides = [
            ABSENT if each is None else f"{each.dtype} {list(each.shape)}" for each in (recorded, replayed)
        ]
        return Difference(step=step, place=place, recorded=sides[0], replayed=sides[1])
    odd = (recorded != replayed) & ~((recorded != recorded) & (replayed != replayed))
    if not bool(torch.any(odd)):
        return None
    at = tuple(odd.nonzero()[0].tolist())
    values = recorded[at].item(), replayed[at].item()
    return Difference(step=step, place=f"{place}, index {list(at)}", recorded=values[0], replayed=values[1])
