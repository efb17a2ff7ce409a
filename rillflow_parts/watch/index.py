"""Index: what is searched of a run's rollouts, as columns in a cache directory.

    rollouts/step-N ─ Writer.add ─> one column file for each field, text.bin, and last a record in blocks.bin
    Index ─ blocks.bin ─> steps and their rows ─> columns of any range of rows, texts of any range of steps

A block is one step. Its record is written after its columns, so a reader never sees half a block, and a
killed writer continues after the last record. Text is lower case; each row's text ends with a NUL byte.
Prompts are stored once for each prompt id.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rillflow.errors import RunDirectoryError
from rillflow.runs.rollouts import prompt_text
from rillflow_parts.watch.step_files import StepFiles

FORMAT = 1
"""Version of these files; an index of another version is built again."""
COLUMNS: Mapping[str, str] = {
    "epoch": "i4",
    "prompt": "i8",
    "sample": "i4",
    "question": "i4",
    "reward": "f4",
    "outcome": "u1",
    "finish": "u1",
    "length": "i4",
    "oldest": "i4",
    "newest": "i4",
    "end": "u4",
}
"""Columns and their types. ``question`` is the number of the prompt's text, ``end`` the end of the row's text
in its block, ``oldest`` and ``newest`` the weight versions that sampled the row.
"""
BLOCK = np.dtype(
    [("step", "i8"), ("first", "i8"), ("rows", "i8"), ("start", "i8"), ("bytes", "i8"), ("stamp", "i8")]
)
"""A step: its first row and number of rows, place and size of its text, and a stamp of its files."""
OUTCOMES = ("", "score", "abstain", "timeout", "error")
FINISHES = ("", "stop", "length", "aborted")
NUL = "\0"
UNKNOWN = 255
"""Number of an outcome or finish that is not listed."""
_HEAD, _BLOCKS, _TEXT, _QUESTIONS, _ENDS, _LOCK = (
    *("head.json", "blocks.bin", "text.bin", "questions.bin", "question_ends.bin", "writer.lock"),
)
Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedTexts:
    """Texts as they are searched: in lower case, each with a NUL byte at its end."""

    data: bytes
    """All texts."""
    ends: Array
    """End of each text, its NUL byte included."""

    @staticmethod
    def of(texts: Sequence[str]) -> PackedTexts:
        """Pack some texts."""
        joined = "".join(f"{text.replace(NUL, ' ')}{NUL}" for text in texts)
        return PackedTexts._of_lower(joined.lower().encode("utf-8", "replace"))

    @staticmethod
    def of_column(values: Array, lengths: Array) -> PackedTexts:
        """Pack a column of texts in UTF-8."""
        clean = np.where(values == 0, ord(" "), values).astype(np.uint8)
        data = np.insert(clean, np.cumsum(lengths), 0).tobytes()
        return PackedTexts._of_lower(data.decode("utf-8", "replace").lower().encode())

    @staticmethod
    def _of_lower(data: bytes) -> PackedTexts:
        return PackedTexts(data=data, ends=np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == 0) + 1)


@dataclass(frozen=True, kw_only=True)
class IndexedStep:
    """One step as the index has it."""

    columns: Mapping[str, Array]
    """Columns but ``question`` and ``end``, [rows]."""
    texts: PackedTexts
    """Text of each row that is searched."""
    prompts: Mapping[int, str]
    """Text of each prompt by its id."""


def stamp_of(files: Sequence[Path]) -> int:
    """Return a number that changes when a step's files are written again.

    Raises:
        OSError: a file was removed.
    """
    known = [file.stat() for file in files]
    return hash(tuple((each.st_mtime_ns, each.st_size, each.st_ino) for each in known)) & 0x7FFFFFFFFFFFFFFF


def read_step(
    files: Sequence[Path], token_texts: Sequence[str], known_prompts: Collection[int]
) -> IndexedStep:
    """Read the searched part of one step.

    Args:
        files: the step's files.
        token_texts: text of every token, for rows with inserted text; may be empty.
        known_prompts: ids of prompts whose text is not needed.

    Raises:
        RunDirectoryError: a file is damaged.
    """
    with StepFiles(files) as step:
        try:
            return _told(step, token_texts, known_prompts)
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise RunDirectoryError(f"{files[0]} has no rollouts", why=f"{error!r}") from None


def _told(step: StepFiles, token_texts: Sequence[str], known_prompts: Collection[int]) -> IndexedStep:
    versions, lengths = step.ragged("versions")
    starts = np.concatenate([[0], np.cumsum(lengths)])
    sampled = versions >= 0
    is_there = np.concatenate([[0], np.cumsum(sampled)])
    counts = is_there[starts[1:]] - is_there[starts[:-1]]
    valid, reward = step.numbers("valid", 1), step.numbers("rewards", np.nan)
    ids = step.ids
    columns = {
        "epoch": ids[:, 0],
        "prompt": ids[:, 1],
        "sample": ids[:, 2],
        "reward": np.where(valid > 0, reward, np.nan),
        "outcome": _numbered(step.texts("outcome"), OUTCOMES),
        "finish": _numbered(step.texts("finish"), FINISHES),
        "length": counts,
        "oldest": _reduced(np.minimum, np.where(sampled, versions, 2**31 - 1), starts, counts),
        "newest": _reduced(np.maximum, versions, starts, counts),
    }
    prompts = dict[int, str]()
    for place, prompt in enumerate(ids[:, 1].tolist()):
        if prompt not in known_prompts and prompt not in prompts:
            prompts[prompt] = prompt_text(step.row(place, ["columns"]).get("prompt"))
    inserted = _inserted(sampled, starts, counts)
    return IndexedStep(columns=columns, texts=_texts(step, inserted, token_texts), prompts=prompts)


def _texts(step: StepFiles, inserted: Sequence[int], token_texts: Sequence[str]) -> PackedTexts:
    """Return the answers; those with inserted text are whole."""
    column = None if inserted else step.packed("completion")
    if column is not None:
        return PackedTexts.of_column(*column)
    texts = step.texts("completion")
    for row in inserted:
        texts[row] = _whole_text(step, row, token_texts) or texts[row]
    return PackedTexts.of(texts)


def _reduced(how: Any, values: Array, starts: Array, counts: Array) -> Array:
    """Return the least or largest value of each row, and -1 for rows without a sampled token."""
    found = np.full(len(counts), -1, dtype=np.int64)
    has = np.flatnonzero(counts)
    if len(has):
        # A row without a value has no start of its own, so the parts of the others stay whole.
        found[has] = how.reduceat(values, starts[:-1][has])
    return found


def _inserted(sampled: Array, starts: Array, counts: Array) -> list[int]:
    """Return the rows with a token that was not sampled after one that was."""
    falls = np.flatnonzero(sampled[:-1] & ~sampled[1:])
    rows = np.searchsorted(starts, falls, "right") - 1
    return np.unique(rows[starts[rows + 1] > falls + 1]).tolist() if len(counts) else []


def _whole_text(step: StepFiles, row: int, token_texts: Sequence[str]) -> str:
    """Return the text from the first sampled token on, also what a tool or an environment inserted."""
    found = step.row(row, ["tokens", "versions"])
    first = next(place for place, version in enumerate(found["versions"]) if version >= 0)
    tokens = found["tokens"][first:]
    return "".join(token_texts[token] for token in tokens) if max(tokens) < len(token_texts) else ""


def _numbered(texts: Sequence[str], names: Sequence[str]) -> Array:
    known = {name: number for number, name in enumerate(names)}
    return np.array([known.get(text, UNKNOWN) for text in texts], dtype=np.uint8)


class Writer:
    """The only writer of an index. Close it to let another process write.

    Args:
        folder: folder of the index; made if it is missing.

    Raises:
        BlockingIOError: another process writes the index.
    """

    def __init__(self, folder: Path, run: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise
        if _head(folder).get("format") != FORMAT:
            for file in folder.glob("*.bin"):
                file.unlink()
            (folder / _HEAD).write_text(json.dumps({"format": FORMAT, "run": str(run.absolute())}))
        self.blocks = _blocks(folder)
        """Records of the steps."""
        pairs = _pairs(folder)
        _truncate(folder / _ENDS, pairs.nbytes)
        _truncate(folder / _QUESTIONS, int(pairs[-1, 1]) if len(pairs) else 0)
        self._questions = {id_: number for number, id_ in enumerate(pairs[:, 0].tolist())}
        self.cut(len(self.blocks))

    def close(self) -> None:
        """Release the index."""
        os.close(self._lock)

    @property
    def known_prompts(self) -> Collection[int]:
        """Ids of the prompts whose text is stored."""
        return self._questions.keys()

    def cut(self, count: int) -> None:
        """Keep the first ``count`` blocks."""
        kept = self.blocks[:count]
        rows, size = (int(kept["rows"].sum()), int(kept["bytes"].sum())) if len(kept) else (0, 0)
        _truncate(self._folder / _BLOCKS, count * BLOCK.itemsize)
        for name, kind in COLUMNS.items():
            _truncate(self._folder / f"{name}.bin", rows * np.dtype(kind).itemsize)
        _truncate(self._folder / _TEXT, size)
        self.blocks = kept

    def add(self, step: int, told: IndexedStep, stamp: int) -> None:
        """Append a step."""
        if told.prompts:
            self._add_questions(told.prompts)
        data, ends = told.texts.data, told.texts.ends
        questions = [self._questions[prompt] for prompt in told.columns["prompt"].tolist()]
        columns = {**told.columns, "question": np.array(questions), "end": ends}
        for name, kind in COLUMNS.items():
            _append(self._folder / f"{name}.bin", columns[name].astype(kind).tobytes())
        _append(self._folder / _TEXT, data)
        last = self.blocks[-1] if len(self.blocks) else np.zeros((), BLOCK)
        first, start = int(last["first"] + last["rows"]), int(last["start"] + last["bytes"])
        record = np.array([(step, first, len(ends), start, len(data), stamp)], dtype=BLOCK)
        _append(self._folder / _BLOCKS, record.tobytes())
        self.blocks = np.concatenate([self.blocks, record])

    def _add_questions(self, prompts: Mapping[int, str]) -> None:
        packed, file = PackedTexts.of(list(prompts.values())), self._folder / _QUESTIONS
        before = file.stat().st_size if file.exists() else 0
        _append(file, packed.data)
        pairs = np.stack([np.array(list(prompts), dtype="i8"), before + packed.ends], 1)
        _append(self._folder / _ENDS, pairs.astype("i8").tobytes())
        for prompt in prompts:
            self._questions[prompt] = len(self._questions)


class Index:
    """What is searched of a run, as far as it is written. Reads files at every call and keeps no column.

    Args:
        folder: folder of the index, which may be missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.blocks: Array = _blocks(folder) if _head(folder).get("format") == FORMAT else np.zeros(0, BLOCK)
        """Records of the steps, in order of the step."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self.blocks[-1]["first"] + self.blocks[-1]["rows"]) if len(self.blocks) else 0

    def column(self, name: str, start: int, stop: int) -> Array:
        """Return a column of rows ``start`` to ``stop`` (excluded); shorter if the index was just cut."""
        kind = np.dtype(COLUMNS[name])
        try:
            return np.fromfile(
                self._folder / f"{name}.bin", kind, count=stop - start, offset=start * kind.itemsize
            )
        except FileNotFoundError:
            return np.zeros(0, kind)

    def text(self, first: int, last: int) -> bytes:
        """Return the text of blocks ``first`` to ``last`` (included)."""
        start = int(self.blocks[first]["start"])
        size = int(self.blocks[last]["start"] + self.blocks[last]["bytes"]) - start
        with (self._folder / _TEXT).open("rb") as file:
            file.seek(start)
            return file.read(size)

    def questions(self) -> tuple[bytes, Array]:
        """Return the text of every prompt, and the end of each in it."""
        try:
            data = (self._folder / _QUESTIONS).read_bytes()
        except FileNotFoundError:
            data = b""
        ends = _pairs(self._folder)[:, 1]
        return data, ends[ends <= len(data)]

    def block_of(self, row: int) -> int:
        """Return the number of the block with a row."""
        return int(np.searchsorted(self.blocks["first"], row, "right")) - 1


def run_of(folder: Path) -> Path | None:
    """Return the run directory that an index is of; None if the folder is no index."""
    found = _head(folder).get("run")
    return Path(found) if isinstance(found, str) else None


def remove(folder: Path) -> None:
    """Delete an index, and nothing else that its folder may hold."""
    names = [*(f"{name}.bin" for name in COLUMNS), _BLOCKS, _TEXT, _QUESTIONS, _ENDS, _LOCK, _HEAD]
    with contextlib.suppress(OSError):
        for name in names:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def _head(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / _HEAD).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _blocks(folder: Path) -> Array:
    try:
        return np.fromfile(folder / _BLOCKS, BLOCK)
    except FileNotFoundError:
        return np.zeros(0, BLOCK)


def _pairs(folder: Path) -> Array:
    """Return the id and the end of every prompt, [prompts, 2]."""
    try:
        found = np.fromfile(folder / _ENDS, "i8")
    except FileNotFoundError:
        found = np.zeros(0, "i8")
    return found[: len(found) // 2 * 2].reshape(-1, 2)


def _append(file: Path, data: bytes) -> None:
    with file.open("ab") as opened:
        opened.write(data)


def _truncate(file: Path, size: int) -> None:
    if file.exists():
        os.truncate(file, size)
