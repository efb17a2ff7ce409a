"""Merged: merge models, runs and adapters into one model; the command ``rillflow merge``.

A, B, ... ─ sources ─┬─ a model's directory ──────────────────────────────┐
                     ├─ a run: the model of its newest checkpoint ────────┼─ merge ─> OUT
                     └─ an adapter: merged into its base, next to OUT ────┘
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rillflow.app.trained import model_directory
from rillflow.errors import ConfigError, DataError, ModelError, RunDirectoryError
from rillflow.models.locate import found_adapter
from rillflow.runs import layout
from rillflow.tasks.config import TaskConfig
from rillflow.tasks.kinds import PROMPTS
from rillflow.tasks.task import open_task
from rillflow_merging.merge import MergeSettings, merge
from rillflow_merging.stream import require_new
from rillflow_parts.adapters.merged import write_merged


def merge_models(
    sources: Sequence[Path],
    out: Path,
    settings: MergeSettings,
    *,
    base: Path | None = None,
    prompts: Path | None = None,
    recipe: Path | None = None,
) -> Mapping[str, Any]:
    """Merge models, runs and adapters; return the content of merge.json.

    Args:
        sources: two or more models, runs or adapters.
        out: the directory to write; it must not exist.
        settings: the merge method and its settings.
        base: the model or run that all sources were trained from.
        prompts: for ot, a file of prompts whose activations align the models; None aligns by weights.
        recipe: for greedy, the recipe whose evaluation scores a model.

    Raises:
        ConfigError: the settings cannot be used, or ``out`` exists.
        ModelError: the models cannot be merged.
        RunDirectoryError: a run has no checkpoint, or ``out`` cannot be written.
    """
    settings.checked(len(sources), has_base=base is not None)
    _require_used("--prompts", prompts, settings.method, "ot")
    _require_used("--recipe", recipe, settings.method, "greedy")
    require_new(out)
    texts = [] if prompts is None else _texts(prompts)
    with _whole([model_of(source) for source in sources], out) as parents:
        if settings.method != "greedy":
            return merge(parents, out, settings, None if base is None else model_of(base), texts=texts)
        from rillflow_merging.soup import greedy_soup
        from rillflow_parts.answers.held_out import held_out_score

        if recipe is None or settings.weights is not None:
            raise ConfigError(
                "--method greedy needs --recipe"
                if recipe is None
                else "--method greedy does not use --weights",
                why="it selects parents by a recipe's evaluation, and averages them with equal weights",
                fix="add --recipe run.toml" if recipe is None else "leave --weights out",
            )
        return greedy_soup(parents, out, held_out_score(recipe))


def _require_used(option: str, given: Path | None, method: str, of: str) -> None:
    if given is not None and method != of:
        raise ConfigError(
            f"{option} is given with --method {method}",
            why=f"only --method {of} uses it",
            fix=f"leave it out, or use --method {of}",
        )


def _texts(prompts: Path) -> list[str]:
    """Return the prompts of a file that are texts."""
    task = open_task(TaskConfig(source=str(prompts.absolute()), held_out=0), PROMPTS, base=Path(), seed=0)
    found = [example.prompt for example in task.train if isinstance(example.prompt, str)]
    if not found:
        raise DataError(
            f"{prompts} has no text prompt",
            why="models are aligned by their activations on texts",
            fix='write one {"prompt": "..."} per line',
        )
    return found


def model_of(source: Path) -> Path:
    """Return a model's directory; for a run, its newest policy's, or else its reward model's.

    Raises:
        RunDirectoryError: the run has no checkpoint, or neither a policy nor a reward model.
        ModelError: there is no such directory.
    """
    if not source.is_dir():
        raise ModelError(
            f"{source} is not there" if not source.exists() else f"{source} is a file",
            why="a parent is a model directory or a run directory",
            fix="name a directory",
        )
    if not layout.is_run_directory(source):
        return source
    try:
        return model_directory(source, "policy")
    except RunDirectoryError as error:
        if "no checkpoint" in error.what:
            raise
    return model_directory(source, "reward_model")


@contextmanager
def _whole(folders: Sequence[Path], out: Path) -> Iterator[list[Path]]:
    """Yield the folders, with adapters replaced by models they were merged into."""
    beside = [found_adapter(str(folder), None) for folder in folders]
    bases = {None if each is None else str(Path(each.base).absolute()) for each in beside}
    if bases == {None}:
        yield list(folders)
        return
    if len(bases) > 1:
        raise ConfigError(
            "the adapters have different base models"
            if None not in bases
            else "some parents are adapters, and others are whole models",
            why="an adapter holds changes to its own base model",
            fix="merge each adapter into its base with rillflow merge-adapter, then merge the models",
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.parents-") as beside_out:
        found = [Path(beside_out) / str(index) for index in range(len(folders))]
        for folder, model in zip(folders, found, strict=True):
            write_merged(folder, model, "float32")
        yield found
