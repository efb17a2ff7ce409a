"""Sharded file: a checkpoint by weight, written by all ranks and readable under any mesh.

    NAME/rank-00000.safetensors    slices written by rank 0; every slice is written by one rank
         rank-00001.safetensors
         weights.json              file of every slice of every weight; size and SHA-256 of every file, and
                                   of this list itself

    save   each rank its file ─ fsync ─> hashes gathered ─ rank 0: weights.json     (roles.saving)
    load   ranks divide the files, check them ─> results gathered ─> each rank reads the slices it needs

No rank loads anything before every file has been checked. A file name in the list must be a plain file of the
directory, never a link or a path outside it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rillflow.errors import RillflowError, RunDirectoryError
from rillflow.models.model_files import KINDS, Digest, on_host
from rillflow.placement.slices import Slice, slices
from rillflow.runs.durable import digest_of, replace, write_error
from rillflow.sharding.digest import owned
from rillflow.sharding.layout import Layout, Weight, Weights, intervals, local_index
from rillflow.sharding.tensor import device_of, own
from rillflow.workers.collectives import Ranks

FORMAT = 1
LIST = "weights.json"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in KINDS}
_FILE = re.compile(r"rank-\d{5,}\.safetensors")
_READ = "use another checkpoint, or restore its files"
WRITE = "free disk space or repair the disk, then run the same command: it resumes"


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """A slice of a weight in a file."""

    file: str
    key: str
    slice: Slice


def load_sharded(
    folder: Path, weights: Weights, layout: Layout, tensors: Mapping[str, Tensor], ranks: Ranks
) -> None:
    """Fill tensors from a checkpoint written under any mesh; every rank calls it.

    Args:
        folder: the checkpoint.
        weights: weights of the model, with the dtypes of the tensors.
        layout: their present placements.
        tensors: this rank's tensors; they are filled in place.
        ranks: all ranks of the layout.

    Raises:
        RunDirectoryError: a file is missing, changed, no plain file, or of a newer format, or the weights are
            another model's. Then no tensor has been changed, on any rank.
    """
    found: dict[str, list[_Saved]] = {}

    def check() -> str:
        body = _body(folder)
        found.update(_read_list(body, weights))
        for place, (name, written) in enumerate(body["files"].items()):
            if place % ranks.size == ranks.rank:
                _check_file(folder, name, written, found, weights)
        return ""

    together(ranks, device_of(tensors), check, folder)
    with contextlib.ExitStack() as stack:
        names = {saved.file for slices_of in found.values() for saved in slices_of}
        files = {name: stack.enter_context(safe_open(folder / name, framework="pt")) for name in names}
        for name, weight in weights.items():
            placement = layout[name]
            if ranks.rank not in placement.mesh.ranks:
                continue
            held, target = intervals(placement, weight.shape, ranks.rank), own(tensors[name])
            for wanted in slices(placement, weight.shape)[ranks.rank]:
                for saved in found[name]:
                    box = wanted.intersection(saved.slice)
                    if not box.is_empty:
                        target[local_index(held, box)].copy_(_read(files[saved.file], saved, box))


def listed_weights(folder: Path) -> dict[str, Weight]:
    """Return the weights of a checkpoint, by name, from its list only.

    Raises:
        RunDirectoryError: its list is missing, damaged, or of a newer format.
    """
    try:
        return {
            name: Weight(name=name, shape=tuple(entry["shape"]), dtype=_DTYPES[entry["dtype"]])
            for name, entry in _body(folder)["weights"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unusable(
            f"{folder / LIST} is not a list of weights: {type(error).__name__}: {error}"
        ) from error


def own_slices(
    weights: Weights, layout: Layout, tensors: Mapping[str, Tensor], ranks: Ranks
) -> dict[str, dict[str, Tensor]]:
    """Return the file that this rank writes, if any, with host copies of its slices, by key.

    Raises:
        RunDirectoryError: a tensor has another dtype than the weight.
    """
    found = {}
    for key, (name, box) in _shares(weights, layout, ranks.size).get(ranks.rank, {}).items():
        tensor = own(tensors[name])
        if tensor.dtype != weights[name].dtype:
            raise RunDirectoryError(
                f"{name} is {tensor.dtype} here and {weights[name].dtype} in the list",
                why="a checkpoint keeps dtypes",
            )
        held = intervals(layout[name], weights[name].shape, ranks.rank)
        found[key] = on_host(tensor[local_index(held, box)])
    return {_file_of(ranks.rank): found} if found else {}


def _shares(weights: Weights, layout: Layout, size: int) -> dict[int, dict[str, tuple[str, Slice]]]:
    """Return the slices that every rank writes, by key; ranks with the same slice take turns over weights."""
    found: dict[int, dict[str, tuple[str, Slice]]] = {}
    for turn, (name, weight) in enumerate(weights.items()):
        for rank, boxes in owned(layout[name], weight.shape, tuple(range(size)), turn % size).items():
            for place, box in enumerate(boxes):
                found.setdefault(rank, {})[f"{name}:{place}"] = (name, box)
    return found


def write_list(
    folder: Path, weights: Weights, layout: Layout, size: int, files: Mapping[str, Digest]
) -> None:
    """Write the list of a checkpoint whose ``files``, by name, were written by ``size`` ranks.

    Raises:
        RunDirectoryError: the disk fails.
    """
    listed: dict[str, Any] = {
        name: {"dtype": _dtype_name(weight.dtype), "shape": list(weight.shape), "slices": []}
        for name, weight in weights.items()
    }
    for rank, share in _shares(weights, layout, size).items():
        for key, (name, box) in share.items():
            place = {"file": _file_of(rank), "key": key, "bounds": [list(bounds) for bounds in box.bounds]}
            listed[name]["slices"].append(place)
    body = {"weights": listed, "files": dict(files)}
    text = {"format": FORMAT, "sha256": _hash_of(body), "body": body}
    replace(folder / LIST, [json.dumps(text, indent=1).encode()])


def _read_list(body: Any, weights: Weights) -> dict[str, list[_Saved]]:
    """Return the slices of every weight in a checkpoint's list, checked.

    Raises:
        RunDirectoryError: it is not a list of these weights; the message gives the difference.
    """
    listed = body["weights"]
    if missing := sorted(listed.keys() ^ weights.keys()):
        side = "the checkpoint" if missing[0] in listed else "the model"
        raise _unusable(f"{missing[0]} is in {side} only")
    found: dict[str, list[_Saved]] = {}
    for name, weight in weights.items():
        was = (tuple(listed[name]["shape"]), listed[name]["dtype"])
        if was != (weight.shape, _dtype_name(weight.dtype)):
            raise _unusable(
                f"{name} is {list(was[0])} of {was[1]} in the checkpoint and {list(weight.shape)} of "
                f"{_dtype_name(weight.dtype)} in the model"
            )
        found[name] = [_saved(entry, body["files"]) for entry in listed[name]["slices"]]
        _require_whole(weight, [saved.slice for saved in found[name]])
    return found


def _body(folder: Path) -> Any:
    """Return the list's contents, after checking its format and hash."""
    try:
        text = json.loads(_plain(folder, LIST).read_bytes())
    except RecursionError as error:
        raise _unusable(f"{LIST} is nested too deeply") from error
    if text["format"] != FORMAT:
        raise _unusable(f"it has format {text['format']!r}, and this version reads format {FORMAT}")
    if _hash_of(text["body"]) != text["sha256"]:
        raise _unusable(f"{LIST} does not match its hash")
    return text["body"]


def _saved(entry: Any, files: Any) -> _Saved:
    if entry["file"] not in files:
        raise _unusable(f"{LIST} has a slice in {entry['file']!r}, which is not among its files")
    bounds = tuple((int(start), int(stop)) for start, stop in entry["bounds"])
    return _Saved(file=entry["file"], key=str(entry["key"]), slice=Slice(bounds))


def _require_whole(weight: Weight, boxes: list[Slice]) -> None:
    """Check that slices lie within a weight, do not overlap, and cover it."""
    within = Slice(tuple((0, length) for length in weight.shape))
    fits = all(len(box.bounds) == len(weight.shape) and box.intersection(within) == box for box in boxes)
    if not fits or sum(box.size for box in boxes) != prod(weight.shape):
        raise _unusable(f"the slices of {weight.name} do not cover the whole weight")
    if any(not one.intersection(other).is_empty for one, other in combinations(boxes, 2)):
        raise _unusable(f"slices of {weight.name} overlap")


def _check_file(
    folder: Path, name: str, written: Any, found: Mapping[str, list[_Saved]], weights: Weights
) -> None:
    """Check that a file has the recorded hash and the slices of the list.

    Raises:
        RunDirectoryError: it has not; it names the file.
    """
    if not _FILE.fullmatch(name):
        raise _unusable(f"{name!r} is not a name of a checkpoint file")
    path = _plain(folder, name)
    if digest_of(path) != written:
        raise _unusable(f"{name} does not match its hash")
    with safe_open(path, framework="pt") as file:
        here = [(weight, one) for weight, each in found.items() for one in each if one.file == name]
        for weight, saved in here:
            piece = file.get_slice(saved.key)
            held = (tuple(piece.get_shape()), piece.get_dtype())
            if held != (saved.slice.shape, KINDS.get(weights[weight].dtype)):
                raise _unusable(f"{name} holds {held[1]} {list(held[0])} for {weight} {saved.slice}")


def _read(file: Any, saved: _Saved, box: Slice) -> Tensor:
    """Return a box of a saved slice, reading only the box."""
    found: Tensor
    if not box.bounds:
        found = file.get_tensor(saved.key)
        return found
    pairs = zip(box.bounds, saved.slice.bounds, strict=True)
    index = tuple(slice(start - first, stop - first) for (start, stop), (first, _) in pairs)
    found = file.get_slice(saved.key)[index]
    return found


def _plain(folder: Path, name: str) -> Path:
    """Return the path of a regular file in the folder.

    Raises:
        RunDirectoryError: it is missing, a link, or no file.
    """
    path = folder / name
    if path.is_symlink() or folder.is_symlink() or (path.exists() and not path.is_file()):
        raise _unusable(f"{name} is a link, or not a regular file")
    if not path.exists():
        raise _unusable(f"{name} is missing")
    return path


def together(
    ranks: Ranks, device: torch.device, action: Callable[[], str], path: Path, fix: str = _READ
) -> list[str]:
    """Run an action on every rank; return all results, or raise the first rank's error on all ranks.

    Raises:
        RunDirectoryError: the action failed on some rank.
    """
    said, failed = "", ""
    try:
        said = action()
    except OSError as error:
        told = write_error(path, error)
        failed = f"{told.what} ({told.why})"
    except RillflowError as error:
        failed = error.what
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        failed = f"{type(error).__name__}: {error}"
    words = json.dumps([said, failed]).encode()
    everyone = ranks.gather(torch.tensor(list(words), dtype=torch.uint8, device=device))
    heard = [json.loads(bytes(each.tolist())) for each in everyone]
    for rank, (_, problem) in enumerate(heard):
        if problem:
            raise RunDirectoryError(
                f"the checkpoint {path} cannot be {'used' if fix == _READ else 'written'}: {problem}",
                why=f"rank {rank} of {ranks.size} reports this, and a checkpoint needs all ranks",
                fix=fix,
            )
    return [said for said, _ in heard]


def _unusable(problem: str) -> RunDirectoryError:
    return RunDirectoryError(problem, why="weights that differ from the written ones must not be used")


def _hash_of(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
