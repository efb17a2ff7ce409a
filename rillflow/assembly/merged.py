"""Merged: models, runs and adapters into one model; what ``rillflow merge`` does.

A, B, ... ─ sources ─┬─ a model's directory ──────────────────────────────┐
                     ├─ a run: the model of its newest checkpoint ────────┼─ merge ─> OUT
                     └─ an adapter: put into its base, beside OUT ────────┘
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rillflow.assembly.trained import model_directory, write_merged
from rillflow.errors import ConfigError, ModelError, RunDirectoryError
from rillflow.merging.merge import MergeSettings, merge
from rillflow.merging.stream import require_new
from rillflow.models.locate import found_adapter
from rillflow.observe import layout

_ROLES = ("policy", "reward_model")


def merge_models(
    sources: Sequence[Path],
    out: Path,
    settings: MergeSettings,
    *,
    base: Path | None = None,
) -> Mapping[str, Any]:
    """Merge models, runs and adapters; what merge.json says.

    Args:
        sources: two or more.
        out: the directory to write; it is not there yet.
        settings: how.
        base: the model, or run, that all were trained from.

    Raises:
        ConfigError: the settings cannot be used, or ``out`` is there.
        ModelError: the models cannot be merged.
        RunDirectoryError: a run has no checkpoint, or ``out`` cannot be written.
    """
    settings.checked(len(sources), has_base=base is not None)
    require_new(out)
    with _whole([model_of(source) for source in sources], out) as parents:
        return merge(parents, out, settings, None if base is None else model_of(base))


def model_of(source: Path) -> Path:
    """The directory of a model; of a run, that of its newest policy, or of its reward model.

    Raises:
        RunDirectoryError: the run has no checkpoint, or no model of these roles.
        ModelError: there is no such directory.
    """
    if not source.is_dir():
        raise ModelError(
            f"{source} is not there" if not source.exists() else f"{source} is a file",
            why="a parent is a model's directory, or a run's",
            fix="name a directory",
        )
    if not layout.is_run_directory(source):
        return source
    for role in _ROLES[:-1]:
        try:
            return model_directory(source, role)
        except RunDirectoryError as error:
            if "no checkpoint" in error.what:
                raise
    return model_directory(source, _ROLES[-1])


@contextmanager
def _whole(folders: Sequence[Path], out: Path) -> Iterator[list[Path]]:
    """The same folders, with models in the place of adapters."""
    beside = [found_adapter(str(folder), None) for folder in folders]
    bases = {None if each is None else str(Path(each.base).absolute()) for each in beside}
    if bases == {None}:
        yield list(folders)
        return
    if len(bases) > 1:
        raise ConfigError(
            "the adapters stand beside different bases"
            if None not in bases
            else "some parents are adapters and some whole models",
            why="an adapter says what changed of its own base",
            fix="make models of the adapters with rillflow merge-adapter, and merge those if you mean it",
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.parents-") as beside_out:
        found = [Path(beside_out) / str(index) for index in range(len(folders))]
        for folder, model in zip(folders, found, strict=True):
            write_merged(folder, model, "float32")
        yield found
