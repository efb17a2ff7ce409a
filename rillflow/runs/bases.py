"""Bases: the models that a run stands on, by name and digest, and the directories where they are now.

config.json, "bases" ─> Base: path, digest, run ─┬─ path has this digest ───────────────┬─> directory
                                                 ├─ the same run under another name ────┘
                                                 └─ neither ─> ModelError with the way out

digest   in a checkpoint: sizes and SHA-256 of the model's files, from the manifest; nothing else is read
         elsewhere: of the files themselves; if they are large, of blocks of them (``sampled``)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from rillflow.errors import ModelError, RunDirectoryError
from rillflow.runs import layout
from rillflow.runs.durable import digest_of
from rillflow.runs.json_lines import JSON, read_json

SETTINGS: Mapping[str, str] = {
    "policy": "policy.model.path",
    "critic": "critic.path",
    "reward": "reward.model",
    "cost": "cost.model",
    "judge": "reward.judge.model",
}
"""Settings that name models, by their key in a config's bases."""
MANIFEST = "manifest.json"
WHOLE_BYTES = 64 * 2**20
"""Bytes of a model outside checkpoints up to which its digest covers every byte."""
BLOCKS, BLOCK_BYTES = 256, 2**14
"""Number and size of the blocks that represent a larger file."""
_WHOLE, _SAMPLED = "sha256", "sampled"
_ENDINGS = (".safetensors", ".json", ".jinja", ".model", ".txt", ".tiktoken")
"""Endings of the files that a model consists of; others, such as README.md, change no result."""
_OWN = (layout.CHECKPOINTS, layout.REFERENCE, layout.BUNDLES)
"""Folders of a run directory with models that the run wrote."""
_LEVELS = 4
"""Most levels between a run directory and a model's directory in it."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """A model that a run stands on.

    Example:
        Base(path="/data/runs/sft/checkpoints/step-000010/policy", digest="sha256:0f3c...", run="77ab...")
    """

    path: str
    """Absolute path of its directory."""
    digest: str
    """Digest of its files: see ``model_digest``."""
    run: str = ""
    """Id of the run whose checkpoint it is; empty for a model outside runs, or of a run without an id."""


@dataclass(frozen=True, kw_only=True)
class CheckpointPlace:
    """Place of a model in a checkpoint."""

    run: Path
    """The run directory."""
    step: int
    """Step of the checkpoint."""
    role: str
    """Role of the model."""


def run_id(run: Path) -> str:
    """Return the id of the run in a directory; empty if there is none."""
    try:
        return str(read_json(run / layout.ENVIRONMENT).get("run", ""))
    except RunDirectoryError:
        return ""


def checkpoint_place(directory: Path) -> CheckpointPlace | None:
    """Return the run, step and role of a model in a checkpoint; None for a model outside checkpoints."""
    checkpoint = directory.parent
    is_inside = checkpoint.parent.name == layout.CHECKPOINTS and checkpoint.name.startswith("step-")
    if not is_inside or not layout.is_run_directory(checkpoint.parents[1]):
        return None
    step = layout.checkpoint_step(checkpoint)
    return CheckpointPlace(run=checkpoint.parents[1], step=step, role=directory.name)


def base_at(directory: Path, like: str = "") -> Base:
    """Return the record of a model's directory; ``like`` is a digest whose kind is used.

    Raises:
        ModelError: a file cannot be read.
    """
    place = checkpoint_place(directory.resolve())
    digest = model_digest(directory, like)
    return Base(path=str(directory.resolve()), digest=digest, run=run_id(place.run) if place else "")


def bases_of(run: Path) -> Mapping[str, Sequence[Base]]:
    """Return the models that a run stands on, by key of ``SETTINGS``; a model's own base follows it."""
    try:
        config: Any = read_json(run / layout.CONFIG)
    except RunDirectoryError:
        return {}
    return bases_in(config)


def bases_in(config: Mapping[str, JSON]) -> Mapping[str, Sequence[Base]]:
    """Return the bases in a run's config; see ``bases_of``."""
    kept: Any = config.get(layout.BASES) or {}
    return {name: tuple(Base(**each) for each in chain) for name, chain in kept.items()}


def as_json(bases: Mapping[str, Sequence[Base]]) -> dict[str, JSON]:
    """Return bases as they are in a config."""
    return {name: [asdict(each) for each in chain] for name, chain in bases.items()}


def recorded_base(directory: Path, named: Path) -> Path | None:
    """Return where the base of an adapter in a run directory is now; None if no run has recorded it.

    Args:
        directory: the adapter's directory.
        named: the base that the adapter's own settings name.

    Raises:
        ModelError: it is gone, or another model is in its place.
    """
    run = next((each for each in directory.parents[:_LEVELS] if layout.is_run_directory(each)), None)
    if run is None or directory.relative_to(run).parts[0] not in _OWN:
        return None
    bases = bases_of(run)
    key = "critic" if directory.name.endswith("critic") and "critic" in bases else "policy"
    if not bases.get(key):
        return None
    base = bases[key][-1]
    return named.resolve() if is_model(named, base.digest) else place_of(base, run, key)


def place_of(base: Base, child: Path, key: str) -> Path:
    """Return where a base is now: at its path, or in the same run under another name next to it.

    Args:
        base: the model.
        child: the run that stands on it.
        key: its key in the run's bases.

    Raises:
        ModelError: it is gone, or another model is in its place; the message names the way out.
    """
    recorded = Path(base.path)
    if is_model(recorded, base.digest):
        return recorded
    for directory in _renamed(base, child):
        if is_model(directory, base.digest):
            return directory
    setting = SETTINGS.get(key, key)
    way_out = (
        f"put it back (a link at this path is enough), or name its new place: the command of {child} with "
        f"--set {setting}=PLACE accepts a model with the same digest, and records its place"
    )
    if recorded.is_dir():
        raise ModelError(
            f"{child} stands on {recorded}, and its files have changed",
            why=f"{_changed(recorded, child)}their digest is {model_digest(recorded, base.digest)}; "
            f"{setting} had {base.digest}",
            fix=way_out,
        )
    raise ModelError(
        f"{child} stands on {recorded}, which is not there",
        why=f"{setting} named it, and it was removed, moved or renamed; its digest is {base.digest}",
        fix=way_out,
    )


def _changed(directory: Path, child: Path) -> str:
    """Return words for the files of a model that were written after a run began; empty without any."""
    try:
        starts: Any = read_json(child / layout.ENVIRONMENT)["starts"]
        begun = datetime.fromisoformat(starts[0]["started"])
        later = sorted(
            each.name
            for each in directory.iterdir()
            if _is_part(each.name) and each.stat().st_mtime > begun.timestamp() + 1
        )
    except (RunDirectoryError, OSError, ValueError, LookupError, TypeError):
        return ""
    return f"{', '.join(later)} changed after the run began; " if later else ""


def is_model(directory: Path, digest: str) -> bool:
    """Return whether a directory holds the model with a digest."""
    try:
        return directory.is_dir() and model_digest(directory, digest) == digest
    except ModelError:
        return False


def with_digest(run: Path, digest: str) -> Path | None:
    """Return the model of a run's checkpoints that has a digest, the newest of several; None without one."""
    for checkpoint in layout.checkpoint_folders(run / layout.CHECKPOINTS):
        for settings in sorted(checkpoint.glob("*/*config.json")):
            if is_model(settings.parent, digest):
                return settings.parent
    return None


def _renamed(base: Base, child: Path) -> Iterator[Path]:
    """Yield the same checkpoint in run directories with the base's run id, beside the base and the child.

    A checkpoint that the run wrote again, with other weights, has the ending ``.replaced``.
    """
    place = Path(base.path)
    if not base.run or len(place.parts) < 5:
        return
    checkpoint = place.parent.name.removesuffix(layout.REPLACED)
    for folder in (place.parents[3], child.absolute().parent):
        for run in sorted(folder.iterdir()) if folder.is_dir() else ():
            if run.is_dir() and layout.is_run_directory(run) and run_id(run) == base.run:
                for name in (checkpoint, checkpoint + layout.REPLACED):
                    yield run / layout.CHECKPOINTS / name / place.name


def model_digest(directory: Path, like: str = "", *, is_deep: bool = False) -> str:
    """Return the digest of a model's directory: ``sha256:`` or ``sampled:``, and 32 hexadecimal digits.

    Args:
        directory: the directory.
        like: a digest whose kind is used; empty: the kind follows from the place and the size.
        is_deep: whether to read the files of a checkpoint instead of its manifest.

    Raises:
        ModelError: a file cannot be read.
    """
    try:
        kind = like.partition(":")[0]
        listed = None if is_deep else _in_manifest(directory)
        if listed is not None and kind != _SAMPLED:
            return f"{_WHOLE}:{_digest(listed)}"
        files = {path.name: path for path in sorted(directory.iterdir()) if _is_part(path.name)}
        stats = {name: path.stat() for name, path in files.items() if path.is_file()}
        kind = kind or (_WHOLE if sum(each.st_size for each in stats.values()) <= WHOLE_BYTES else _SAMPLED)
        of_file = _of_whole if kind == _WHOLE else _of_blocks
        found = {
            name: (each.st_size, of_file(files[name], each.st_size, each.st_mtime_ns, each.st_ino))
            for name, each in stats.items()
        }
    except OSError as error:
        raise ModelError(f"the model {directory} cannot be read", why=str(error)) from error
    return f"{kind}:{_digest(found)}"


def _in_manifest(directory: Path) -> dict[str, tuple[int, str]] | None:
    """Return size and SHA-256 of a model's files by name, from its checkpoint; None outside checkpoints.

    A file that is missing or has another size is listed with its present size, so the digest differs.
    """
    try:
        manifest = json.loads((directory.parent / MANIFEST).read_bytes())
        prefix, listed = f"{directory.name}/", dict[str, tuple[int, str]]()
        for name, entry in manifest["files"].items():
            short = name.removeprefix(prefix)
            if name.startswith(prefix) and "/" not in short and _is_part(short):
                file = directory / short
                listed[short] = (file.stat().st_size if file.is_file() else -1, str(entry["sha256"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return listed or None


def _is_part(name: str) -> bool:
    return name.endswith(_ENDINGS) and not name.startswith(".")


def _digest(files: Mapping[str, tuple[int, str]]) -> str:
    listed = json.dumps([[name, *entry] for name, entry in sorted(files.items())])
    return hashlib.sha256(listed.encode()).hexdigest()[:32]


@lru_cache(maxsize=256)
def _of_whole(file: Path, size: int, changed_ns: int, inode: int) -> str:
    """Return a file's SHA-256; the further arguments tell a changed file from a known one."""
    del size, changed_ns, inode
    return str(digest_of(file)["sha256"])


@lru_cache(maxsize=256)
def _of_blocks(file: Path, size: int, changed_ns: int, inode: int) -> str:
    """Return a digest of the first, the last and evenly spaced blocks of a file."""
    del changed_ns, inode
    if size <= BLOCKS * BLOCK_BYTES:
        return str(digest_of(file)["sha256"])
    found = hashlib.sha256()
    with file.open("rb") as opened:
        for number in range(BLOCKS):
            opened.seek((size - BLOCK_BYTES) * number // (BLOCKS - 1))
            found.update(opened.read(BLOCK_BYTES))
    return found.hexdigest()
