"""The fields of one line, each checked for its type, so that a wrong one is named with file and line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rillflow.errors import RunDirectoryError
from rillflow.observe.json_lines import JSON, Line


class Fields:
    """A line's fields.

    Every reader raises RunDirectoryError when the field is missing or of another type.
    """

    def __init__(self, file: Path, line: Line) -> None:
        self._file = file
        self._line = line

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._line.data.get(name) is not None

    def integer(self, name: str) -> int:
        """A whole number."""
        value = self._value(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, "an integer")
        return value

    def number(self, name: str) -> float:
        """A number; where the line has null, the NaN or infinity that its notes name."""
        value = self._value(name)
        if value is None:
            return self.note(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, "a number")
        return float(value)

    def text(self, name: str) -> str:
        """A text."""
        value = self._value(name)
        if not isinstance(value, str):
            raise self._wrong(name, "a text")
        return value

    def mapping(self, name: str) -> Mapping[str, JSON]:
        """An object."""
        value = self._value(name)
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return value

    def value(self, name: str) -> JSON:
        """The field whatever its type; null when it is not there."""
        return self._line.data.get(name)

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers; empty when the field is not there."""
        values = self._list(name)
        if not all(isinstance(value, int) for value in values):
            raise self._wrong(name, "a list of integers")
        return tuple(values)  # type: ignore[arg-type]

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of numbers; empty when the field is not there."""
        values = self._list(name)
        if not all(value is None or isinstance(value, int | float) for value in values):
            raise self._wrong(name, "a list of numbers")
        return tuple(
            self.note(f"{name}[{index}]") if value is None else float(value)  # type: ignore[arg-type]
            for index, value in enumerate(values)
        )

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts; empty when the field is not there."""
        values = self._list(name)
        if not all(isinstance(value, str) for value in values):
            raise self._wrong(name, "a list of texts")
        return tuple(values)  # type: ignore[arg-type]

    def records(self, name: str) -> list[Fields]:
        """The fields of every object of a list; none when the field is not there."""
        values = self._list(name)
        if not all(isinstance(value, dict) for value in values):
            raise self._wrong(name, "a list of objects")
        lines = [replace(self._line, data=value) for value in values if isinstance(value, dict)]
        return [Fields(self._file, line) for line in lines]

    def note(self, place: str) -> float:
        """The NaN or infinity that stood where the line has null; NaN if no note says which."""
        notes = self._line.data.get("notes")
        text = notes.get(place) if isinstance(notes, dict) else None
        return float(text) if text in ("inf", "-inf") else float("nan")

    def others(self, *known: str) -> Mapping[str, JSON]:
        """The fields that are not among these."""
        return {key: value for key, value in self._line.data.items() if key not in known}

    def refusal(self, what: str, why: str) -> RunDirectoryError:
        """An error about this line, for the caller to raise."""
        return RunDirectoryError(
            f"{self._file} line {self._line.number}: {what}",
            why=why,
            fix="remove the line, or restore the file",
        )

    def _value(self, name: str) -> JSON:
        if name not in self._line.data:
            raise self.refusal(f"field {name!r} is missing", "the line is not one of this file's records")
        return self._line.data[name]

    def _list(self, name: str) -> list[JSON]:
        value = self._line.data.get(name, [])
        if not isinstance(value, list):
            raise self._wrong(name, "a list")
        return value

    def _wrong(self, name: str, wanted: str) -> RunDirectoryError:
        return self.refusal(
            f"field {name!r} is {str(self._line.data[name])[:60]!r}", f"it should be {wanted}"
        )
