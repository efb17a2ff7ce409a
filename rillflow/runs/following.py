"""Follow a file of lines while a run appends to it, and notice when a resumed run rewinds it.

    metrics.jsonl ─ poll ─> new complete lines, each with its offset
                       └──> replaced or shortened: is_rewound, and every line again

A line without its newline is not returned until it is complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rillflow.errors import RunDirectoryError

CHUNK_BYTES = 2**22
"""Bytes that one read takes."""
_COMPARED_BYTES = 64
"""Bytes before the offset that must be unchanged; a rewound file may have the inode of the old one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowedLine:
    """One complete line."""

    offset: int
    """Offset of its first byte in the file."""
    number: int
    """Line number, from 1."""
    text: bytes
    """Content with the newline."""

    def refusal(self, path: Path, problem: str) -> RunDirectoryError:
        """Return the error for a line of a file that is no record."""
        shown = self.text[:60].decode("utf-8", "replace").rstrip("\n")
        return RunDirectoryError(
            f"{path} line {self.number} {problem}: {shown!r}",
            why="a crash can only cut off the last line; another program changed this one",
            fix="remove the line, or restore the file",
        )


class FollowedFile:
    """A file that another process appends to, and sometimes replaces by a shorter one.

    Example:
        file = FollowedFile(run / "metrics.jsonl")
        if file.is_rewound():
            forget_everything()
        for line in file.new_lines():
            keep(line)
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        """Path of the file."""
        self.offset = 0
        """Bytes that were returned as lines."""
        self.num_lines = 0
        """Lines that were returned."""
        self._inode = 0
        self._before = b""

    def is_rewound(self) -> bool:
        """Return whether the lines that were returned are no longer the file's; then start from its begin."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, self.offset - len(self._before)))
                found, inode = file.read(len(self._before)), self.path.stat().st_ino
        except OSError:
            found, inode = b"", 0
        is_same = found == self._before and (inode == self._inode or not self.offset)
        self._inode = inode
        if is_same:
            return False
        self.offset, self.num_lines, self._before = 0, 0, b""
        return True

    def new_lines(self) -> Iterator[FollowedLine]:
        """Yield the complete lines after those that were returned; none if the file is missing."""
        try:
            file = self.path.open("rb")
        except OSError:
            return
        with file:
            file.seek(self.offset)
            rest = b""
            while chunk := file.read(CHUNK_BYTES):
                rest += chunk
                whole, newline, tail = rest.rpartition(b"\n")
                if not newline:
                    continue
                for text in whole.split(b"\n"):
                    self.num_lines += 1
                    line = FollowedLine(offset=self.offset, number=self.num_lines, text=text + b"\n")
                    self.offset += len(line.text)
                    self._before = line.text[-_COMPARED_BYTES:]
                    yield line
                rest = tail
