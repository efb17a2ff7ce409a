"""Ragged columns: rows of different lengths as flat values and lengths.

Legend: B rows, T = sum(lengths) values, L = the longest row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

from rillflow.errors import RecordError


@dataclass(frozen=True, kw_only=True, eq=False)
class Ragged:
    """A column of B rows of different lengths, stored without padding.

    Example:
        Ragged.from_rows([[1, 2], [], [3]]).values.tolist() == [1, 2, 3]

    Raises:
        RecordError: lengths are negative, not one-dimensional, or do not add up to the values.
    """

    values: Tensor
    """[T, ...] the rows laid end to end."""
    lengths: Tensor
    """[B] int64 number of values in each row."""

    def __post_init__(self) -> None:
        if self.lengths.dim() != 1 or self.lengths.dtype != torch.int64:
            raise RecordError(
                f"ragged lengths have shape {list(self.lengths.shape)} and type {self.lengths.dtype}",
                why="lengths must be one int64 per row",
            )
        total = int(self.lengths.sum())
        if self.lengths.numel() and int(self.lengths.min()) < 0:
            raise RecordError(
                f"a ragged row has length {int(self.lengths.min())}", why="a length cannot be negative"
            )
        if self.values.dim() == 0 or self.values.shape[0] != total:
            raise RecordError(
                f"ragged values have shape {list(self.values.shape)} but the lengths add up to {total}",
                why="values must be the concatenated rows",
            )

    @staticmethod
    def from_rows(rows: Sequence[Sequence[float] | Tensor], dtype: torch.dtype = torch.int64) -> Ragged:
        """Lay rows (lists or one-dimensional tensors) end to end."""
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        if any(isinstance(row, Tensor) for row in rows):
            values = torch.cat([torch.as_tensor(row, dtype=dtype) for row in rows])
        else:
            values = torch.tensor([*chain.from_iterable(rows)], dtype=dtype)
        return Ragged(values=values, lengths=lengths)

    @staticmethod
    def from_text(texts: Iterable[str]) -> Ragged:
        """Store texts as UTF-8 bytes, so that they travel like any other ragged column."""
        encoded = [text.encode("utf-8") for text in texts]
        lengths = torch.tensor([len(data) for data in encoded], dtype=torch.int64)
        joined = bytearray(b"".join(encoded))
        values = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
        return Ragged(values=values, lengths=lengths)

    def to_text(self) -> list[str]:
        """Return the texts that ``from_text`` stored."""
        data = self.values.cpu().numpy().tobytes()
        return [data[start:stop].decode("utf-8") for start, stop in pairwise(self.bounds.tolist())]

    def __len__(self) -> int:
        return self.lengths.shape[0]

    @cached_property
    def bounds(self) -> Tensor:
        """[B + 1] int64 start of each row; the last entry is T."""
        bounds = torch.zeros(len(self) + 1, dtype=torch.int64, device=self.lengths.device)
        torch.cumsum(self.lengths, 0, out=bounds[1:])
        return bounds

    @cached_property
    def row_of(self) -> Tensor:
        """[T] int64 row of each value."""
        rows = torch.arange(len(self), device=self.lengths.device)
        return torch.repeat_interleave(rows, self.lengths)

    @cached_property
    def positions(self) -> Tensor:
        """[T] int64 position of each value in its row, from 0."""
        return torch.arange(self.values.shape[0], device=self.lengths.device) - self.bounds[self.row_of]

    def rows(self) -> list[Tensor]:
        """Return every row, without a copy."""
        return list(torch.split(self.values, self.lengths.tolist()))

    def lists(self) -> list[list[Any]]:
        """Return every row's values as Python numbers."""
        values: list[Any] = self.values.tolist()
        return [values[start:stop] for start, stop in pairwise(self.bounds.tolist())]

    def select(self, index: Tensor) -> Ragged:
        """Return the rows at ``index`` [N] int64, in that order; an index may repeat."""
        lengths = self.lengths[index]
        ends = torch.cumsum(lengths, 0)
        total = int(ends[-1]) if len(ends) else 0
        moves = self.bounds[:-1][index] - (ends - lengths)
        shift = torch.repeat_interleave(moves, lengths, output_size=total)
        return Ragged(values=self.values[torch.arange(total, device=shift.device) + shift], lengths=lengths)

    def slice(self, start: int, stop: int) -> Ragged:
        """Return rows ``start`` to ``stop`` (excluded), without a copy."""
        values = self.values[int(self.bounds[start]) : int(self.bounds[stop])]
        return Ragged(values=values, lengths=self.lengths[start:stop])

    def where(self, mask: Ragged) -> Ragged:
        """Return the values where a mask of the same lengths is true, by row."""
        return Ragged(values=self.values[mask.values], lengths=mask.sums())

    def with_values(self, values: Tensor) -> Ragged:
        """Return a column with other values [T, ...] and the same lengths."""
        return Ragged(values=values, lengths=self.lengths)

    def padded(self, fill: float = 0) -> Tensor:
        """Return [B, L, ...], the rows padded at the end with ``fill``."""
        longest = int(self.lengths.max()) if len(self) else 0
        shape = (len(self), longest, *self.values.shape[1:])
        out = torch.full(shape, fill, dtype=self.values.dtype, device=self.values.device)
        out[self.row_of, self.positions] = self.values
        return out

    def sums(self) -> Tensor:
        """Return [B, ...], the sum of each row's values; 0 for an empty row."""
        dtype = torch.int64 if not self.values.dtype.is_floating_point else self.values.dtype
        out = torch.zeros(len(self), *self.values.shape[1:], dtype=dtype, device=self.values.device)
        return out.index_add_(0, self.row_of, self.values.to(dtype))

    def expand(self, per_row: Tensor) -> Tensor:
        """Return [T, ...], each row's entry of ``per_row`` [B, ...] repeated over the row's values."""
        return per_row[self.row_of]

    def to(self, device: torch.device | str) -> Ragged:
        """Return the same column on another device."""
        return Ragged(values=self.values.to(device), lengths=self.lengths.to(device))


def concatenate_ragged(parts: Sequence[Ragged]) -> Ragged:
    """Return the rows of every part, in order."""
    return Ragged(
        values=torch.cat([part.values for part in parts]), lengths=torch.cat([part.lengths for part in parts])
    )
