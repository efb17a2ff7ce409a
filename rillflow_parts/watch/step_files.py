"""Step files: read single rows and single columns of one step's rollouts, without the rest of its files.

    step-000012-0001-of-0002.safetensors ─┐
    step-000012-0002-of-0002.safetensors ─┴─ StepFiles ─┬─ column: one value for each row
                                                        └─ row: every value of one row

Rows are numbered as ``runs/rollouts.py`` joins them: the rows of the parts with tokens, in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from rillflow.errors import RunDirectoryError
from rillflow.runs.rollouts import NAMES, spoken_columns

Array = npt.NDArray[Any]
_STORED = {shown: stored for stored, shown in NAMES.items()}


class _Part:
    """One file, open. Reading raises RunDirectoryError for a damaged one."""

    def __init__(self, path: Path, file: Any) -> None:
        self._path, self._file = path, file
        self.keys = frozenset(file.keys())
        self.names = {key.partition(":")[0] for key in self.keys} - {"ids"}

    @cached_property
    def ids(self) -> Array:
        """[rows, 3] epoch, prompt and sample of every row."""
        return self.whole("ids")

    def whole(self, key: str) -> Array:
        """Return a tensor."""
        with _readable(self._path):
            found: Array = self._file.get_tensor(key)
        return found

    def ends(self, name: str) -> Array:
        """[rows + 1] bounds of each row's values of a ragged column."""
        return np.concatenate([[0], np.cumsum(self.whole(f"{name}:lengths"))])

    def value(self, name: str, row: int) -> Any:
        """Return one row's value of a column: numbers, a text, or a number."""
        with _readable(self._path):
            return self._value(name, row)

    def _value(self, name: str, row: int) -> Any:
        if f"{name}:values" in self.keys:
            start, stop = self.ends(name)[row : row + 2].tolist()
            held = self._file.get_slice(f"{name}:values")
            is_text = held.get_dtype() == "U8"
            if start == stop:  # the library refuses an empty slice at the end
                return "" if is_text else []
            values = held[start:stop]
            return values.tobytes().decode("utf-8", "replace") if is_text else values.tolist()
        return self._file.get_slice(f"{name}:")[row : row + 1].tolist()[0]


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn the errors of a damaged or missing file into the package's own."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RunDirectoryError(f"cannot read {path}", why=str(error)) from None


class StepFiles(ExitStack):
    """The open files of one step.

    Example:
        with StepFiles(layout.rollout_files(run)[12]) as step:
            step.row(0)["completion"]

    Raises:
        RunDirectoryError: a file is damaged, or was removed.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__()
        try:
            self._parts = [self._opened(file) for file in files]
        except RunDirectoryError:
            self.close()
            raise
        self._main = [part for part in self._parts if "tokens" in part.names]

    def _opened(self, file: Path) -> _Part:
        with _readable(file):
            return _Part(file, self.enter_context(safe_open(file, "numpy")))

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def ids(self) -> Array:
        """[rows, 3] epoch, prompt and sample of every row."""
        found = [part.ids for part in self._main]
        return np.concatenate(found) if found else np.zeros((0, 3), dtype=np.int64)

    def numbers(self, name: str, default: float) -> Array:
        """Return a column of numbers, [rows]; rows without one have the default."""
        found = np.full(len(self), default)
        for part, own, theirs in self._places(name):
            found[own] = part.whole(f"{name}:")[theirs]
        return found

    def ragged(self, name: str) -> tuple[Array, Array]:
        """Return the values of a ragged column and the length of each row; rows without one have length 0.

        Only for columns of the sampler, which are in the parts with tokens.
        """
        values = [part.whole(f"{name}:values") for part in self._main if name in part.names]
        lengths = [part.whole(f"{name}:lengths") for part in self._main if name in part.names]
        if not values:
            return np.zeros(0, dtype=np.uint8), np.zeros(len(self), dtype=np.int64)
        return np.concatenate(values), np.concatenate(lengths)

    def packed(self, name: str) -> tuple[Array, Array] | None:
        """Return a column of texts as bytes and lengths if one file has it, in the order of the rows."""
        places = self._places(name)
        if len(places) != 1 or not np.array_equal(places[0][1], np.arange(len(self))):
            return None
        part, own, theirs = places[0]
        is_same = np.array_equal(own, theirs) and len(theirs) == len(part.ids)
        return (part.whole(f"{name}:values"), part.whole(f"{name}:lengths")) if is_same else None

    def texts(self, name: str) -> list[str]:
        """Return a column of texts, one for each row; rows without one have an empty text."""
        found = [""] * len(self)
        for part, own, theirs in self._places(name):
            data, ends = part.whole(f"{name}:values").tobytes(), part.ends(name).tolist()
            for place, row in zip(own.tolist(), theirs.tolist(), strict=True):
                found[place] = data[ends[row] : ends[row + 1]].decode("utf-8", "replace")
        return found

    def row(self, place: int, names: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the values of one row by name, as ``rillflow.runs.reader`` names and converts them.

        Args:
            place: number of the row.
            names: wanted columns; None for all.
        """
        wanted = None if names is None else {_STORED.get(name, name) for name in names} | {"valid"}
        found: dict[str, list[Any]] = {}
        for part in self._parts:
            held = part.names if wanted is None else part.names & wanted
            row = self._own_row(part, place) if held else None
            if row is not None:
                found |= {NAMES.get(name, name): [part.value(name, row)] for name in held}
        if "valid" in found and "reward" not in found:
            del found["valid"]
        if "penalised_reward" in found and "reward" not in found:
            del found["penalised_reward"]
        one = {name: values[0] for name, values in spoken_columns(found).items()}
        epoch, prompt, sample = self.ids[place].tolist()
        return {"epoch": epoch, "prompt_id": prompt, "sample": sample, **one}

    def place_of(self, epoch: int, prompt: int, sample: int) -> int | None:
        """Return the number of a row by its id, or None."""
        found = np.flatnonzero((self.ids == (epoch, prompt, sample)).all(1))
        return int(found[0]) if len(found) else None

    def group(self, epoch: int, prompt: int) -> list[int]:
        """Return the numbers of the rows of one prompt in one epoch."""
        return np.flatnonzero((self.ids[:, :2] == (epoch, prompt)).all(1)).tolist()

    def _own_row(self, part: _Part, place: int) -> int | None:
        """Return the row of a part that is row ``place`` of the step, or None."""
        before = 0
        for main in self._main:
            if main is part:
                return place - before if 0 <= place - before < len(part.ids) else None
            before += len(main.ids)
        found = np.flatnonzero((part.ids == self.ids[place]).all(1))
        return int(found[0]) if len(found) else None

    def _places(self, name: str) -> list[tuple[_Part, Array, Array]]:
        """Return the parts that have a column, with the rows of the step and their rows in the part."""
        found, before = [], 0
        for part in self._main:
            if name in part.names:
                rows = np.arange(len(part.ids))
                found.append((part, before + rows, rows))
            before += len(part.ids)
        for part in self._parts:
            if name in part.names and part not in self._main:
                known = {row: place for place, row in enumerate(map(tuple, self.ids.tolist()))}
                pairs = [
                    (known[row], at) for at, row in enumerate(map(tuple, part.ids.tolist())) if row in known
                ]
                places = np.array(pairs, dtype=np.int64).reshape(-1, 2)
                found.append((part, places[:, 0], places[:, 1]))
        return found
