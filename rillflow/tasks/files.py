"""Files: rows of a .jsonl or .parquet file as examples, or as pairs of answers.

    path ─ by suffix ─┬─ .jsonl ──> one object per line ─┬─> same columns? ids unique? ─> examples
                      └─ .parquet > rows of plain values ┘

A file is read completely, if its rows fit into memory (``file_bounds``). It is data and is never executed.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from os.path import realpath
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from rillflow.errors import DataError
from rillflow.tasks.arrow_rows import TEMPLATE_INPUTS, without_nulls
from rillflow.tasks.columns import ColumnPlan
from rillflow.tasks.example import check_names, shown
from rillflow.tasks.file_bounds import FileBounds, require_regular
from rillflow.tasks.parquet_rows import parquet_rows

ENDINGS = (".jsonl", ".parquet")
_MARK = b"\xef\xbb\xbf"
_OTHER_FORMS = (
    (b"\x1f\x8b", "gzip", "unpack it: gunzip -c {0} > prompts.jsonl"),
    (b"\x28\xb5\x2f\xfd", "Zstandard", "unpack it: zstd -d {0} -o prompts.jsonl"),
    (b"PK\x03\x04", "a zip archive", "unpack it: unzip {0}"),
    (b"PAR1", "Parquet", "rename it to end in .parquet"),
    (b"\xff\xfe", "UTF-16", "convert it: iconv -f utf-16 -t utf-8 {0} > prompts.jsonl"),
    (b"\xfe\xff", "UTF-16", "convert it: iconv -f utf-16 -t utf-8 {0} > prompts.jsonl"),
)
"""Leading bytes of files that are not UTF-8, their format, and the command to convert them."""
_NO_NUMBER = "JSON has no such number, and no reward could use it"
Row = TypeVar("Row")
Rows: TypeAlias = Iterable[str | Sequence[Mapping[str, Any]] | Mapping[str, Any]]
"""Rows given in Python: prompts, or objects like the rows of a file."""
GIVEN = "<prompts>"
"""Source of a run whose rows were given in Python."""


def read_rows(
    path: Path, make: Callable[[dict[str, Any], int, str], Row], plan: ColumnPlan | None = None
) -> list[Row]:
    """Apply ``make`` to each row of a file, its index and its place; return the results in file order.

    Args:
        path: the file.
        make: makes a row.
        plan: how the row's columns are made; None: they are the file's.

    Raises:
        DataError: the file is missing, has another format, has no rows, or has an invalid row; the message
            names the file, the line or row, and the value.
    """
    _check_path(path)
    if path.suffix == ".jsonl":
        return made_rows(json_lines(path), str(path), f"{path.name} line", make, plan)
    return made_rows(_parquet_rows(path, template_inputs(plan)), str(path), f"{path.name} row", make, plan)


def template_inputs(plan: ColumnPlan | None) -> frozenset[str]:
    """Return the data's names of columns that a chat template may read."""
    return (plan or ColumnPlan()).given(TEMPLATE_INPUTS)


def given_rows(
    rows: Rows, make: Callable[[dict[str, Any], int, str], Row], plan: ColumnPlan | None = None
) -> list[Row]:
    """Apply ``make`` to rows given in Python: each is a prompt, or an object like a row of a file.

    See ``read_rows`` for the arguments.

    Raises:
        DataError: as ``read_rows``; the rows are not a list of rows.
    """
    if isinstance(rows, Mapping):
        raise DataError(
            f"the prompts are one object with the keys {', '.join(map(repr, rows))}",
            why="prompts must be a list of rows",
            fix="pass one of its values, or a list of rows",
        )
    return made_rows(_given(rows, template_inputs(plan)), GIVEN, f"{GIVEN} row", make, plan)


def _given(rows: Rows, inputs: Collection[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, given in enumerate(_records(rows, inputs), 1):
        row = {str(name): value for name, value in given.items()} if isinstance(given, Mapping) else None
        row = {"prompt": given} if row is None else {name: _plain(value) for name, value in row.items()}
        for name, value in row.items():
            _check_plain(value, f"{GIVEN}, row {number}: column {name!r}")
        yield number, row


def _records(rows: Rows, inputs: Collection[str]) -> Rows:
    """Return the rows of a table of pandas or datasets as objects; other rows unchanged.

    In a table every row has all fields: NaN and null stand for values that a row lacks.
    """
    pandas, datasets = (sys.modules.get(name) for name in ("pandas", "datasets"))
    if pandas is not None and isinstance(rows, pandas.DataFrame):
        records = rows.astype(object).where(rows.notna(), None).to_dict("records")
    elif datasets is not None and isinstance(rows, datasets.Dataset | datasets.IterableDataset):
        records = [*rows]
    else:
        return rows
    return [
        {name: without_nulls(_plain(value)) if name in inputs else value for name, value in record.items()}
        for record in records
    ]


def _plain(value: object) -> object:
    """Return numpy's arrays and scalars as Python values, also in lists and dicts; other values unchanged."""
    numpy = sys.modules.get("numpy")  # a numpy value implies that numpy is imported; no import otherwise
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    if numpy is not None and isinstance(value, numpy.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return value


def _check_path(path: Path) -> None:
    if path.is_symlink() and not path.exists():
        raise DataError(
            f"the prompts file {path} is a link without a target",
            why="the link points to itself or to a missing file",
            fix="name the file itself",
        )
    if path.is_dir():
        require_regular(path, "the prompts file")
    if path.suffix not in ENDINGS:
        raise DataError(
            f"the prompts file {path} ends in {path.suffix!r}",
            why=f"prompts files end in {' or '.join(ENDINGS)}",
            fix="write a .jsonl file with one JSON object per line, with the column 'prompt'",
        )
    if not path.exists():
        raise DataError(
            f"the prompts file {path} is not there",
            why=f"there is no {realpath(path)}",
            fix="correct the path, which is relative to the recipe",
        )
    require_regular(path, "the prompts file")


def made_rows(
    rows: Iterable[tuple[int, dict[str, Any]]],
    source: str,
    place: str,
    make: Callable[[dict[str, Any], int, str], Row],
    plan: ColumnPlan | None = None,
) -> list[Row]:
    """Apply ``make`` to rows, after checking that they have the same columns and different ids.

    Args:
        rows: each row's number for messages, and its columns.
        source: the source of the rows in messages.
        place: words before a row's number, the last of which names the unit, such as ``prompts.jsonl line``.
        make: see ``read_rows``.
        plan: see ``read_rows``.

    Raises:
        DataError: see ``read_rows``.
    """
    made: list[Row] = []
    names: frozenset[str] = frozenset()
    ids: dict[str | int, int] = {}
    start, unit = 0, place.rpartition(" ")[2]
    for number, given in rows:
        try:
            row = given if plan is None else plan.applied(given)
            if not made:
                start, names = number, frozenset(row)
                check_names(names)
            elif row.keys() != names:
                raise _mixed(row, names, f"{unit} {start}")
            if "id" in row:
                _check_id(row["id"], number, unit, ids)
            made.append(make(row, len(made), f"{place} {number}"))
        except DataError as error:
            raise DataError(f"{source}, {unit} {number}: {error.what}", error.why, error.fix) from None
    if not made:
        raise DataError(f"{source} has no rows", why="a task needs at least one prompt")
    return made


def _mixed(row: Mapping[str, Any], names: frozenset[str], first: str) -> DataError:
    missing, extra = sorted(names - row.keys()), sorted(row.keys() - names)
    what = (
        f"there is no column {missing[0]!r}, which {first} has"
        if missing
        else f"there is a column {extra[0]!r}, which {first} does not have"
    )
    return DataError(
        what,
        why="a reward function receives every column as a list over all rows",
        fix="write null where a row has no value",
    )


def _check_id(value: object, number: int, unit: str, ids: dict[str | int, int]) -> None:
    if not isinstance(value, str | int):
        raise DataError(f"the id is {json.dumps(value)}", why="an id is text or a whole number")
    earlier = ids.setdefault(value, number)
    if earlier != number:
        raise DataError(
            f"the id {value!r} is also at {unit} {earlier}",
            why="an id must be unique",
            fix="remove one of the two rows, or the column 'id'",
        )


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of each line that is not blank, from 1, and its object.

    Raises:
        DataError: the file cannot be read, or a line is no object of JSON.
    """
    decoder = _decoder()
    for number, line in _lines(path):
        try:
            row = decoder.decode(line.decode("utf-8"))
        except DataError as error:
            raise DataError(f"{path}, line {number}: {error.what}", error.why, error.fix) from None
        except (ValueError, RecursionError) as error:
            raise _broken(f"{path}, line {number}", line, error) from None
        if not isinstance(row, dict):
            raise DataError(
                f"{path}, line {number}: there is {_excerpt(line)}",
                why="a row must be a JSON object of column names and values",
            )
        yield number, row


def json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number, from 1, and the object of each row of a file of JSON lines, or of one JSON list.

    Raises:
        DataError: see ``json_lines``.
    """
    with path.open("rb") as file:
        is_list = file.read(64).removeprefix(_MARK).lstrip().startswith(b"[")
    if not is_list:
        yield from json_lines(path)
        return
    FileBounds(path, size := path.stat().st_size, is_packed=False).require(size, size)
    text = path.read_bytes().removeprefix(_MARK)
    try:
        rows = _decoder().decode(text.decode("utf-8"))
    except DataError as error:
        raise DataError(f"{path}: {error.what}", error.why, error.fix) from None
    except (ValueError, RecursionError) as error:
        raise _broken(str(path), text, error) from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(f"{path}, row {number}: there is {shown(row)}", why="a row must be a JSON object")
        yield number, row


def _decoder() -> json.JSONDecoder:
    return json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_distinct)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the number, from 1, and the bytes of each line that is not blank."""
    try:
        size = path.stat().st_size
        room = FileBounds(path, size, is_packed=False)
        room.require(size, size)
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                text = line.removeprefix(_MARK) if number == 1 else line
                room.take(len(text), values=text.count(b",") + text.count(b"[") + text.count(b"{"))
                if text and not text.isspace():
                    yield number, text.removesuffix(b"\n")
    except (OSError, MemoryError) as error:
        why = str(error) or "a line does not fit into memory"
        raise DataError(f"{path} cannot be read", why=why) from None


def _broken(where: str, line: bytes, error: Exception) -> DataError:
    if isinstance(error, UnicodeDecodeError):
        for mark, what, command in _OTHER_FORMS:
            if line.startswith(mark):
                name = where.partition(",")[0]
                return DataError(
                    f"{where}: the file begins with 0x{mark.hex()}, and is {what}",
                    why="prompts files are UTF-8 text",
                    fix=command.format(name),
                )
        return DataError(
            f"{where}: byte {error.start + 1} is 0x{line[error.start]:02x}, which is not UTF-8",
            why="prompts files are UTF-8",
            fix="convert the file, for example with iconv -f latin1 -t utf-8",
        )
    if isinstance(error, json.JSONDecodeError):
        at = line.decode("utf-8")[max(0, error.pos - 20) : error.pos + 20]
        return DataError(f"{where}: this is not JSON, at column {error.colno}: {at!r}", why=error.msg)
    if isinstance(error, RecursionError):
        return DataError(
            f"{where}: the row is nested too deeply: {_excerpt(line)}", why="the JSON parser cannot read it"
        )
    return DataError(f"{where}: {error}", why="the row cannot be read")


def _refuse_constant(name: str) -> float:
    raise DataError(f"the row has the number {name}", why=_NO_NUMBER)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise DataError(f"the number {text} is too large", why=_NO_NUMBER)
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object, after checking that its keys are unique."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = Counter(name for name, _ in pairs)
        twice = next(name for name in found if names[name] > 1)
        why = "one of the two values would be lost silently"
        raise DataError(f"the key {twice!r} occurs twice in one object", why=why, fix="remove one of them")
    return found


def _excerpt(line: bytes) -> str:
    text = line[:60].decode("utf-8", "replace")
    return f"{text!r}..." if len(line) > 60 else repr(text)


def _parquet_rows(path: Path, inputs: Collection[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, row in parquet_rows(path, inputs):
        for name, value in row.items():
            _check_plain(value, f"{path}, row {number}: column {name!r}")
        yield number, row


def _check_plain(value: object, where: str) -> None:
    """Raise DataError for values outside JSON: dates, bytes, decimals, numbers that are not finite."""
    if isinstance(value, list):
        for item in value:
            _check_plain(item, where)
    elif isinstance(value, dict):
        for item in value.values():
            _check_plain(item, where)
    elif isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{where} has {value}", why=_NO_NUMBER)
    elif value is not None and not isinstance(value, str | int | float):
        raise DataError(
            f"{where} has a {type(value).__name__}, {value!r}",
            why="a column holds text, numbers, true or false, null, and lists and structs of them",
            fix="convert the column to text",
        )
