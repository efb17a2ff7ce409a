"""Checkpoint: a model on the disk, as the plain directory everybody's ``from_pretrained`` loads.

    module, tokeniser ─> .NAME.draft ─ fsync ─ rename ─> NAME     an older NAME: aside, then away

A reader finds the old directory, or the new one whole; never a mixture.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from rillflow.models.language_model import LoadedModel
from rillflow.models.quiet import quiet
from rillflow.observe.durable import flush


def save_model(model: LoadedModel, directory: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write config, generation config, weights (safetensors) and tokeniser files.

    Args:
        model: its module may be a part of the whole one if ``weights`` are given.
        directory: where to.
        weights: by name, each tied one once; the module's own where they are not given.

    Raises:
        OSError: the directory cannot be written; what was there before still is.
    """
    draft, old = (directory.with_name(f".{directory.name}.{kind}") for kind in ("draft", "old"))
    directory.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(draft, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    draft.mkdir()
    try:
        with quiet():
            model.module.save_pretrained(draft, state_dict=None if weights is None else dict(weights))
            model.tokenizer.save(draft)
        for path in draft.rglob("*"):
            flush(path)
        flush(draft)
        if directory.exists():
            directory.rename(old)
        draft.rename(directory)
        flush(directory.parent)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
