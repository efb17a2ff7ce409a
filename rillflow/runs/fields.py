"""Typed access to the fields of one line; an error names the field, the file and the line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rillflow.errors import RunDirectoryError
from rillflow.runs.json_lines import JSON, Line


class Fields:
    """Fields of a line.

    Every reader raises RunDirectoryError if the field is missing or has another type.
    """

    def __init__(self, file: Path, line: Line) -> None:
        self._file = file
        self._line = line

    def has(self, name: str) -> bool:
        """Return whether the field exists and is not null."""
        return self._line.data.get(name) is not None

    def integer(self, name: str) -> int:
        """Return an integer field."""
        value = self._value(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, "an integer")
        return value

    def number(self, name: str) -> float:
        """Return a number field; for null, return the NaN or infinity that the line's notes name."""
        value = self._value(name)
        if value is None:
            return self.note(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, "a number")
        return float(value)

    def text(self, name: str) -> str:
        """Return a text field."""
        value = self._value(name)
        if not isinstance(value, str):
            raise self._wrong(name, "a text")
        return value

    def mapping(self, name: str) -> Mapping[str, JSON]:
        """Return an object field."""
        value = self._value(name)
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return value

    def value(self, name: str) -> JSON:
        """Return a field of any type; None if it is missing."""
        return self._line.data.get(name)

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a list of integers; empty if the field is missing."""
        values = self._list(name)
        if not all(isinstance(value, int) for value in values):
            raise self._wrong(name, "a list of integers")
        return tuple(values)  # type: ignore[arg-type]

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a list of numbers; empty if the field is missing."""
        values = self._list(name)
        if not all(value is None or isinstance(value, int | float) for value in values):
            raise self._wrong(name, "a list of numbers")
        return tuple(
            self.note(f"{name}[{index}]") if value is None else float(value)  # type: ignore[arg-type]
            for index, value in enumerate(values)
        )

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of texts; empty if the field is missing."""
        values = self._list(name)
        if not all(isinstance(value, str) for value in values):
            raise self._wrong(name, "a list of strings")
        return tuple(values)  # type: ignore[arg-type]

    def records(self, name: str) -> list[Fields]:
        """Return the fields of every object in a list; empty if the field is missing."""
        values = self._list(name)
        if not all(isinstance(value, dict) for value in values):
            raise self._wrong(name, "a list of objects")
        lines = [replace(self._line, data=value) for value in values if isinstance(value, dict)]
        return [Fields(self._file, line) for line in lines]

    def note(self, place: str) -> float:
        """Return the NaN or infinity that null stands for; NaN if no note names it."""
        notes = self._line.data.get("notes")
        text = notes.get(place) if isinstance(notes, dict) else None
        return float(text) if text in ("inf", "-inf") else float("nan")

    def others(self, *known: str) -> Mapping[str, JSON]:
        """Return all fields except the known ones."""
        return {key: value for key, value in self._line.data.items() if key not in known}

    def refusal(self, what: str, why: str) -> RunDirectoryError:
        """Return an error about this line, for the caller to raise."""
        return RunDirectoryError(
            f"{self._file} line {self._line.number}: {what}",
            why=why,
            fix="remove the line, or restore the file",
        )

    def _value(self, name: str) -> JSON:
        if name not in self._line.data:
            raise self.refusal(f"field {name!r} is missing", "the line is not a record of this file")
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
