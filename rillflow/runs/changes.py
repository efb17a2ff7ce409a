"""Changes: compare the settings of a resumed run with those of its first start."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rillflow.errors import RunDirectoryError
from rillflow.runs import layout
from rillflow.runs.json_lines import JSON, encode, read_json
from rillflow.runs.old_settings import present

_ABSENT = "(not set)"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One setting that differs."""

    key: str
    """Dotted key of the setting."""
    old: JSON
    """Value in the run directory."""
    new: JSON
    """Value of this start."""

    def __str__(self) -> str:
        return f"{self.key}: {self.old!r} -> {self.new!r}"


def changes(path: Path, config: Mapping[str, JSON]) -> list[Change]:
    """Return the settings that differ between a run directory's config and this one."""
    old = _flat(dict(present(read_json(path / layout.CONFIG))))
    new = _flat(json.loads(encode(config)))
    pairs = {key: (old.get(key, _ABSENT), new.get(key, _ABSENT)) for key in {**old, **new}}
    return [Change(key=key, old=was, new=now) for key, (was, now) in pairs.items() if was != now]


def allowed_changes(path: Path, config: Mapping[str, JSON], may_change: Iterable[str]) -> list[Change]:
    """Return the differing settings if ``may_change`` names all of them or groups above them (dotted keys).

    Raises:
        RunDirectoryError: another setting differs; the message lists all of them with old and new values.
    """
    found, names = changes(path, config), tuple(may_change)
    refused = [each for each in found if not _is_among(each.key, names)]
    if refused:
        raise RunDirectoryError(
            f"{path} has a run with another config: {'; '.join(map(str, refused))}",
            why="the run's numbers would come from two configs without any mark; "
            "docs/design/run_directory.md lists the settings that a run may change",
            fix="choose another run directory, or add --fresh to set the old one aside",
        )
    return found


def undone(config: Mapping[str, JSON], changed: Sequence[Change]) -> dict[str, JSON]:
    """Return a config as it was before some changes."""
    if not changed:
        return dict(config)
    leaves = _flat(config)
    for each in changed:
        leaves.pop(each.key, None)
    before = {**leaves, **{each.key: each.old for each in changed if each.old != _ABSENT}}
    root: dict[str, Any] = {}
    for key, value in before.items():
        *above, name = key.split(".")
        table = root
        for part in above:
            table = table.setdefault(part, {})
        table[name] = value
    return {name: _with_lists(value) for name, value in root.items()}


def _with_lists(value: Any) -> JSON:
    """Return nested tables with those whose keys are 0, 1, 2, ... as lists."""
    if not isinstance(value, dict) or not value:
        return value
    if value.keys() == {str(index) for index in range(len(value))}:
        return [_with_lists(value[str(index)]) for index in range(len(value))]
    return {name: _with_lists(inner) for name, inner in value.items()}


def _is_among(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _flat(value: JSON, prefix: str = "") -> dict[str, JSON]:
    """Return the leaves of nested mappings and lists by dotted key; empty containers are leaves too."""
    inner: Iterable[tuple[str, JSON]]
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = ((str(index), entry) for index, entry in enumerate(value))
    else:
        return {prefix: value}
    leaves: dict[str, JSON] = {}
    for key, entry in inner:
        leaves |= _flat(entry, f"{prefix}.{key}" if prefix else key)
    return leaves or {prefix: value}
