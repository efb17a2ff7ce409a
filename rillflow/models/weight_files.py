"""Weight files: find and check a directory's weight files before torch is imported.

directory ─┬─ index ───────── names files next to it, none missing
           └─ *.safetensors ─ headers: dtype and shape of every weight, by name
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open

from rillflow.errors import ModelError
from rillflow.models.bounds import FILE_BYTES, check_file, check_files

LIBRARY_ERRORS = (OSError, ValueError, RuntimeError, ImportError, SafetensorError, StrictDataclassError)
"""Exceptions of transformers for a directory it cannot use."""
_INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights that can be trained."""
_MOST_DIMS = 16
"""Maximum dims of a weight."""
_NAMED = 3
"""Maximum missing files that an error lists."""


@dataclass(frozen=True, kw_only=True)
class WeightHeader:
    """Description of a weight in its file's header."""

    file: Path
    """The file."""
    dtype: str
    """Dtype by safetensors' name, such as F32, BF16 or I32."""
    shape: tuple[int, ...]
    """Shape of the weight."""


def check_weight_files(source: str) -> None:
    """Refuse a directory with pickled weights, missing weights or an invalid index.

    Raises:
        ModelError: the weights cannot be read; hub names are not checked.
    """
    directory = Path(source)
    if not directory.is_dir():
        return
    check_files(directory)
    _check_index(directory)
    if any(directory.glob("*.safetensors")):
        _require_floats(weight_headers(directory))
        return
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        raise ModelError(
            f"the weights of {source} are in {pickles[0]}, a pickle",
            why="loading a pickle can execute anything; Rillflow reads safetensors",
            fix="if you trust the file, load it with transformers and write it with save_pretrained",
        )
    raise ModelError(f"the model {source} has no weights", why="it has no .safetensors file")


def weight_headers(directory: Path) -> dict[str, WeightHeader]:
    """Read the headers of a directory's weights, by name; no weight is read.

    Raises:
        ModelError: a file cannot be read, is damaged, or is no regular file.
    """
    found: dict[str, WeightHeader] = {}
    for file in sorted(directory.glob("*.safetensors")):
        if not file.is_file():
            raise ModelError(f"{file} is not a regular file", why="weight files must be regular files")
        try:
            with safe_open(file, framework="np") as weights:
                for name in weights.keys():  # noqa: SIM118
                    part = weights.get_slice(name)
                    found[name] = WeightHeader(
                        file=file, dtype=part.get_dtype(), shape=tuple(part.get_shape())
                    )
        except (OSError, SafetensorError, MemoryError) as error:
            raise unusable(str(directory), f"file {file.name}", error) from error
    for name, header in found.items():
        if len(header.shape) > _MOST_DIMS:
            raise ModelError(
                f"the weight {name[:60]!r} in {header.file} has {len(header.shape):,} dims",
                why=f"a weight of a model has at most {_MOST_DIMS}",
                fix="fetch the file again: it is not a model's",
            )
    return found


def _require_floats(headers: dict[str, WeightHeader]) -> None:
    """Refuse weights of integers or 8 bits; other tensors, such as masks, may have any dtype."""
    for name, header in headers.items():
        if name.endswith(".weight") and header.dtype not in _FLOATS:
            raise ModelError(
                f"the weight {name!r} in {header.file} has the type {header.dtype}",
                why=f"a trained weight has one of the types {', '.join(_FLOATS)}; {header.dtype} would be "
                "read without its scale",
                fix="name the float32 or bfloat16 model that it was made from",
            )


def _check_index(directory: Path) -> None:
    """Check that an index of weights lists only files next to it, and that all of them exist."""
    path = directory / _INDEX
    if not path.is_file():
        return
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise unusable(str(directory), "weight index", error) from error
    if (
        not isinstance(index, dict)
        or not isinstance(index.get("weight_map"), dict)
        or "metadata" not in index
    ):
        raise ModelError(
            f"{path} is not a weight index",
            why="an index has metadata, and a weight_map from each weight to its file",
            fix="name a directory as save_pretrained writes it",
        )
    for name in index["weight_map"].values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(
                f"{path} names {name!r} as a weight file",
                why="weights are read only from .safetensors files in the same directory",
                fix="name a directory as save_pretrained writes it",
            )
    named = sorted(set(index["weight_map"].values()))
    missing = [name for name in named if not (directory / name).exists()]
    if missing:
        rest = f" and {len(missing) - _NAMED:,} more" if len(missing) > _NAMED else ""
        raise ModelError(
            f"the model {directory} lacks {', '.join(missing[:_NAMED])}{rest}",
            why=f"{path.name} lists {len(named):,} weight files, and {len(missing):,} are missing",
            fix="fetch the missing files again",
        )


def settings_in(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model's directory.

    Raises:
        ModelError: it cannot be read, is too large, or is not an object.
    """
    check_file(file, FILE_BYTES.get(file.name, FILE_BYTES["model.safetensors.index.json"]))
    try:
        settings = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise unusable(str(file.parent), file.name, error) from error
    if not isinstance(settings, dict):
        raise ModelError(f"{file} is not a JSON object", why="it holds settings by name")
    return settings


def refuse_quantised(source: str, settings: Mapping[str, Any]) -> None:
    """Refuse a model whose config declares quantised weights.

    Raises:
        ModelError: it names the directory or hub name.
    """
    if "quantization_config" in settings:
        raise ModelError(
            f"the model {source} is quantised",
            why="its weights are integers, which cannot be trained",
            fix="name the float or bfloat16 model it was made from",
        )


def unusable(source: str, part: str, error: BaseException) -> ModelError:
    """Return the error for a part of a model that a library cannot use, with the library's message."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return ModelError(
        f"the {part} of the model {source} cannot be used",
        why=" ".join(lines[:2]) or type(error).__name__,
        fix="name a directory that AutoModelForCausalLM.from_pretrained loads",
    )
