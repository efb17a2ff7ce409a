"""Merged: write a plain model from an adapter and its base."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rillflow.app.trained import model_directory
from rillflow.errors import ModelError, RunDirectoryError
from rillflow.models.adapters import merge, restore
from rillflow.models.config import ModelConfig
from rillflow.models.language_model import choose_device, load_model, save_model
from rillflow.runs import layout
from rillflow.runs.durable import write_error


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
