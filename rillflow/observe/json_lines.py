"""JSON lines: one record a line, valid for every reader, and forgiving where a write was cut off.

    record ─ encode ─> line ... line ─ read_lines ─> records, and where the torn rest begins

A line counts when a newline ends it and it is a JSON object. Only the last may fail to: the process
died while it was written. A number JSON does not have (NaN, infinity) becomes null, and the line's
``notes`` say what it was.
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
    """One record and where it stood."""

    number: int
    """The line's number, from 1."""
    data: Mapping[str, JSON]
    """The record."""
    text: bytes
    """The line as it stands in the file, newline included."""


@dataclass(frozen=True, kw_only=True)
class Lines:
    """The records of a file."""

    lines: tuple[Line, ...]
    """The complete lines, in order."""
    torn_at: int | None
    """Where in the file a cut-off last line begins; None when the file ends well."""


def encode(record: Mapping[str, JSON], indent: int | None = None) -> bytes:
    """The record as one line of UTF-8 JSON (or several, indented), newline included."""
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False, indent=indent)
    except ValueError:
        notes: dict[str, JSON] = {}
        finite = {key: _finite(value, key, notes) for key, value in record.items()}
        text = json.dumps({**finite, "notes": notes}, ensure_ascii=False, allow_nan=False, indent=indent)
    # A lone surrogate has no UTF-8; what backslashreplace writes for it is just its JSON escape.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def read_lines(path: Path) -> Lines:
    """The records of a file; none when there is no file.

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
    """The one record of a file; RunDirectoryError when it is missing or is none."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RunDirectoryError(f"cannot read {path}", why=str(error)) from error
    data = _record(content)
    if data is None:
        raise RunDirectoryError(
            f"{path} is not a JSON object",
            why=f"it begins with {content[:60]!r}",
            fix="restore it from a copy; rillflow verify says what else of a run is damaged",
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
        why="only the last line may be cut off; this one was changed by something else",
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
