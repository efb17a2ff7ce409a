"""Schema: the columns of a stream, and the stages that read and write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rillflow.errors import StreamError, nearest

DTYPES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
"""Bytes of one value, by type name."""
SOURCE = "begin"
"""Writer of the columns that no stage writes: the call that begins a group."""
MAX_COLUMNS = 63
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,63}")


@dataclass(frozen=True, kw_only=True)
class ColumnType:
    """The type of a column's entries.

    Example:
        ColumnType(dtype="float32", ragged=True)
    """

    dtype: str
    """One of DTYPES."""
    shape: tuple[int, ...] = ()
    """Shape of one value: a row has one value, or in a ragged column any number of values."""
    ragged: bool = False
    """Whether rows have different lengths; they are stored contiguously with their lengths, never padded."""
    per: Literal["row", "group"] = "row"
    """Whether rows or groups have an entry; a prompt of n samples is stored once with ``per="group"``."""
    aligned: str = ""
    """Ragged column of the same writer whose rows have the same lengths; empty for none."""
    finite: bool = False
    """Whether NaN and infinite values are refused."""
    least: float | None = None
    """Smallest value; smaller ones and NaN are refused."""
    most: float | None = None
    """Largest value; larger ones and NaN are refused."""


@dataclass(frozen=True, kw_only=True)
class StageColumns:
    """A stage of a stream, with the columns it reads and writes.

    Example:
        StageColumns(name="reward.score", reads=("prompt", "tokens"), writes=("reward",))
    """

    name: str
    """Name of the stage, as in the graph."""
    reads: tuple[str, ...]
    """Columns to read; a group is ready for the stage once all of them are written."""
    writes: tuple[str, ...] = ()
    """Columns to write; they become visible together, when the stage is done with the group."""
    order: Literal["in_order", "ready_first"] = "in_order"
    """Order in which a taker gets ready groups: see ``samplers``."""


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The columns of a stream and its stages.

    Raises:
        StreamError: a name is invalid or repeated; a column is read and not declared, written by two stages,
            read by none, or read before it can be written.
    """

    columns: Mapping[str, ColumnType]
    """Column types by name; columns that no stage writes are written when groups begin."""
    stages: tuple[StageColumns, ...]
    """Stages, in any order."""

    def __post_init__(self) -> None:
        for name in (*self.columns, *(stage.name for stage in self.stages)):
            if not _NAME.fullmatch(name):
                raise StreamError(f"{name!r} is not a valid name", why="names have letters, digits, _ and .")
        if not 0 < len(self.columns) <= MAX_COLUMNS or not self.stages:
            raise StreamError(
                f"a stream with {len(self.columns)} columns and {len(self.stages)} stages",
                why=f"it needs 1 to {MAX_COLUMNS} columns, and a stage that reads them",
            )
        for name, column in self.columns.items():
            if column.dtype not in DTYPES or any(size < 1 for size in column.shape):
                raise StreamError(
                    f"column {name!r} has type {column.dtype!r} and shape {list(column.shape)}",
                    why="a column needs a known type and positive sizes",
                    fix=nearest(column.dtype, DTYPES),
                )
        self._check_stages()
        for name, column in self.columns.items():
            self._check_contract(name, column)

    def _check_contract(self, name: str, column: ColumnType) -> None:
        writers = (SOURCE, *(stage.name for stage in self.stages))
        other = self.columns.get(column.aligned)
        beside = any({name, column.aligned} <= {*self.written_by(writer)} for writer in writers)
        if column.aligned and not (
            other and beside and column.ragged and other.ragged and other.per == column.per
        ):
            raise StreamError(
                f"column {name!r} is aligned with {column.aligned!r}",
                why="both must be ragged columns of one writer, per row or per group",
                fix=nearest(column.aligned, self.columns),
            )

    def _check_stages(self) -> None:
        names = [stage.name for stage in self.stages]
        if len({*names, SOURCE}) != len(names) + 1:
            raise StreamError(f"the stage names {', '.join(names)} are not unique or contain {SOURCE!r}")
        for stage in self.stages:
            for column in (*stage.reads, *stage.writes):
                if column not in self.columns:
                    raise StreamError(
                        f"stage {stage.name} names column {column!r}, which the stream does not have",
                        fix=nearest(column, self.columns),
                    )
            if not stage.reads:
                raise StreamError(
                    f"stage {stage.name} reads no column", why="no column would make a group ready for it"
                )
        for column in self.columns:
            writers = [stage.name for stage in self.stages if column in stage.writes]
            if len(writers) > 1:
                raise StreamError(f"column {column!r} is written by {' and '.join(writers)}")
            if not any(column in stage.reads for stage in self.stages):
                raise StreamError(
                    f"column {column!r} is read by no stage",
                    why="a cell is deleted after its last reader, so these would never be deleted",
                )
        known, waiting = set(self.written_by(SOURCE)), list(self.stages)
        if not known:
            raise StreamError(
                "every column is written by a stage", why="a new group needs columns of its own"
            )
        while waiting:
            able = [stage for stage in waiting if known.issuperset(stage.reads)]
            if not able:
                raise StreamError(
                    f"stages {', '.join(stage.name for stage in waiting)} wait for each other",
                    why="each reads a column that it or another of them writes",
                )
            known.update(*(stage.writes for stage in able))
            waiting = [stage for stage in waiting if stage not in able]

    def written_by(self, writer: str) -> tuple[str, ...]:
        """Return the columns that a stage, or SOURCE, writes."""
        if writer == SOURCE:
            taken = {column for stage in self.stages for column in stage.writes}
            return tuple(column for column in self.columns if column not in taken)
        return self.stage(writer).writes

    def stage(self, name: str) -> StageColumns:
        """Return a stage by name."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        names = [stage.name for stage in self.stages]
        raise StreamError(f"the stream has no stage {name!r}", fix=nearest(name, names))
