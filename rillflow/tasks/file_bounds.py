"""File bounds: data files are regular files, and their rows fit into the memory that is there.

    path ─ regular? ─> bytes or rows ─ FileBounds.take ─> counted, before they become Python objects
    Parquet ─ footer: rows, unpacked bytes ─ batches, unpacked ─ the same count

Two rules: rows may take half of the free memory, and a compressed file may stand for at most a thousand times
its own size. A small file that unpacks to more is not what it seems; its author can write it uncompressed.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

from rillflow.errors import DataError

MOST_RATIO = 1000
"""Largest size of unpacked rows, as a multiple of the file's size."""
LEAST_UNPACKED = 2**26
"""Unpacked bytes that every file may have."""
ROW_BYTES, VALUE_BYTES = 512, 64
"""Memory of a row, and of a value in it, beside its text."""
_KINDS = (
    (stat.S_ISDIR, "a directory", "name the file in it"),
    (stat.S_ISFIFO, "a named pipe", "write what it delivers to a file"),
    (stat.S_ISSOCK, "a socket", "write what it delivers to a file"),
    (stat.S_ISCHR, "a character device", "name a file"),
    (stat.S_ISBLK, "a block device", "name a file on it"),
)
_KERNEL = (Path("/proc"), Path("/sys"))
_LIMITS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)
"""Limit and use of the memory of this process's group, in both versions of cgroups."""


def require_regular(path: Path, what: str) -> None:
    """Refuse a path that is not a regular file on a disk, because reading it might never end.

    Raises:
        DataError: it names the kind; also if the path cannot be looked at.
    """
    try:
        mode, real = path.stat().st_mode, path.resolve()
    except (OSError, RuntimeError) as error:
        raise DataError(f"{what} {path} cannot be read", why=str(error)) from None
    for is_kind, name, fix in _KINDS:
        if is_kind(mode):
            raise DataError(f"{what} {path} is {name}", why="the source must be one file", fix=fix)
    if any(each in real.parents for each in _KERNEL):
        raise DataError(
            f"{what} {path} is a file of the kernel", why="its size is unknown", fix="copy it to a file"
        )


def free_memory() -> int:
    """Return the bytes of memory that this process may still take."""
    lines = Path("/proc/meminfo")
    found = [2**62]
    if lines.exists():
        words = {line.split(":")[0]: line.split()[1] for line in lines.read_text().splitlines()}
        found.append(1024 * int(words.get("MemAvailable", words.get("MemFree", "0"))))
    for limit, used in _LIMITS:
        text = limit.read_text().strip() if limit.exists() and used.exists() else "max"
        if text.isdecimal():
            found.append(max(int(text) - int(used.read_text()), 0))
    return min(found)


class FileBounds:
    """Memory for the rows of a file.

    Args:
        path: the file.
        size: bytes of the file, or of all files of the data set.
        is_packed: whether the file is compressed.
        free: free memory in bytes; None for that of the machine.
    """

    def __init__(self, path: Path | str, size: int, *, is_packed: bool, free: int | None = None) -> None:
        self._path = path
        self._most = (free_memory() if free is None else free) // 2
        self._size, self._unpacked, self._held = size, 0, 0
        self._most_unpacked = max(LEAST_UNPACKED, MOST_RATIO * size) if is_packed else 2**62

    def take(self, num_bytes: int, rows: int = 1, values: int = 0) -> None:
        """Count rows that are about to be made.

        Raises:
            DataError: the file unpacks to too much, or its rows do not fit into memory.
        """
        self._unpacked += num_bytes
        self._held += num_bytes + rows * ROW_BYTES + values * VALUE_BYTES
        self.require(self._unpacked, self._held)

    def require(self, unpacked: int, held: int) -> None:
        """Refuse rows of these sizes; see ``take``."""
        if unpacked > self._most_unpacked:
            raise DataError(
                f"{self._path} has {self._size:,} bytes, and its rows have at least {unpacked:,}",
                why=f"a compressed file stands for at most {MOST_RATIO:,} times its size, "
                f"or {LEAST_UNPACKED:,} bytes",
                fix="if it is right, write it uncompressed, or as .jsonl",
            )
        if held > self._most:
            raise DataError(
                f"the rows of {self._path} need at least {held:,} bytes of memory",
                why=f"half of the free memory is {self._most:,} bytes",
                fix="split the file, leave out columns, or use a machine with more memory",
            )


def leaves(array: Any) -> int:
    """Return the number of values in an Arrow array, with those inside of lists and structs."""
    from pyarrow import types

    kind = array.type
    if types.is_struct(kind):
        return len(array) + sum(leaves(array.field(place)) for place in range(kind.num_fields))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return len(array) + leaves(array.flatten())
    if types.is_map(kind):
        return len(array) + leaves(array.keys) + leaves(array.items)
    return len(array)


def text_bytes(array: Any) -> int:
    """Return the bytes of an Arrow array's values once every row has its own copy of them."""
    from pyarrow import compute, types

    kind = array.type
    if types.is_dictionary(kind):
        if types.is_string(kind.value_type) or types.is_binary(kind.value_type):
            lengths = compute.binary_length(array.dictionary).take(array.indices)
            return int(compute.sum(compute.cast(lengths, "int64")).as_py() or 0)
        return len(array) * 8
    if types.is_struct(kind):
        return sum(text_bytes(array.field(place)) for place in range(kind.num_fields))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return text_bytes(array.flatten())
    return int(array.nbytes)
