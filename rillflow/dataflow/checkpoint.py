"""Checkpoints: everything a resumed run needs, complete or not there at all.

    checkpoints/step-000040/
      policy/                      plain Hugging Face directory; one for every role that is trained
      policy.optimizer/            training state by logical tensor, a file a rank (weights.sharded_file)
      state.json                   step, phase, versions, places in the data
      ahead/                       rows that later steps had sampled already, with older weights
      collected/                   rows that steps have collected
      manifest.json         the run, size and SHA-256 of every other file, written last
    checkpoints/step-000040.replaced/   the one before it of the same step, while the two change places

Ranks write and hash what is large (roles.saving), beside the training that goes on; the controller reads none
of it. Written beside its final place, flushed to the disk and renamed once the manifest is there; a reader
takes the newest one of its own run whose manifest holds, and says which ones did not. At no moment is there
one less than before.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rillflow.errors import RunDirectoryError
from rillflow.observe.durable import digest_of, flush, write_error

FORMAT = 2
AHEAD = "ahead"
"""The folder of rows that were sampled ahead, or of prompts that were drawn."""
PROMPTS = "prompts.safetensors"
COLLECTED = "collected"
"""The folder of rows that steps have collected, a file a name."""
_NAME = re.compile(r"step-(\d{6,})(\.replaced)?")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was verified."""

    path: Path
    """Its directory."""
    step: int
    """Steps of the whole run that are in it."""
    state: Mapping[str, Any]
    """What ``save_checkpoint`` was given as state."""

    def model(self, role: str) -> Path:
        """The Hugging Face directory of a role."""
        return self.path / role

    def optimizer(self, role: str) -> Path:
        """The directory of a role's training state."""
        return self.path / f"{role}.optimizer"

    def sampled(self, step: int) -> list[Path]:
        """The files of rows that were sampled ahead for a step of the run, in the order they were made in."""
        return sorted(self.path.glob(f"{AHEAD}/step-{step:06d}-*.safetensors"))

    @property
    def collected(self) -> dict[str, Path]:
        """The files of rows that steps have collected, by name."""
        return {path.stem: path for path in sorted(self.path.glob(f"{COLLECTED}/*.safetensors"))}

    @property
    def prompts(self) -> Path:
        """The file of the prompts that were drawn and that no step was made of, if there were any."""
        return self.path / AHEAD / PROMPTS


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
    """Write a checkpoint, then remove all but the newest ``keep`` and the one of step ``spare``.

    Args:
        folder: of all checkpoints.
        step: steps of the whole run that are in it.
        write: puts what every trained role goes on from into a folder; of files whose bytes and SHA-256 are
            known already it returns these, by name.
        state: what the controller goes on from, as JSON.
        keep: checkpoints that stay.
        run: the id of the run it belongs to; no other run reads it. Empty: any does.
        spare: a step whose checkpoint stays however old it is.

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
    shutil.rmtree(replaced, ignore_errors=True)
    for old in _found(folder)[keep:]:
        if _step(old) != spare:
            shutil.rmtree(old, ignore_errors=True)
    return final


def kept_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, in order; whether they hold is not looked at."""
    return sorted({_step(path) for path in _found(folder)})


class Kept(Protocol):
    """A role that checkpoints hold."""

    def begin_saving(self, folder: Path) -> None:
        """Copy what it goes on from, and write it into a folder meanwhile."""

    def written(self, folder: Path, *, wait: bool) -> Mapping[str, Any] | None:
        """Bytes and SHA-256 of the files of all its ranks, by name; None while some are missing."""


class Saved(Kept, Protocol):
    """A role that is trained."""

    updates: int
    """Optimiser steps made in this phase."""


def begin_saving(role: Kept, folder: Path) -> None:
    """Have a role write into a checkpoint's folder, on all its ranks, while it trains on."""
    role.begin_saving(folder)


def written(role: Kept, folder: Path, wait: bool) -> Mapping[str, Any] | None:
    """What ``begin_saving`` had written there, on all ranks; None while, without ``wait``, one still writes.

    Raises:
        RunDirectoryError: it does not fit, or the disk fails; it says what is needed and what is free.
    """
    return role.written(folder, wait=wait)


def updates_of(role: Saved) -> int:
    """The optimiser steps that a role has made in this phase; its weights change with them alone."""
    return role.updates


def latest_checkpoint(folder: Path, run: str = "") -> Checkpoint | None:
    """The newest checkpoint whose every file is as its manifest says, or None when there is none.

    Args:
        folder: of all checkpoints.
        run: the id of the run that asks; checkpoints that another one wrote are left out. Empty: none are.

    Raises:
        RunDirectoryError: there are checkpoints, and none of them holds.
    """
    found = _found(folder)
    problems = []
    for path in found:
        problem = _problem(path, run)
        if problem is None:
            state = json.loads((path / "state.json").read_text())
            return Checkpoint(path=path, step=_step(path), state=state)
        problems.append(f"{path.name}: {problem}")
        _log.warning("checkpoint %s is left out: %s", path, problem)
    if problems:
        raise RunDirectoryError(
            f"no checkpoint in {folder} is whole: {'; '.join(problems)}",
            why="training state that differs from what was written must not be trained on",
            fix="restore the files, or start again with --fresh",
        )
    return None


def examined(folder: Path, run: str = "") -> dict[str, str]:
    """The checkpoints of a folder by name, newest first, each with what is wrong with it; empty: nothing.

    Args:
        folder: of all checkpoints.
        run: the id of the run that they are to be of. Empty: any.
    """
    return {path.name: _problem(path, run) or "" for path in _found(folder)}


def _found(folder: Path) -> list[Path]:
    """Checkpoint directories, newest first."""
    named = (path for path in folder.glob("step-*") if _NAME.fullmatch(path.name))
    return sorted(named, key=lambda path: (_step(path), not path.suffix), reverse=True)


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _problem(path: Path, run: str) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        manifest = json.loads(_inside(path, "manifest.json").read_text())
        if manifest["format"] != FORMAT:
            return f"it has format {manifest['format']}, and this version reads format {FORMAT}"
        if run and manifest.get("run", run) != run:
            return f"another run wrote it: {manifest['run']!r}, and this is {run!r}"
        if manifest["step"] != _step(path):
            return f"its manifest is that of step {manifest['step']}"
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
    """A regular file below the folder; anything else in a manifest is refused."""
    path = folder / name
    if ".." in Path(name).parts or Path(name).is_absolute() or path.is_symlink() or not path.is_file():
        raise ValueError(f"{name!r} is not a plain file of the checkpoint")
    return path


def _digests(folder: Path, known: Collection[str]) -> dict[str, dict[str, Any]]:
    """Of files that nobody has hashed: the small ones."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix(): path for path in files}
    return {name: digest_of(path) for name, path in names.items() if name not in known}


def _flush_below(folder: Path, known: Collection[str]) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).as_posix() not in known:
            flush(path)
    for path in (*(p for p in folder.rglob("*") if p.is_dir()), folder):
        flush(path)
