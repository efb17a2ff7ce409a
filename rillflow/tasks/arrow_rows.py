"""Arrow rows: rows of an Arrow batch as the plain values that a JSON file would give.

    Arrow                                        plain
    null that fills a struct, in messages/tools  left out: all structs of a column have the same fields
    null of a JSON value                         null
    float32 0.1                                  0.1, not 0.10000000149011612
    arrow.json '{"a": 1}'                        {"a": 1}
    dictionary, large and fixed-size lists       their values

Only columns that a chat template reads lose nulls: a reward may ask for every field of its struct.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from rillflow.tasks.example import TEMPLATE_ARGUMENTS

TEMPLATE_INPUTS = (
    *("prompt", "completion", "chosen", "rejected", "messages", "tools"),
    TEMPLATE_ARGUMENTS,
)
"""Columns of a task that a chat template may read."""
_JSON = "arrow.json"


def plain_rows(batch: Any, inputs: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a record batch; values that JSON lacks stay as pyarrow gives them.

    Args:
        batch: a ``pyarrow.RecordBatch``.
        inputs: names of the columns that a chat template may read.

    Raises:
        ValueError: a JSON value cannot be parsed.
    """
    columns = list[list[Any]]()
    for field, column in zip(batch.schema, batch.columns, strict=True):
        read = _reader(field.type, fills=field.name not in inputs)
        columns.append(column.to_pylist() if read is None else [read(value) for value in column.to_pylist()])
    names = batch.schema.names
    for row in zip(*columns, strict=True):
        yield dict(zip(names, row, strict=True))


def without_nulls(value: Any) -> Any:
    """Return a value without the null fields of its objects, at any depth; null items of lists stay."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def is_plain(kind: Any) -> bool:
    """Return whether an Arrow type has JSON's values: text, numbers, booleans, null, lists and structs."""
    from pyarrow import types

    if _is_json(kind):
        return True
    if types.is_struct(kind):
        return all(is_plain(kind.field(place).type) for place in range(kind.num_fields))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return is_plain(kind.value_type)
    if types.is_dictionary(kind):
        return is_plain(kind.value_type)
    tests = (types.is_string, types.is_large_string, types.is_boolean, types.is_integer, types.is_floating)
    return any(test(kind) for test in (*tests, types.is_null, types.is_string_view))


def _is_json(kind: Any) -> bool:
    from pyarrow import BaseExtensionType

    return isinstance(kind, BaseExtensionType) and kind.extension_name == _JSON


def _reader(kind: Any, *, fills: bool) -> Callable[[Any], Any] | None:
    """Return what turns a value of an Arrow type into a plain one; None if pyarrow's value is right.

    Args:
        kind: the type.
        fills: whether structs keep the nulls that fill them. Nulls of a JSON value are its own.
    """
    from pyarrow import types

    if _is_json(kind):
        return lambda value: value if value is None else json.loads(value)
    if types.is_float16(kind) or types.is_float32(kind):
        return _shortest
    if types.is_dictionary(kind):
        return _reader(kind.value_type, fills=fills)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        item = _reader(kind.value_type, fills=fills)
        return item and (lambda values: values if values is None else [item(value) for value in values])
    if types.is_struct(kind):
        fields = [kind.field(place) for place in range(kind.num_fields)]
        found = {field.name: _reader(field.type, fills=fills) for field in fields}
        readers = {name: read for name, read in found.items() if read is not None}
        return (lambda struct: _struct(struct, readers, fills=fills)) if readers or not fills else None
    return None


def _struct(
    struct: dict[str, Any] | None, readers: Mapping[str, Callable[[Any], Any]], *, fills: bool
) -> dict[str, Any] | None:
    if struct is None:
        return None
    return {
        name: readers[name](value) if name in readers else value
        for name, value in struct.items()
        if fills or value is not None
    }


def _shortest(value: float | None) -> float | None:
    """Return the number with the shortest decimal that names the same float32."""
    import numpy

    return None if value is None else float(str(numpy.float32(value)))
