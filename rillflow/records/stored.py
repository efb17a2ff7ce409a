"""Stored batches: one safetensors file per batch, with the values and lengths of ragged fields.

ids [B, 3], NAME: [B, ...]   or   NAME:values [N] and NAME:lengths [B]
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save, save_file
from torch import Tensor

from rillflow.records.batch import Batch, Field
from rillflow.records.ragged import Ragged


def save_batch(batch: Batch, path: Path) -> None:
    """Write a batch.

    Raises:
        OSError, SafetensorError: the disk fails.
    """
    save_file(_tensors(batch), path)


def batch_bytes(batch: Batch) -> bytes:
    """Return a batch as the bytes of such a file."""
    content: bytes = save(_tensors(batch))
    return content


def _tensors(batch: Batch) -> dict[str, Tensor]:
    found = {"ids": batch.ids.clone()}
    for name, field in batch.fields.items():
        if isinstance(field, Ragged):
            found |= {f"{name}:values": field.values.clone(), f"{name}:lengths": field.lengths.clone()}
        else:
            found[f"{name}:"] = field.clone()
    return found


def load_batch(path: Path) -> Batch:
    """Read what ``save_batch`` wrote."""
    tensors: dict[str, Tensor] = load_file(path)
    fields = dict[str, Field]()
    for key, tensor in tensors.items():
        name, _, part = key.partition(":")
        if part == "values":
            fields[name] = Ragged(values=tensor, lengths=tensors[f"{name}:lengths"])
        elif not part and key != "ids":
            fields[name] = tensor
    return Batch(ids=tensors["ids"], fields=fields)
