"""Batch: rows x fields, the only value that travels between stages.

A stored batch is one safetensors file, with the values and lengths of ragged fields:

    ids [B, 3], NAME: [B, ...]   or   NAME:values [N] and NAME:lengths [B]

Legend: B rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from rillflow.errors import RecordError, nearest
from rillflow.records.ragged import Ragged, concatenate_ragged
from rillflow.records.row import RowId

Field = Tensor | Ragged


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Rows with stable ids, and fields that are dense [B, ...] or ragged.

    Example:
        Batch(ids=row_ids([RowId(0, 0, 0)]), fields={"reward": torch.tensor([1.0])})

    Raises:
        RecordError: the number of rows of a field differs from the number of ids.
    """

    ids: Tensor
    """[B, 3] int64 (epoch, prompt, sample) of every row."""
    fields: Mapping[str, Field]
    """Fields by name."""

    def __post_init__(self) -> None:
        if self.ids.dim() != 2 or self.ids.shape[1] != 3 or self.ids.dtype != torch.int64:
            raise RecordError(
                f"row ids have shape {list(self.ids.shape)} and type {self.ids.dtype}",
                why="a row id is three int64: epoch, prompt, sample",
            )
        for name, field in self.fields.items():
            rows = len(field) if isinstance(field, Ragged) or field.dim() else 0
            if rows != len(self):
                raise RecordError(
                    f"field {name!r} has {rows} rows but the batch has {len(self)}",
                    why="every field needs one entry per row",
                )

    def __len__(self) -> int:
        return self.ids.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the ids and of all fields."""
        held = [each.values if isinstance(each, Ragged) else each for each in self.fields.values()]
        return self.ids.nbytes + sum(each.nbytes for each in held)

    def row_id(self, index: int) -> RowId:
        """Return the id of one row."""
        return RowId(*self.ids[index].tolist())

    def row_ids(self) -> list[RowId]:
        """Return the ids of all rows, in order."""
        return [RowId(*row) for row in self.ids.tolist()]

    def field(self, name: str) -> Field:
        """Return a field of either kind; RecordError names the nearest one if there is none."""
        if name not in self.fields:
            raise RecordError(
                f"the batch has no field {name!r}",
                why=f"it has {', '.join(sorted(self.fields)) or 'no fields'}",
                fix=nearest(name, self.fields),
            )
        return self.fields[name]

    def dense(self, name: str) -> Tensor:
        """Return a dense field, [B, ...]."""
        field = self.field(name)
        if isinstance(field, Ragged):
            raise RecordError(f"field {name!r} is ragged", why="the caller requested a dense field")
        return field

    def ragged(self, name: str) -> Ragged:
        """Return a ragged field."""
        field = self.field(name)
        if not isinstance(field, Ragged):
            raise RecordError(f"field {name!r} is dense", why="the caller requested a ragged field")
        return field

    def with_fields(self, **fields: Field) -> Batch:
        """Return the same rows with fields added or replaced."""
        return Batch(ids=self.ids, fields={**self.fields, **fields})

    def only(self, *names: str) -> Batch:
        """Return the same rows with only these fields."""
        return Batch(ids=self.ids, fields={name: self.field(name) for name in names})

    def select(self, index: Tensor | Sequence[int]) -> Batch:
        """Return the rows at ``index`` [N], in that order."""
        where = torch.as_tensor(index, dtype=torch.int64, device=self.ids.device)
        return self._each(lambda part: part.select(where) if isinstance(part, Ragged) else part[where])

    def slice(self, start: int, stop: int) -> Batch:
        """Return rows ``start`` to ``stop`` (excluded), without a copy."""
        rows = slice(start, stop)
        return self._each(lambda part: part.slice(start, stop) if isinstance(part, Ragged) else part[rows])

    def join(self, other: Batch) -> Batch:
        """Add the other batch's fields to these rows, matched by row id; the other may be in any order.

        Raises:
            RecordError: a row is missing from the other batch or occurs twice in it, or both have a field of
                one name.
        """
        both = set(self.fields) & set(other.fields)
        if both:
            raise RecordError(
                f"both batches have a field {min(both)!r}",
                why="a join would drop one of them",
                fix="select the fields to keep with Batch.only",
            )
        if torch.equal(self.ids, other.ids):
            return self.with_fields(**other.fields)
        places: dict[tuple[int, ...], int] = {}
        for place, row in enumerate(other.ids.tolist()):
            if places.setdefault(tuple(row), place) != place:
                raise RecordError(
                    f"row ({RowId(*row)}) occurs twice in the joined batch", why="row ids must be unique"
                )
        try:
            index = [places[tuple(row)] for row in self.ids.tolist()]
        except KeyError as missing:
            raise RecordError(
                f"row ({RowId(*missing.args[0])}) is missing from the joined batch",
                why="every row needs a row with the same id",
            ) from None
        return self.with_fields(**other.select(index).fields)

    def to(self, device: torch.device | str) -> Batch:
        """Return the same batch on another device."""
        return self._each(lambda part: part.to(device))

    def _each(self, change: Callable[[Any], Any]) -> Batch:
        """Return the batch with ``change`` applied to its ids and fields."""
        return Batch(
            ids=change(self.ids), fields={name: change(field) for name, field in self.fields.items()}
        )


def row_ids(rows: Sequence[RowId]) -> Tensor:
    """Return the ids as a batch holds them, [B, 3] int64."""
    return torch.tensor([list(row) for row in rows], dtype=torch.int64).reshape(len(rows), 3)


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Return the rows of every batch, in order.

    Raises:
        RecordError: there is no batch, or the batches differ in their fields.
    """
    if not batches:
        raise RecordError("no batch to concatenate", why="an empty list has no fields")
    first = batches[0]
    for batch in batches[1:]:
        if set(batch.fields) != set(first.fields):
            odd = sorted(set(batch.fields) ^ set(first.fields))
            raise RecordError(
                f"field {odd[0]!r} is in only some of the batches", why="all rows need the same fields"
            )
    return Batch(
        ids=torch.cat([batch.ids for batch in batches]),
        fields={name: _concatenate_field(name, batches) for name in first.fields},
    )


def _concatenate_field(name: str, batches: Sequence[Batch]) -> Field:
    if isinstance(batches[0].fields[name], Ragged):
        return concatenate_ragged([batch.ragged(name) for batch in batches])
    return torch.cat([batch.dense(name) for batch in batches])


def joined(batches: Sequence[Batch]) -> Batch:
    """Return the rows of the first batch with the fields of all of them, matched by row id."""
    if not batches:
        raise RecordError("no batch to join", why="an empty list has no rows")
    return reduce(Batch.join, batches)


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
