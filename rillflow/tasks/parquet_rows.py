"""Parquet rows: rows of a Parquet file as plain values, batch by batch, within the memory that is there.

    footer ─ rows, unpacked bytes ─> FileBounds ─> batches ─ texts counted ─> FileBounds ─> rows

A Parquet file of some kilobytes can stand for gigabytes: pages are compressed, and equal values are stored
once. So texts stay in their dictionary until it is known how long they are in all rows.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from rillflow.errors import DataError, install_package
from rillflow.tasks.arrow_rows import plain_rows
from rillflow.tasks.file_bounds import FileBounds, leaves, text_bytes

ROWS_AT_ONCE = 1024
_TEXT = "BYTE_ARRAY"


def parquet_rows(path: Path, inputs: Collection[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number, from 1, and the columns of each row; values are not checked.

    Args:
        path: the file.
        inputs: see ``plain_rows``.

    Raises:
        DataError: pyarrow is not installed, the file is not Parquet, or its rows do not fit into memory.
    """
    try:
        # Only users of Parquet files need it.
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile, read_metadata
    except ImportError:
        raise DataError(
            f"{path} is a Parquet file",
            why="pyarrow is not installed",
            fix=install_package("parquet"),
        ) from None
    number = 0
    try:
        schema = read_metadata(path).schema
        columns = [schema.column(place) for place in range(len(schema))]
        texts = [each.path for each in columns if each.physical_type == _TEXT]
        with ParquetFile(path, read_dictionary=texts) as file:
            room = FileBounds(path, path.stat().st_size, is_packed=True)
            require_footer(file.metadata, room)
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
                room.take(sum(map(text_bytes, batch)), batch.num_rows, sum(map(leaves, batch)))
                for row in plain_rows(batch, inputs):
                    number += 1
                    yield number, row
    except (ArrowException, OSError, MemoryError, json.JSONDecodeError) as error:
        why = str(error).split("\n")[0] or "its rows do not fit into memory"
        raise DataError(f"{path} cannot be read as Parquet", why=why) from None


def require_footer(metadata: Any, room: FileBounds) -> None:
    """Refuse a Parquet file whose footer tells of more than there is room for.

    Raises:
        DataError: see ``FileBounds``.
    """
    groups = [metadata.row_group(place) for place in range(metadata.num_row_groups)]
    unpacked = sum(each.total_byte_size for each in groups)
    room.require(unpacked, unpacked + metadata.num_rows * 512)
