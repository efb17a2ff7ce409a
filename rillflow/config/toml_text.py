"""TOML text: write tables so that reading them gives the same values.

tables ─ toml_text ─> text ─ tomllib ─> the same tables
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rillflow.errors import ConfigError

if TYPE_CHECKING:
    from rillflow.config.schema import Data

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def toml_text(tables: Data, comment: str = "") -> str:
    """Return the tables as TOML, values before inner tables; None is left out.

    Args:
        tables: texts, booleans, numbers, lists and tables of these.
        comment: text of the first lines.

    Raises:
        ConfigError: TOML has no form for a value, or a number is not finite.
    """
    head = [f"# {line}".rstrip() for line in comment.splitlines()]
    return "\n".join([*head, *_lines(tables, ())]).strip("\n") + "\n"


def inline_text(value: object, place: str = "the value") -> str:
    """Return a value in one line. Example: ``inline_text({"main": {"tp": 2}}) == "{main = {tp = 2}}"``.

    Args:
        value: text, boolean, number, list or table; entries of a table that are None are left out.
        place: name of the value in errors.

    Raises:
        ConfigError: TOML has no form for it, or a number is not finite.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    if isinstance(value, Mapping):
        kept = {name: entry for name, entry in value.items() if entry is not None}
        return (
            f"{{{', '.join(f'{_key(name)} = {inline_text(entry, name)}' for name, entry in kept.items())}}}"
        )
    if isinstance(value, Sequence):
        return f"[{', '.join(inline_text(entry, place) for entry in value)}]"
    raise ConfigError(
        f"{place} is {value!r}", why="Rillflow writes strings, booleans, finite numbers, lists and tables"
    )


def _lines(table: Data, path: tuple[str, ...]) -> Iterator[str]:
    """Yield a table's own values, then its inner tables."""
    values = {name: value for name, value in table.items() if not isinstance(value, Mapping)}
    inner = {name: value for name, value in table.items() if isinstance(value, Mapping)}
    if path and (values or not inner):
        yield ""
        yield f"[{'.'.join(map(_key, path))}]"
    for name, value in values.items():
        if value is not None:
            yield f"{_key(name)} = {inline_text(value, '.'.join((*path, name)))}"
    for name, value in inner.items():
        yield from _lines(value, (*path, name))


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def _text(value: str) -> str:
    # A JSON string is a TOML string, except for DEL, which TOML requires to be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
