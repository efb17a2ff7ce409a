"""Stored batches: one safetensors file, every field of it, lengths beside ragged values.

ids [B, 3], NAME: [B, ...]   or   NAME:values [N] and NAME:lengths [B]
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from rillflow.records.batch import Batch, Field
from rillflow.records.ragged import Ragged


def save_batch(batch: Batch, path: Path) -> None:
    """Write a batch.

    Raises:
        OSError, SafetensorError: the disk fails.
    """
    found = {"ids": batch.ids.clone()}
    for name, field in batch.fields.items():
        parts = (
            {"values": field.values, "lengths": field.lengths} if isinstance(field, Ragged) else {"": field}
        )
        found |= {f"{name}:{part}": tensor.clone() for part, tensor in parts.items()}
    save_file(found, path)


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
