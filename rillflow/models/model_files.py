"""Model files: the parts of a Hugging Face directory, which several ranks write while training continues.

    config, generation config, tokeniser      small files, on one rank
    weights ─ shards ─> the names of a file ─> model.safetensors, or model-00001-of-00003.safetensors
                                               and an index with the file of every weight

All weights of a layer are in one shard, because a weight in a file may combine several of the module's.

    header {name: dtype, shape, offsets} ─┬─> file, flushed at the end: the bytes that safetensors writes
    tensors on the host, 16 MiB at a time ┴─> SHA-256

The library holds Python's lock while it writes, which stops all other threads; and its files would have to
be read again for hashing.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from rillflow.runs.durable import write_flushed

SHARD_BYTES = 2**31
"""Maximum bytes of a weight file, unless a single layer is larger."""
METADATA = {"format": "pt"}
"""Metadata of every weight file."""
_LAYER = re.compile(r".*?\.\d+\.")


def own_weights(module: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights of a whole module that belong in files, without copies, each tied weight once."""
    weights = module.state_dict()
    for ignored in module._keys_to_ignore_on_save or ():
        weights.pop(ignored, None)
    found: dict[str, Tensor] = remove_tied_weights_from_state_dict(weights, module)
    return found


def shards(num_bytes: Mapping[str, int], most: int | None = None) -> list[list[str]]:
    """Return the names of each file's weights, in the given order.

    Args:
        num_bytes: size of each weight.
        most: largest size of a file, unless a layer is larger; None for SHARD_BYTES.
    """
    found: list[list[str]] = []
    held = most = most or SHARD_BYTES
    for _, layer in groupby(num_bytes, key=layer_of):
        names = list(layer)
        size = sum(num_bytes[name] for name in names)
        if not found or held + size > most:
            found.append([])
            held = 0
        found[-1] += names
        held += size
    return found


def shard_file(index: int, count: int) -> str:
    """Return the name of file ``index`` of ``count``, from 0."""
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def file_weights(module: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a shard under the names and in the shapes that from_pretrained expects."""
    found: dict[str, Tensor] = revert_weight_conversion(module, dict(weights))
    return {name: tensor.contiguous() for name, tensor in found.items()}


def write_index(directory: Path, files: Mapping[str, Iterable[str]], total_bytes: int) -> None:
    """Write the index that maps weights to files.

    Raises:
        OSError: the disk fails.
    """
    where = {name: file for file, names in files.items() for name in names}
    text = {"metadata": {"total_size": total_bytes}, "weight_map": where}
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps(text, indent=2, sort_keys=True) + "\n")


def write_settings(module: PreTrainedModel, directory: Path) -> None:
    """Write config.json and generation_config.json of a model's directory.

    ``GenerationConfig.save_pretrained`` refuses sampling flags that a greedy default leaves unused. Published
    models have such flags, so the file is written without that check.

    Raises:
        OSError: the disk fails.
    """
    module.config.dtype = str(module.dtype).removeprefix("torch.")
    module.config.architectures = [type(module).__name__.removeprefix("FSDP")]
    module.config.save_pretrained(directory)
    if module.can_generate():
        module.generation_config.to_json_file(directory / "generation_config.json")


def layer_of(name: str) -> str:
    """Return the common prefix of a layer's weights; any other weight's own name."""
    found = _LAYER.match(name)
    return found[0] if found else name


KINDS = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}
"""Names of dtypes in safetensors, in the order of tensors in a file."""
_ORDER = list(KINDS)
_CHUNK = 2**24
Digest = dict[str, Any]
"""``bytes`` and ``sha256`` of a file."""


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Digest:
    """Write contiguous tensors in host memory; return the file's size and hash.

    Raises:
        OSError: the disk fails.
    """
    sha, count = hashlib.sha256(), 0

    def hashed() -> Iterator[bytes | memoryview]:
        nonlocal count
        for chunk in _chunks(tensors, metadata):
            sha.update(chunk)
            count += len(chunk)
            yield chunk

    write_flushed(path, hashed())
    return {"bytes": count, "sha256": sha.hexdigest()}


def on_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, to be written by a thread while the tensor changes."""
    held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return held.copy_(tensor.detach())


def header(
    weights: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[str]]:
    """Return a file's first bytes, and its weights in the order of their data.

    Args:
        weights: dtype and shape of each.
        metadata: metadata of the file.
    """
    names = sorted(weights, key=lambda name: (_ORDER.index(weights[name][0]), name.encode()))
    said: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    start = 0
    for name in names:
        dtype, shape = weights[name]
        stop = start + math.prod(shape) * dtype.itemsize
        said[name] = {"dtype": KINDS[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(said, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, names


def _chunks(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None
) -> Iterator[bytes | memoryview]:
    first, names = header({name: (each.dtype, each.shape) for name, each in tensors.items()}, metadata)
    yield first
    for name in names:
        data = tensors[name].reshape(-1).view(torch.uint8).numpy().data
        yield from (data[start : start + _CHUNK] for start in range(0, len(data), _CHUNK))
