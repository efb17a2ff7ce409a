"""JSON lines: one record per line, valid JSON for every reader, tolerant of a cut-off write.

    record ─ encode ─> line ... line ─ read_lines ─> records, and the start of a torn rest

A valid line is a JSON object that ends with a newline. Only the last line may be invalid, because the process
died while writing it. NaN and infinity, which JSON lacks, become null, and the line's ``notes`` hold the
values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from rillflow.errors import RunDirectoryError

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One record and its place in the file."""

    number: int
    """Line number, from 1."""
    data: Mapping[str, JSON]
    """Content of the record."""
    text: bytes
    """Bytes of the line in the file, including the newline."""


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Records of a file."""

    lines: tuple[Line, ...]
    """Complete lines, in order."""
    torn_at: int | None
    """Byte offset of a cut-off last line; None without one."""


def encode(record: Mapping[str, JSON], indent: int | None = None) -> bytes:
    """Encode the record as one line of UTF-8 JSON (several with ``indent``), including the newline."""
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False, indent=indent)
    except ValueError:
        notes: dict[str, JSON] = {}
        finite = {key: _finite(value, key, notes) for key, value in record.items()}
        text = json.dumps({**finite, "notes": notes}, ensure_ascii=False, allow_nan=False, indent=indent)
    # UTF-8 cannot encode a lone surrogate; the output of backslashreplace is its JSON escape.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def read_lines(path: Path) -> Lines:
    """Read the records of a file; return none if the file is missing.

    Raises:
        RunDirectoryError: the file cannot be read, or a line before the last is not a record.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return Lines(lines=(), torn_at=None)
    except OSError as error:
        raise RunDirectoryError(f"cannot read {path}", why=str(error)) from error
    lines: list[Line] = []
    start = 0
    while start < len(content):
        end = content.find(b"\n", start) + 1
        text = content[start : end or len(content)]
        data = _record(text) if end else None
        if data is None:
            if end and end < len(content):
                raise _garbage(path, len(lines) + 1, text)
            return Lines(lines=tuple(lines), torn_at=start)
        lines.append(Line(number=len(lines) + 1, data=data, text=text))
        start = end
    return Lines(lines=tuple(lines), torn_at=None)


def read_json(path: Path) -> Mapping[str, JSON]:
    """Read the single record of a file.

    Raises:
        RunDirectoryError: the file is missing or is not a JSON object.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RunDirectoryError(f"cannot read {path}", why=str(error)) from error
    data = _record(content)
    if data is None:
        raise RunDirectoryError(
            f"{path} is not a JSON object",
            why=f"it begins with {content[:60]!r}",
            fix="restore it from a copy; rillflow verify lists all damaged files of a run",
        )
    return data


def _record(text: bytes) -> Mapping[str, JSON] | None:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _garbage(path: Path, number: int, text: bytes) -> RunDirectoryError:
    shown = text[:60].decode("utf-8", "replace").rstrip("\n")
    return RunDirectoryError(
        f"{path} line {number} is not a JSON object: {shown!r}",
        why="a crash can only cut off the last line; another program changed this one",
        fix="remove the line, or restore the file",
    )


def _finite(value: JSON, place: str, notes: dict[str, JSON]) -> JSON:
    if isinstance(value, float) and not math.isfinite(value):
        notes[place] = str(value)
        return None
    if isinstance(value, Mapping):
        return {key: _finite(entry, f"{place}.{key}", notes) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(entry, f"{place}[{index}]", notes) for index, entry in enumerate(value)]
    return value
