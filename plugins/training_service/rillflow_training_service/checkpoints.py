"""Checkpoints: adapters in directories that PEFT and ``rillflow`` read, by the client's paths.

    tinker://MODEL/weights/NAME          ROOT/MODEL/weights/NAME/          with the optimiser's state
    tinker://MODEL/sampler_weights/NAME  ROOT/MODEL/sampler_weights/NAME/  without it

Each has ``checkpoint.json`` with what the API tells about it. A directory is written next to its place and
renamed, so a reader finds a whole one or none.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, unquote

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rillflow.errors import DataError, RunDirectoryError
from rillflow.models.adapters import file_name, write_adapter_settings
from rillflow.models.peft_settings import WEIGHTS, AdapterSource
from rillflow.runs.durable import flush, publish_folder
from rillflow_training_service.shared_base import Shape, SharedBase

Kind = Literal["weights", "sampler_weights"]
KINDS: Mapping[str, str] = {"weights": "training", "sampler_weights": "sampler"}
"""The client's names of the kinds."""
ABOUT, MOMENTS_FILE = "checkpoint.json", "optimizer.safetensors"
MOST_ABOUT_BYTES = 2**20
"""Largest ``checkpoint.json``: 256 facts of a client, each of at most 1,000 characters."""
DAMAGED = "damaged"
"""Key of the metadata of a listed checkpoint that cannot be read, with the reason."""
_SCHEME = "tinker://"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, kw_only=True)
class CheckpointPath:
    """A ``tinker://`` path."""

    model: str
    """The model's id."""
    kind: Kind
    """Kind of the checkpoint."""
    name: str
    """Name of the checkpoint."""

    @staticmethod
    def parsed(text: str) -> CheckpointPath:
        """Return a path.

        Raises:
            DataError: the text is not one.
        """
        parts = text.removeprefix(_SCHEME).split("/")
        known = text.startswith(_SCHEME) and len(parts) == 3 and parts[1] in KINDS
        if not known or not _NAME.fullmatch(parts[2]) or not parts[0].strip("."):
            raise DataError(
                f"{text[:120]!r} is not a checkpoint",
                why=f"a checkpoint is {_SCHEME}MODEL/weights/NAME or {_SCHEME}MODEL/sampler_weights/NAME",
                fix="use the path that save_state or save_weights_for_sampler returned",
            )
        kind: Kind = "weights" if parts[1] == "weights" else "sampler_weights"
        return CheckpointPath(model=parts[0], kind=kind, name=parts[2])

    def __str__(self) -> str:
        return f"{_SCHEME}{self.model}/{self.kind}/{self.name}"


@dataclass(frozen=True, kw_only=True)
class About:
    """Facts about a checkpoint."""

    path: str
    """``tinker://`` path of the checkpoint."""
    base_model: str
    """Name of the base model in the client's spelling."""
    shape: Shape
    """Shape of the adapter."""
    seed: int
    """Seed of the adapter."""
    time: str
    """When it was saved, in ISO 8601."""
    expires_at: str | None = None
    """When it may be deleted."""
    user_metadata: dict[str, str] = field(default_factory=dict)
    """Facts that the client added."""

    @property
    def is_expired(self) -> bool:
        """Whether its time to live has passed, so that it may be deleted."""
        return self.expires_at is not None and datetime.fromisoformat(self.expires_at) < datetime.now(UTC)


_ABOUT = TypeAdapter(About)


@dataclass(frozen=True, kw_only=True, eq=False)
class Loaded:
    """A checkpoint's content."""

    about: About
    """Facts about the checkpoint."""
    weights: dict[str, Tensor]
    """The adapter's weights, by name in the module."""
    state: dict[str, Tensor] | None
    """The optimiser's state; None if it has none."""


class Checkpoints:
    """The checkpoints in a directory.

    Args:
        root: the directory; made when something is saved.
        base: the base model.
        source: path of the base model, which an adapter's settings name.
    """

    def __init__(self, root: Path, base: SharedBase, source: str) -> None:
        self.root, self._base, self._source = root, base, source

    def folder(self, path: CheckpointPath) -> Path:
        """Return the directory of a checkpoint."""
        return self.root / quote(path.model, safe="") / path.kind / path.name

    def save(
        self,
        path: CheckpointPath,
        about: About,
        weights: Mapping[str, Tensor],
        state: Mapping[str, Tensor] | None,
        *,
        overwrite: bool = False,
    ) -> None:
        """Write a checkpoint; the base must have the adapter's shape entered.

        Raises:
            DataError: its name is invalid or taken.
            RunDirectoryError: the disk fails.
        """
        folder = self.folder(path)
        if not _NAME.fullmatch(path.name):
            raise DataError(
                f"the checkpoint's name is {path.name[:80]!r}",
                why="a name has letters, digits, '.', '_' and '-', and at most 128 of them",
            )
        if folder.exists() and not overwrite:
            raise DataError(
                f"there is a checkpoint {path}",
                why="a checkpoint is not overwritten unless that is asked for",
                fix="choose another name, or overwrite=True",
            )
        draft = folder.with_name(f".{folder.name}.draft")
        try:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            self._write(draft, about, weights, state)
            for each in draft.rglob("*"):
                flush(each)
            publish_folder(draft, folder)
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise RunDirectoryError(f"the checkpoint {path} cannot be written", why=str(error)) from error

    def _write(
        self, draft: Path, about: About, weights: Mapping[str, Tensor], state: Mapping[str, Tensor] | None
    ) -> None:
        config = self._base.config(about.shape)
        host = {file_name(name): each.detach().cpu().contiguous() for name, each in weights.items()}
        save_file(host, draft / WEIGHTS, metadata={"format": "pt"})
        write_adapter_settings(AdapterSource(base=self._source, config=config), self._base.module, draft)
        self._base.model.tokenizer.save(draft)
        if state is not None:
            kept = {name: each.detach().cpu().contiguous() for name, each in state.items()}
            save_file(kept, draft / MOMENTS_FILE)
        (draft / ABOUT).write_text(json.dumps(asdict(about), indent=2) + "\n")

    def load(self, path: CheckpointPath, *, optimizer: bool) -> Loaded:
        """Read a checkpoint.

        Raises:
            DataError: there is none, it cannot be read, or it has no state of an optimiser.
        """
        folder, about = self.folder(path), self.about(path)
        try:
            stored = load_file(folder / WEIGHTS)
            state = load_file(folder / MOMENTS_FILE) if optimizer else None
        except FileNotFoundError as error:
            raise DataError(
                f"the checkpoint {path} has no {Path(str(error.filename)).name}",
                why="only checkpoints of save_state have the optimiser's state",
                fix="load it without the optimiser, or name a checkpoint of save_state",
            ) from None
        except (OSError, SafetensorError) as error:
            raise DataError(f"the checkpoint {path} cannot be read", why=str(error)) from error
        sizes = self._base.names(about.shape)
        known = {file_name(name): name for name in sizes}
        for name in sorted({*known} ^ {*stored}):
            raise DataError(
                f"the checkpoint {path} {'lacks' if name in known else 'has'} {name}",
                why=f"it is an adapter of {about.base_model}, and the served model has other layers",
                fix="serve the base model that it was trained on",
            )
        for name, each in stored.items():
            if each.shape != sizes[known[name]]:
                raise DataError(
                    f"{name} of the checkpoint {path} has the shape {list(each.shape)}",
                    why=f"for the served model it is {list(sizes[known[name]])}",
                    fix=f"serve the base model that it was trained on, {about.base_model}",
                )
        if not all(bool(torch.isfinite(each).all()) for each in stored.values()):
            raise DataError(
                f"the checkpoint {path} has a weight that is not finite", why="its file is damaged"
            )
        return Loaded(about=about, weights={known[name]: each for name, each in stored.items()}, state=state)

    def about(self, path: CheckpointPath) -> About:
        """Return the facts about a checkpoint.

        Raises:
            DataError: there is no such checkpoint, or its file cannot be read.
        """
        file = self.folder(path) / ABOUT
        try:
            if file.exists() and not (file.is_file() and file.stat().st_size <= MOST_ABOUT_BYTES):
                raise ValueError(f"{ABOUT} is not a file of at most {MOST_ABOUT_BYTES:,} bytes")
            about = _ABOUT.validate_json(file.read_bytes(), strict=True)
            for time in filter(None, (about.time, about.expires_at)):
                if datetime.fromisoformat(time).tzinfo is None:
                    raise ValueError(f"{time!r} is a time without a zone")
            return about
        except FileNotFoundError:
            raise DataError(
                f"there is no checkpoint {path}",
                why=f"{self.root} has {', '.join(map(str, self.paths()[:4])) or 'no checkpoint'}",
                fix="use the path that save_state returned, and the same --checkpoints directory",
            ) from None
        except (OSError, ValueError) as error:
            why = " ".join(str(error).split())[:300]
            fix = "restore the file, or delete the checkpoint"
            raise DataError(f"the checkpoint {path} cannot be read", why=why, fix=fix) from error

    def newest(self, paths: list[CheckpointPath]) -> About | None:
        """Return the facts about the newest readable checkpoint of some, the oldest first; None without."""
        for path in reversed(paths):
            with suppress(DataError):
                return self.about(path)
        return None

    def paths(self, model: str | None = None) -> list[CheckpointPath]:
        """Return the checkpoints of a model, or all, the oldest first."""
        pattern = f"{'*' if model is None else quote(model, safe='')}/*/*/{ABOUT}"
        found = sorted(self.root.glob(pattern), key=_changed_s)
        there = [each for each in found if each.parts[-3] in KINDS and _NAME.fullmatch(each.parts[-2])]
        return [
            CheckpointPath(
                model=unquote(each.parts[-4]),
                kind="weights" if each.parts[-3] == "weights" else "sampler_weights",
                name=each.parts[-2],
            )
            for each in there
        ]

    def told(self, path: CheckpointPath) -> dict[str, Any]:
        """Return a checkpoint as the API tells it; a damaged one has the reason in its metadata."""
        folder = self.folder(path)
        try:
            about = self.about(path)
            time, more, expires_at = about.time, about.user_metadata, about.expires_at
        except DataError as error:
            time, expires_at = datetime.fromtimestamp(_changed_s(folder / ABOUT), UTC).isoformat(), None
            more = {DAMAGED: f"{error.what}: {error.why}"}
        return {
            "checkpoint_id": f"{path.kind}/{path.name}",
            "checkpoint_type": KINDS[path.kind],
            "time": time,
            "tinker_path": str(path),
            "size_bytes": sum(map(_size_of, folder.glob("*"))),
            "public": False,
            "user_metadata": more or None,
            "expires_at": expires_at,
        }

    def delete(self, path: CheckpointPath) -> None:
        """Delete a checkpoint.

        Raises:
            DataError: there is none.
        """
        if not self.folder(path).is_dir():
            self.about(path)  # names the checkpoints that are there
        shutil.rmtree(self.folder(path), ignore_errors=True)

    def delete_expired(self) -> None:
        """Delete the checkpoints whose time is over; one that cannot be read stays."""
        for path in self.paths():
            with suppress(DataError):
                if self.about(path).is_expired:
                    self.delete(path)

    def expire(self, path: CheckpointPath, ttl_s: int | None) -> None:
        """Change when a checkpoint may be deleted.

        Raises:
            DataError: there is none.
        """
        said = {**asdict(self.about(path)), "expires_at": expiry(ttl_s)}
        (self.folder(path) / ABOUT).write_text(json.dumps(said, indent=2) + "\n")


def _changed_s(file: Path) -> float:
    """Return when a file was changed; 0 if it is gone, because another request deletes it."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def now() -> str:
    """Return the time in ISO 8601."""
    return datetime.now(UTC).isoformat()


def expiry(ttl_s: int | None) -> str | None:
    """Return the time after some seconds; None for never."""
    return None if ttl_s is None else (datetime.now(UTC) + timedelta(seconds=ttl_s)).isoformat()
