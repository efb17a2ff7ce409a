"""Overrides: apply ``--set a.b=c`` to a recipe's data.

"policy.lr=1e-5" ─ parse ─> key and value ─ apply ─> new data; the old stays as it was
"""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rillflow.config.problems import shown
from rillflow.config.schema import Data
from rillflow.errors import ConfigError

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
        """Key as the user wrote it."""
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
