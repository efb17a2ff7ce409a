"""Load: turn a TOML file and ``--set`` settings into a checked record, or list every problem in them.

file ─ read_toml ─> data ─ apply_overrides ─> data ─ validate ─> record
       line, column        "policy.lr=1e-5"          all problems at once
"""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeVar

from pydantic import ValidationError

from rillflow.config.problems import explain, shown, together
from rillflow.config.schema import Data, Section
from rillflow.errors import ConfigError, nearest

S = TypeVar("S", bound=Section)
_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


def read_toml(path: Path, kind: str = "recipe") -> dict[str, Any]:
    """Return the tables of a TOML file; ``kind`` names the file in errors.

    Raises:
        ConfigError: the file is missing, not a regular file, not UTF-8 or not TOML; with line and column.
    """
    text = _decoded(path, _content(path, kind))
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(path, text, str(error)) from error
    except RecursionError as error:
        raise ConfigError(
            f"{path} is not a {kind}", why="its lists or tables are nested too deeply"
        ) from error


def validate(schema: type[S], data: Data, title: str) -> S:
    """Return the data as a record.

    Args:
        schema: the record's class.
        data: plain data.
        title: name of the data in an error.

    Raises:
        ConfigError: everything that is wrong with the data.
    """
    frozen = _with_tuples(data)
    try:
        return schema.model_validate(frozen)
    except ValidationError as error:
        problems = [explain(detail, schema, frozen) for detail in error.errors(include_url=False)]
        raise together(problems, title) from error


def _with_tuples(value: Any) -> Any:
    """Convert TOML's lists to the tuples that frozen records hold, and paths to texts."""
    if isinstance(value, Mapping):
        return {name: _with_tuples(entry) for name, entry in value.items()}
    if isinstance(value, PurePath):
        return str(value)
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def _content(path: Path, kind: str) -> bytes:
    if path.is_dir():
        inside = sorted(path.glob("*.toml"))
        raise ConfigError(
            f"{path} is a directory",
            why=f"a {kind} is a TOML file",
            fix=f"give {inside[0]}" if inside else "give the TOML file's path",
        )
    if not path.exists():
        beside = [other.name for other in path.parent.glob("*.toml")] if path.parent.is_dir() else []
        raise ConfigError(
            f"{path} does not exist",
            why=f"{path.absolute().parent} has no {path.name!r}",
            fix=f"in that folder: {nearest(path.name, beside)}" if beside else f"give the path of a {kind}",
        )
    if not path.is_file():
        raise ConfigError(f"{path} is not a regular file", why=f"a {kind} is a TOML file")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}", why=str(error.strerror)) from error


def _decoded(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        raise ConfigError(
            f"{path} line {line}, byte {column}: 0x{content[error.start]:02x} is not UTF-8",
            why="TOML is written in UTF-8",
            fix=f"save the file as UTF-8, for example: iconv -f latin1 -t utf-8 {path}",
        ) from error


def _syntax_error(path: Path, text: str, message: str) -> ConfigError:
    match = _PLACE.search(message)
    reason = message[: match.start()] if match else message
    lines = text.splitlines() or [""]
    line, column = (int(match[1]), int(match[2])) if match and match[1] else (len(lines), len(lines[-1]) + 1)
    shown = lines[line - 1] if line <= len(lines) else ""
    return ConfigError(
        f"{path} line {line}, column {column}: {reason}",
        why=f"the line is: {shown.strip()[:100]}",
        fix='write key = value, with strings in "quotes" and sections in [brackets]',
    )


NONE = "none"
"""Word that removes an optional setting or section."""


@dataclass(frozen=True, kw_only=True)
class Override:
    """One setting from the command line.

    Example:
        Override(path=("policy", "lr"), value=1e-5)
    """

    path: tuple[str, ...]
    """Key path, from the root."""
    value: Any
    """TOML value, or None to remove the setting."""

    @property
    def dotted(self) -> str:
        """Key in the user's spelling."""
        return ".".join(self.path)


def parse_override(text: str) -> Override:
    """Read ``a.b=c``: c is a TOML value, the word none, or else plain text.

    Raises:
        ConfigError: there is no ``=``, or an empty key.
    """
    key, equals, value = text.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        raise ConfigError(
            f"--set {text}",
            why="it is not of the form section.key=value",
            fix="write for example --set policy.lr=1e-5",
        )
    return Override(path=path, value=_value(value.strip()))


def _value(text: str) -> Any:
    if text == NONE:
        return None
    try:
        table = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    value = table["value"]
    if len(table) > 1 or isinstance(value, datetime.date | datetime.time):
        return text  # no setting is a date, and a line break starts no second setting
    return value


def apply_overrides(data: Data, overrides: Sequence[Override]) -> dict[str, Any]:
    """Return the data with every override applied; the last one of a key wins.

    Raises:
        ConfigError: an override treats a value as a section.
    """
    result = dict(data)
    for override in overrides:
        result = _placed(result, override, 0)
    return result


def _placed(data: Data, override: Override, depth: int) -> dict[str, Any]:
    name = override.path[depth]
    if depth == len(override.path) - 1:
        return {**data, name: override.value}
    inner = data[name] if name in data and data[name] is not None else {}
    if not isinstance(inner, Mapping):
        place = ".".join(override.path[: depth + 1])
        raise ConfigError(
            f"--set {override.dotted}={shown(override.value)}",
            why=f"{place} is the value {shown(inner)}, not a section",
            fix=f"write --set {place}=...",
        )
    return {**data, name: _placed(inner, override, depth + 1)}
