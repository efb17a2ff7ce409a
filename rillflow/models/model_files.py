"""Model files: the parts of a Hugging Face directory, which several ranks write while training continues.

    config, generation config, tokeniser      small files, on one rank
    weights ─ shards ─> the names of a file ─> model.safetensors, or model-00001-of-00003.safetensors
                                               and an index with the file of every weight

All weights of a layer are in one shard, because a weight in a file may combine several of the module's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

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


def shards(num_bytes: Mapping[str, int]) -> list[list[str]]:
    """Return the names of each file's weights, in the given order."""
    found: list[list[str]] = []
    held = SHARD_BYTES
    for _, layer in groupby(num_bytes, key=layer_of):
        names = list(layer)
        size = sum(num_bytes[name] for name in names)
        if not found or held + size > SHARD_BYTES:
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
