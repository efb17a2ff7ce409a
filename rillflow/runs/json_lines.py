"""JSON lines: one record per line, valid JSON for every reader, tolerant of a cut-off write.

    record ─ encode ─> line ... line ─ read_lines ─> Line ─ decode ─> dataclass that declares the fields

A valid line is a JSON object that ends with a newline. Only the last line may be invalid, because the process
died while writing it. NaN and infinity, which JSON lacks, become null, and the line's ``notes`` hold the
values; ``read_lines`` restores them.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from rillflow.errors import RunDirectoryError

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"

Record = TypeVar("Record")

_NOTED = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_FIX = "remove the line, or restore the file"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One record and its place in the file."""

    file: Path
    """The file."""
    number: int
    """Line number, from 1."""
    data: Mapping[str, JSON]
    """Content of the record, including NaN and infinity."""
    text: bytes
    """Bytes of the line in the file, including the newline."""

    def refusal(self, what: str, why: str) -> RunDirectoryError:
        """Return an error about this line, for the caller to raise."""
        return RunDirectoryError(f"{self.file} line {self.number}: {what}", why=why, fix=_FIX)


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


def parse_line(text: bytes) -> Mapping[str, JSON] | None:
    """Return the record of one line, with NaN and infinity; None if the line is no record."""
    data = _record(text)
    return None if data is None else restored(data)


def read_lines(path: Path) -> Lines:
    """Read the records of a file; return none if the file is missing.

    Raises:
        RunDirectoryError: the file cannot be read, or a line before the last is not a record.
    """
    content = _content(path, may_be_missing=True)
    lines, start = list[Line](), 0
    for number, text in enumerate(io.BytesIO(content), 1):
        data = _record(text) if text.endswith(b"\n") else None
        if data is None and start + len(text) == len(content):
            return Lines(lines=tuple(lines), torn_at=start)
        if data is None:
            shown = text[:60].decode("utf-8", "replace").rstrip("\n")
            raise RunDirectoryError(
                f"{path} line {number} is not a JSON object: {shown!r}",
                why="a crash can only cut off the last line; another program changed this one",
                fix=_FIX,
            )
        lines.append(Line(file=path, number=number, data=restored(data), text=text))
        start += len(text)
    return Lines(lines=tuple(lines), torn_at=None)


def decode(kind: type[Record], line: Line, data: Mapping[str, JSON] | None = None, **given: Any) -> Record:
    """Return a line as a dataclass; the class declares the name, type and default of every field.

    A field is an int, a float, a str, a mapping, another dataclass, a tuple of these, or one of them or None.
    Null takes the default; null for a float without a default is NaN. Unknown fields are ignored.

    Args:
        kind: the dataclass.
        line: the line.
        data: object within the line; None for the whole line.
        given: fields that do not come from the line.

    Raises:
        RunDirectoryError: a field is missing or has another type; names the file, the line and the field.
    """
    found: Mapping[str, JSON] = line.data if data is None else data
    hashable: Any = kind
    for name, (hint, has_default) in _declared(hashable).items():
        value = found.get(name)
        if name in given or (value is None and has_default):
            continue
        if name not in found:
            raise line.refusal(f"field {name!r} is missing", "the line is not a record of this file")
        try:
            given[name] = _typed(line, hint, value)
        except TypeError:
            what = f"field {name!r} is {str(value)[:60]!r}"
            raise line.refusal(what, f"it should be {_words(hint)}") from None
    return kind(**given)


@cache
def _declared(kind: type[Any]) -> Mapping[str, tuple[Any, bool]]:
    """Return the type of each field of a dataclass, and whether the field has a default."""
    hints, missing = get_type_hints(kind), (MISSING, MISSING)
    return {
        each.name: (hints[each.name], (each.default, each.default_factory) != missing)
        for each in fields(kind)
    }


def _words(hint: Any) -> str:
    """Return the JSON type of a field in words."""
    if get_origin(hint) is tuple:
        return f"a list, each entry {_words(get_args(hint)[0])}"
    return {int: "an integer", float: "a number", str: "a text"}.get(hint, "an object")


def _typed(line: Line, hint: Any, value: JSON) -> Any:
    """Return a value as the type of its field; raise TypeError if it has another type."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    match value:
        case _ if kind is UnionType:  # an optional field that is not null
            return _typed(line, inner[0], value)
        case list() if kind is tuple:
            return tuple(_typed(line, inner[0], each) for each in value)
        case dict() if isinstance(kind, type) and is_dataclass(kind):
            return decode(kind, line, value)
        case int() | float() | None if kind is float and not isinstance(value, bool):
            return math.nan if value is None else float(value)
        case int() | str() | dict() if isinstance(value, kind) and not isinstance(value, bool):
            return value
    raise TypeError


def read_json(path: Path) -> Mapping[str, JSON]:
    """Read the single record of a file.

    Raises:
        RunDirectoryError: the file is missing or is not a JSON object.
    """
    content = _content(path)
    data = _record(content)
    if data is None:
        raise RunDirectoryError(
            f"{path} is not a JSON object",
            why=f"it begins with {content[:60]!r}",
            fix="restore it from a copy; rillflow verify lists all damaged files of a run",
        )
    return data


def _content(path: Path, *, may_be_missing: bool = False) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        if may_be_missing and isinstance(error, FileNotFoundError):
            return b""
        raise RunDirectoryError(f"cannot read {path}", why=str(error)) from error


def _record(text: bytes) -> Mapping[str, JSON] | None:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _finite(value: JSON, place: str, notes: dict[str, JSON]) -> JSON:
    if isinstance(value, float) and not math.isfinite(value):
        notes[place] = str(value)
        return None
    if isinstance(value, Mapping):
        return {key: _finite(entry, f"{place}.{key}", notes) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(entry, f"{place}[{index}]", notes) for index, entry in enumerate(value)]
    return value


def restored(data: Mapping[str, JSON]) -> Mapping[str, JSON]:
    """Return a record with the numbers that its notes name, without the notes."""
    notes = data.get("notes")
    if not isinstance(notes, dict):
        return data

    def filled(value: JSON, place: str) -> JSON:
        if isinstance(value, dict):
            return {key: filled(entry, f"{place}.{key}") for key, entry in value.items()}
        if isinstance(value, list):
            return [filled(entry, f"{place}[{index}]") for index, entry in enumerate(value)]
        return _NOTED.get(str(notes.get(place))) if value is None else value

    return {key: filled(value, key) for key, value in data.items() if key != "notes"}
