"""Checkpoints: everything a resumed run needs, written completely or not at all.

    checkpoints/step-000040/
      policy/                      plain Hugging Face directory; one for every trained role
      policy.optimizer/            training state by logical tensor, one file per rank (weights.sharded_file)
      state.json                   step, phase, versions, positions in the data
      ahead/                       rows sampled for later steps with older weights
      collected/                   rows that steps have collected
      manifest.json         run id, size and SHA-256 of every other file; written last
    checkpoints/step-000040.replaced/   the previous checkpoint of the same step, during the swap

Ranks write and hash the large files (roles.saving) while they train on; the controller reads none of them. A
checkpoint is written to a draft folder, flushed to disk, and renamed once the manifest exists. A reader takes
the newest checkpoint of its own run whose files match the manifest, and warns about newer ones that do not
match. The number of complete checkpoints never drops while a new one is written. A checkpoint that another
run stands on is not removed.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rillflow.errors import RunDirectoryError
from rillflow.runs.bases import is_model, model_digest
from rillflow.runs.durable import digest_of, flush, write_error
from rillflow.runs.layout import checkpoint_folders, checkpoint_step
from rillflow.runs.pins import removal

FORMAT = 2
AHEAD = "ahead"
"""Folder of rows sampled for later steps."""
COLLECTED = "collected"
"""Folder of rows that steps have collected, one file per name."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A verified checkpoint."""

    path: Path
    """Directory of the checkpoint."""
    step: int
    """Steps of the whole run that the checkpoint includes."""
    state: Mapping[str, Any]
    """State that ``save_checkpoint`` received."""

    def model(self, role: str) -> Path:
        """Return the Hugging Face directory of a role."""
        return self.path / role

    def optimizer(self, role: str) -> Path:
        """Return the directory of a role's training state."""
        return self.path / f"{role}.optimizer"

    def sampled(self, step: int) -> list[Path]:
        """Return the files of rows sampled ahead for a step of the run, in the order of sampling."""
        return sorted(self.path.glob(f"{AHEAD}/step-{step:06d}-*.safetensors"))

    @property
    def collected(self) -> dict[str, Path]:
        """Files of rows that steps have collected, by name."""
        return {path.stem: path for path in sorted(self.path.glob(f"{COLLECTED}/*.safetensors"))}

    @property
    def prompts(self) -> Path:
        """File of the prompts that no step had trained, in a checkpoint of version 0.1.0."""
        return self.path / AHEAD / "prompts.safetensors"


def save_checkpoint(
    folder: Path,
    step: int,
    write: Callable[[Path], Mapping[str, Any]],
    state: Mapping[str, Any],
    keep: int,
    *,
    run: str = "",
    spare: int | None = None,
) -> Path:
    """Write a checkpoint, then remove old ones: see ``remove_old``.

    Args:
        folder: folder of all checkpoints.
        step: steps of the whole run that the checkpoint includes.
        write: writes the state of every trained role into a folder; returns bytes and SHA-256, by name, of
            the files that it has already hashed.
        state: state that the controller resumes from, as JSON.
        keep: number of checkpoints to keep.
        run: id of the run; no other run reads the checkpoint. Empty: any run may read it.
        spare: a step whose checkpoint is kept regardless of its age.

    Raises:
        RunDirectoryError: the disk is full or cannot be written; earlier checkpoints are untouched.
    """
    final, draft = folder / f"step-{step:06d}", folder / f".step-{step:06d}.draft"
    replaced = folder / f"{final.name}.replaced"
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        known = write(draft)
        (draft / "state.json").write_text(json.dumps(dict(state), indent=1))
        files = dict(known) | _digests(draft, known)
        manifest = {"format": FORMAT, "run": run, "step": step, "files": files}
        (draft / "manifest.json").write_text(json.dumps(manifest, indent=1))
        _flush_below(draft, known)
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        draft.rename(final)
        flush(folder)
    except OSError as error:
        raise write_error(final, error) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    if replaced.exists():
        with removal(folder.parent) as is_kept:
            is_needed = is_kept(step) and not _has_models_of(final, replaced)
        if not is_needed:
            _remove(replaced)
    remove_old(folder, keep, spare)
    return final


def _has_models_of(checkpoint: Path, other: Path) -> bool:
    """Return whether a checkpoint holds every model of another one, by their digests."""
    models = [path.parent.name for path in other.glob("*/*config.json")]
    return all(is_model(checkpoint / name, model_digest(other / name)) for name in models)


def remove_old(folder: Path, keep: int, spare: int | None = None) -> None:
    """Remove checkpoints; the newest stay, one step's, and those that other runs stand on (``runs.pins``).

    Args:
        folder: folder of all checkpoints.
        keep: number of newest checkpoints to keep.
        spare: a step whose checkpoint is kept regardless of its age.
    """
    old = [path for path in checkpoint_folders(folder)[keep:] if checkpoint_step(path) != spare]
    if old:
        with removal(folder.parent) as is_kept:
            for path in old:
                if not is_kept(checkpoint_step(path)):
                    _renamed(path)
    for doomed in folder.glob(".step-*.removed"):  # also those of a driver that was killed
        shutil.rmtree(doomed, ignore_errors=True)


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint; a driver that is killed meanwhile leaves a folder that the next save removes."""
    shutil.rmtree(_renamed(checkpoint), ignore_errors=True)


def _renamed(checkpoint: Path) -> Path:
    """Give a checkpoint the name of a removed one, which no reader finds, and return its path."""
    doomed = checkpoint.with_name(f".{checkpoint.name}.removed")
    with suppress(OSError):
        checkpoint.rename(doomed)
    return doomed


class Kept(Protocol):
    """A role that checkpoints hold."""

    updates: int
    """Changes of its weights in this process, such as optimiser steps."""

    def begin_saving(self, folder: Path) -> None:
        """Copy the state to save, and write it into a folder in the background."""

    def written(self, folder: Path, *, wait: bool) -> Mapping[str, Any] | None:
        """Return bytes and SHA-256 of the files of all ranks, by name; None while some are missing."""


def begin_saving(role: Kept, folder: Path) -> None:
    """Have a role write into a checkpoint's folder, on all its ranks, while it trains on."""
    role.begin_saving(folder)


def written(role: Kept, folder: Path, wait: bool) -> Mapping[str, Any] | None:
    """Return bytes and SHA-256 of a role's files; None if a rank is still writing and ``wait`` is False.

    Raises:
        RunDirectoryError: the disk is too small, with needed and free space in the message, or it fails.
    """
    return role.written(folder, wait=wait)


def updates_of(role: Kept) -> int:
    """Return how often the weights of a role have changed; they differ only if the number does."""
    return role.updates


def latest_checkpoint(folder: Path, run: str = "", before: float = math.inf) -> Checkpoint | None:
    """Return the newest checkpoint whose files all match its manifest, or None when there is none.

    Args:
        folder: folder of all checkpoints.
        run: id of the reading run; checkpoints of other runs are skipped. Empty: none are skipped.
        before: a step; only checkpoints of earlier steps are read.

    Raises:
        RunDirectoryError: there are checkpoints, and none matches its manifest.
    """
    found = [path for path in checkpoint_folders(folder) if checkpoint_step(path) < before]
    problems = []
    for path in found:
        problem = _problem(path, run)
        if problem is None:
            state = json.loads((path / "state.json").read_text())
            return Checkpoint(path=path, step=checkpoint_step(path), state=state)
        problems.append(f"{path.name}: {problem}")
        _log.warning("checkpoint %s is skipped: %s", path, problem)
    if problems:
        raise RunDirectoryError(
            f"no checkpoint in {folder} is intact: {'; '.join(problems)}",
            why="a run must not resume from training state that has changed on disk",
            fix="restore the files, or start again with --fresh",
        )
    return None


def examined(folder: Path, run: str = "") -> dict[str, str]:
    """Return the problem of each checkpoint in a folder by name, newest first; empty for a valid one.

    Args:
        folder: folder of all checkpoints.
        run: id of the run that must have written them. Empty: any run.
    """
    return {path.name: _problem(path, run) or "" for path in checkpoint_folders(folder)}


def _problem(path: Path, run: str) -> str | None:
    """Return a description of the problem of a checkpoint, or None."""
    try:
        manifest = json.loads(_inside(path, "manifest.json").read_text())
        if manifest["format"] != FORMAT:
            return f"it has format {manifest['format']}, but this version reads format {FORMAT}"
        if run and manifest.get("run", run) != run:
            return f"another run wrote it: {manifest['run']!r}, while this run is {run!r}"
        if manifest["step"] != checkpoint_step(path):
            return f"its manifest belongs to step {manifest['step']}"
        files = manifest["files"]
        if not isinstance(files, dict) or not files:
            return "its manifest lists no files"
        for name, expected in files.items():
            if digest_of(_inside(path, name)) != expected:
                return f"{name} is not what was written"
        if "state.json" not in files:
            return "its manifest lists no state.json"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _inside(folder: Path, name: str) -> Path:
    """Return a regular file below the folder; refuse any other path in a manifest."""
    path = folder / name
    if ".." in Path(name).parts or Path(name).is_absolute() or path.is_symlink() or not path.is_file():
        raise ValueError(f"{name!r} is not a regular file of the checkpoint")
    return path


def _digests(folder: Path, known: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of the files that the ranks have not hashed: the small ones."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix(): path for path in files}
    return {name: digest_of(path) for name, path in names.items() if name not in known}


def _flush_below(folder: Path, known: Collection[str]) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).as_posix() not in known:
            flush(path)
    for path in (*(p for p in folder.rglob("*") if p.is_dir()), folder):
        flush(path)
