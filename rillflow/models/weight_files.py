"""Weight files: which files of a model's directory hold its weights, looked at before torch is imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from rillflow.errors import ModelError
from rillflow.models.bounds import FILE_BYTES, check_file, check_files

LIBRARY_ERRORS = (OSError, ValueError, RuntimeError, ImportError, SafetensorError, StrictDataclassError)
"""What transformers raises for a directory it cannot use."""
_INDEX = "model.safetensors.index.json"


def check_weight_files(source: str) -> None:
    """Refuse a directory whose weights are a pickle, or missing, or listed in an index that is none.

    Raises:
        ModelError: the weights cannot be read; a hub name is not looked at.
    """
    directory = Path(source)
    if not directory.is_dir():
        return
    check_files(directory)
    _check_index(directory)
    if any(directory.glob("*.safetensors")):
        return
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        raise ModelError(
            f"the weights of {source} are in {pickles[0]}, a pickle",
            why="loading a pickle can execute anything; Rillflow reads safetensors",
            fix="convert them: load with transformers where you trust the file, then save_pretrained",
        )
    raise ModelError(f"the model {source} has no weights", why="there is no .safetensors file in it")


def _check_index(directory: Path) -> None:
    """An index of weights names files beside it and nothing else."""
    path = directory / _INDEX
    if not path.is_file():
        return
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise unusable(str(directory), "index of weights", error) from error
    if (
        not isinstance(index, dict)
        or not isinstance(index.get("weight_map"), dict)
        or "metadata" not in index
    ):
        raise ModelError(
            f"{path} is no index of weights",
            why="one has metadata, and a weight_map that says in which file each weight is",
            fix="name a directory as save_pretrained writes it",
        )
    for name in index["weight_map"].values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(
                f"{path} names {name!r} as a file of weights",
                why="weights are read from .safetensors files beside it, and from nowhere else",
                fix="name a directory as save_pretrained writes it",
            )


def settings_in(file: Path) -> dict[str, Any]:
    """The JSON object in a file of a model's directory.

    Raises:
        ModelError: it cannot be read, is too large, or is none.
    """
    check_file(file, FILE_BYTES.get(file.name, FILE_BYTES["model.safetensors.index.json"]))
    try:
        settings = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise unusable(str(file.parent), file.name, error) from error
    if not isinstance(settings, dict):
        raise ModelError(f"{file} is no JSON object", why="it holds settings by name")
    return settings


def unusable(source: str, part: str, error: BaseException) -> ModelError:
    """What a library says of a part of a model that it cannot use."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return ModelError(
        f"the {part} of the model {source} cannot be used",
        why=" ".join(lines[:2]) or type(error).__name__,
        fix="name a directory that AutoModelForCausalLM.from_pretrained loads",
    )
