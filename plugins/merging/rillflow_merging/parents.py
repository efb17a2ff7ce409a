"""Parents: the models to merge, opened by their headers; weights are read piece by piece.

directory ─┬─ config.json ──────── the same model? ─┐
           ├─ tokeniser ────────── the same tokens? ─┼─> a Parent each, or an error with the difference
           └─ headers of weights ─ the same shapes? ─┘        └─ read(name, first, count) ─> checked numbers

Files are read, not memory-mapped, so a merge holds only one piece of every parent.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rillflow.errors import ModelError
from rillflow.models.directory_checks import check_weight_files, settings_in, unusable
from rillflow.models.model_files import KINDS
from rillflow.models.peft_settings import SETTINGS

PIECE = 2**18
"""Number of elements read of each parent at a time."""
_TYPES = {name: dtype for dtype, name in KINDS.items()}
_SAYS_NOTHING = {
    *("_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"),
    *("architectures", "pad_token_id", "bos_token_id", "eos_token_id"),
}
"""Config settings that do not change the meaning of any weight."""
WIDTHS = {"hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"}
"""Settings in which parents may differ if they are aligned first."""
_TOKENISER = "tokenizer.json"


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The location of one weight of a model.

    Example:
        Stored(file=Path("m/model.safetensors"), dtype=torch.float32, shape=(4, 2), start=104)
    """

    file: Path
    """File of the weight."""
    dtype: torch.dtype
    """Type of its elements."""
    shape: tuple[int, ...]
    """Its shape."""
    start: int
    """Offset of its first byte in the file."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Readable(Protocol):
    """Weights that are read piece by piece: those of a parent, or aligned ones."""

    @property
    def weights(self) -> Mapping[str, Stored]:
        """Location of every weight, by name."""

    def read(self, name: str, first: int, count: int) -> Tensor:
        """Return [count] elements of a weight from ``first`` on, in row-major order."""


class Parent:
    """One model of a merge.

    Args:
        directory: a plain Hugging Face directory with safetensors.

    Raises:
        ModelError: it is not a model directory, or its weights are not numbers that can be merged.
    """

    def __init__(self, directory: Path) -> None:
        if (directory / SETTINGS).is_file():
            raise ModelError(
                f"{directory} is an adapter",
                why="its weights are changes to a base model, and a merge needs whole models",
                fix=f"run rillflow merge-adapter {directory} --out DIR, then merge DIR",
            )
        if not (directory / "config.json").is_file():
            raise ModelError(
                f"{directory} is not a model",
                why="a model is a directory with config.json and .safetensors files",
                fix="name such a directory, or a run that has a checkpoint",
            )
        check_weight_files(str(directory))
        self.directory = directory
        """Directory of the model."""
        self.config: dict[str, Any] = settings_in(directory / "config.json")
        """Content of config.json."""
        self.weights: Mapping[str, Stored] = _headers(directory)
        """Location of every weight, by its name in the files."""
        self._open: dict[Path, int] = {}

    def read(self, name: str, first: int, count: int) -> Tensor:
        """Return [count] elements of a weight from ``first`` on, in row-major order.

        Raises:
            ModelError: the file cannot be read any more, or has numbers that are not finite.
        """
        stored = self.weights[name]
        found = torch.empty(count, dtype=stored.dtype)
        if stored.file not in self._open:
            self._open[stored.file] = os.open(stored.file, os.O_RDONLY | os.O_CLOEXEC)
        rest = found.view(torch.uint8).numpy().data
        at = stored.start + first * found.element_size()
        while rest:
            done = os.preadv(self._open[stored.file], [rest], at)
            if not done:
                raise ModelError(
                    f"{stored.file} ends within {name}", why="the file was truncated while it was read"
                )
            rest, at = rest[done:], at + done
        if stored.dtype.is_floating_point and count:
            low, high = torch.aminmax(found)
            if not (low.isfinite() and high.isfinite()):
                raise self._not_finite(name)
        return found

    def whole(self, name: str) -> Tensor:
        """Return a weight in its shape."""
        stored = self.weights[name]
        return self.read(name, 0, stored.size).view(stored.shape)

    def close(self) -> None:
        """Close the files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def digest(self) -> dict[str, str]:
        """Return the SHA-256 of every file of weights, as ``sha256sum`` prints it."""
        found = {}
        for file in sorted({stored.file for stored in self.weights.values()}):
            with file.open("rb") as opened:
                found[file.name] = hashlib.file_digest(opened, "sha256").hexdigest()
        return found

    def _not_finite(self, name: str) -> ModelError:
        stored = self.weights[name]
        with safe_open(stored.file, framework="pt") as file:
            values = file.get_tensor(name)
        count = int((~values.isfinite()).sum())
        return ModelError(
            f"{name} of {self.directory} has {count:,} of {stored.size:,} numbers that are NaN or infinite",
            why="every merged model would contain them",
            fix="leave this parent out, or name an older checkpoint of it",
        )


def open_parents(directories: Sequence[Path], *, widths: bool = False) -> list[Parent]:
    """Open the parents of a merge, which must have one architecture and the same tokens.

    Args:
        directories: directories of the parents.
        widths: whether they may differ in width, because they are aligned first.

    Raises:
        ModelError: a parent cannot be read, or two cannot be merged; the message names the difference.
    """
    parents = [Parent(directory) for directory in directories]
    for other in parents[1:]:
        require_alike(parents[0], other, widths=widths)
    return parents


def require_alike(one: Parent, other: Parent, *, widths: bool = False) -> None:
    """Raise ModelError for two models that cannot be merged.

    Raises:
        ModelError: as ``open_parents``.
    """
    _require_same_ties(one, other)
    keys = (one.config.keys() | other.config.keys()) - _SAYS_NOTHING - (WIDTHS if widths else set())
    for key in ("model_type", *sorted(keys - {"tie_word_embeddings"})):
        mine, theirs = one.config.get(key), other.config.get(key)
        if mine != theirs and not (widths and _follows_widths(key)):
            raise ModelError(
                f"{key} is {mine!r} in {one.directory} and {theirs!r} in {other.directory}",
                why="weights of models with different settings have no useful average",
                fix=_shape_fix(key, widths),
            )
    alone = sorted(one.weights.keys() ^ other.weights.keys())
    if alone:
        has, lacks = (one, other) if alone[0] in one.weights else (other, one)
        raise ModelError(
            f"{has.directory} has {alone[0]}, and {lacks.directory} does not",
            why=f"{len(alone)} weights exist in only one of the two",
            fix="merge models of one architecture",
        )
    for name, stored in () if widths else one.weights.items():
        if stored.shape != other.weights[name].shape:
            raise ModelError(
                f"{name} has the shape {list(stored.shape)} in {one.directory} and "
                f"{list(other.weights[name].shape)} in {other.directory}",
                why="weights of different shapes have no average",
                fix=_shape_fix("hidden_size", widths),
            )
    _require_same_tokens(one, other)


def _shape_fix(key: str, widths: bool) -> str:
    if key in WIDTHS and not widths:
        return "merge models of one width, or align them: --method ot"
    return "merge models that were made from one config"


def _follows_widths(key: str) -> bool:
    """Return whether a setting depends on the width of a model."""
    return key in ("rope_parameters", "rope_scaling", "layer_types", "max_window_layers")


def _require_same_ties(one: Parent, other: Parent) -> None:
    tied = [bool(each.config.get("tie_word_embeddings", False)) for each in (one, other)]
    if tied[0] != tied[1]:
        first, second = (one, other) if tied[0] else (other, one)
        raise ModelError(
            f"{first.directory} ties its head to its embedding, and {second.directory} does not",
            why="one shared matrix and two separate matrices have no useful average",
            fix="merge models with the same tie_word_embeddings",
        )


def _require_same_tokens(one: Parent, other: Parent) -> None:
    files = [each.directory / _TOKENISER for each in (one, other)]
    there = [file.is_file() for file in files]
    if not any(there) or (all(there) and files[0].read_bytes() == files[1].read_bytes()):
        return
    from rillflow.models.load_tokenizer import load_tokenizer
    from rillflow.models.tokenizer import Tokenizer

    mine, theirs = (
        Tokenizer(load_tokenizer(str(each.directory), as_written=True, whole=False), stop_tokens=())
        for each in (one, other)
    )
    odd = mine.first_difference(theirs)
    if odd is not None:
        raise ModelError(
            f"{one.directory} and {other.directory} decode the token {odd} to different text",
            why="an embedding row would average the vectors of two different texts",
            fix="merge models with the same tokeniser",
        )


def _headers(directory: Path) -> dict[str, Stored]:
    """Return the location of every weight of the directory's files, in their order."""
    index, found = directory / "model.safetensors.index.json", dict[str, Stored]()
    listed = set(settings_in(index)["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    for name in sorted(listed):
        file = directory / name
        try:
            with safe_open(file, framework="np"):  # the library checks that the file is complete
                pass
            with file.open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(length))
        except (OSError, SafetensorError) as error:
            raise unusable(str(directory), f"file {name}", error) from error
        header.pop("__metadata__", None)
        for weight, told in header.items():
            if told["dtype"] not in _TYPES:
                raise ModelError(
                    f"{weight} of {directory} is of type {told['dtype']}",
                    why="merging averages floating-point weights",
                    fix="name the float model that the quantised one was made from",
                )
            found[weight] = Stored(
                file=file,
                dtype=_TYPES[told["dtype"]],
                shape=tuple(told["shape"]),
                start=8 + length + told["data_offsets"][0],
            )
    return found
