"""Evidence: digests of every line and file of a run directory, so that damage is found and named.

    record a line or a file ──> its entry in digests.jsonl ──> the write itself
    damage      entries against lines and files
    recover     config, environment and finished from their entries, which hold the content too

An entry is written first, so a kill leaves at most the last entry without its write; ``mend`` drops it.
Everything else that differs was changed by something else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rillflow.errors import RunDirectoryError
from rillflow.observe import durable, layout
from rillflow.observe.json_lines import JSON, encode, read_json, read_lines

RECOVERABLE = (layout.CONFIG, layout.ENVIRONMENT, layout.FINISHED)
"""Files whose entry holds their content."""


@dataclass(frozen=True, kw_only=True)
class Damage:
    """One thing that is not as it was written."""

    place: str
    """The file, relative to the run directory; of a line its number too."""
    problem: str
    """What is wrong with it."""

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of digests.jsonl."""

    file: str
    """The file, relative to the run directory."""
    step: int | None
    """The step that it belongs to; None of a file of the whole run."""
    digest: str
    """BLAKE2b of the line or the file; empty where nothing is compared: it was removed, is lost, or is a
    checkpoint, which has a manifest."""
    lost: str
    """Why a rank could not write it; empty where it was written."""
    content: Mapping[str, JSON] | None
    """The record of a file that can be recovered."""
    text: bytes
    """The entry as it stands in the file."""

    @property
    def is_line(self) -> bool:
        """Whether it is of one line of a file."""
        return self.file in layout.LINE_FILES


def digest(data: bytes) -> str:
    """BLAKE2b of some bytes, 128 bits in hexadecimal."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class Evidence:
    """The writer of a run's digests.

    Args:
        run: its directory.
    """

    def __init__(self, run: Path) -> None:
        self._run, self._file = run, run / layout.DIGESTS

    def append(self, name: str, step: int, line: bytes) -> None:
        """Record a line, then add it at the end of a file.

        Raises:
            RunDirectoryError: it could not be written; neither is there then.
        """
        with self._entry({"file": name, "step": step, "digest": digest(line)}):
            durable.append(self._run / name, line)

    def write(self, name: str, data: bytes, record: Mapping[str, JSON] | None = None) -> None:
        """Record a file, then replace it.

        Args:
            name: relative to the run directory.
            data: its content.
            record: the same as a record, where it is to be recoverable.

        Raises:
            RunDirectoryError: it could not be written; the file has its old content.
        """
        content: dict[str, JSON] = {} if record is None else {"content": record}
        with self._entry({"file": name, "digest": digest(data), **content}):
            durable.replace(self._run / name, [data])

    def remove(self, name: str) -> None:
        """Record that a file goes, then remove it."""
        if (self._run / name).exists():
            with self._entry({"file": name}):
                (self._run / name).unlink()

    def of_rollouts(self, step: int, digests: Mapping[str, str]) -> None:
        """Record files that ranks have written, by name."""
        for name, found in digests.items():
            self._record({"file": f"{layout.ROLLOUTS}/{name}", "step": step, "digest": found})

    def of_lost_rollouts(self, step: int, why: str) -> None:
        """Record that ranks could not write a step's rollouts."""
        self._record({"file": f"{layout.ROLLOUTS}/step-{step:06d}", "step": step, "lost": why})

    def of_checkpoint(self, step: int) -> None:
        """Record that a checkpoint is whole; its manifest has the digests of its files."""
        self._record({"file": f"{layout.CHECKPOINTS}/step-{step:06d}", "step": step})

    def rewind(self, step: int) -> None:
        """Drop the entries of later steps, before what they are of is dropped."""
        found = entries(self._run)
        kept = [each.text for each in found if each.step is None or each.step <= step]
        if len(kept) < len(found):
            durable.replace(self._file, kept)

    def mend(self) -> None:
        """Drop a last entry whose write a kill prevented; take a run without entries as it is."""
        if not self._file.exists():
            self._adopt()
            return
        found = entries(self._run)
        is_torn = read_lines(self._file).torn_at is not None
        kept = found if not found or _is_written(self._run, found) else found[:-1]
        if is_torn or len(kept) < len(found):
            durable.replace(self._file, [each.text for each in kept])

    def _adopt(self) -> None:
        made: list[dict[str, JSON]] = []
        for name in layout.LINE_FILES:
            lines = read_lines(self._run / name).lines
            made += [
                {"file": name, "step": each.data.get("step"), "digest": digest(each.text)} for each in lines
            ]
        for step, files in layout.written_rollouts(self._run).items():
            for file in files:
                name, found = f"{layout.ROLLOUTS}/{file.name}", digest(file.read_bytes())
                made.append({"file": name, "step": step, "digest": found})
        for name in RECOVERABLE:
            if (self._run / name).exists():
                content, data = read_json(self._run / name), (self._run / name).read_bytes()
                made.append({"file": name, "digest": digest(data), "content": content})
        durable.replace(self._file, map(encode, made))

    def _record(self, entry: Mapping[str, JSON]) -> None:
        durable.append(self._file, encode(entry))

    @contextmanager
    def _entry(self, entry: Mapping[str, JSON]) -> Iterator[None]:
        before = self._file.stat().st_size if self._file.exists() else 0
        self._record(entry)
        try:
            yield
        except BaseException:
            durable.cut(self._file, before)
            raise


def entries(run: Path) -> list[Entry]:
    """The entries of a run's digests, in the order they were written; none where there is no file.

    Raises:
        RunDirectoryError: a line before the last is no entry.
    """
    file, found = run / layout.DIGESTS, list[Entry]()
    for line in read_lines(file).lines:
        match line.data:
            case {"file": str() as name, **rest} if _is_inside(name):
                step, content = rest.get("step"), rest.get("content")
                entry = Entry(
                    file=name,
                    step=step if isinstance(step, int) else None,
                    digest=str(rest.get("digest", "")),
                    lost=str(rest.get("lost", "")),
                    content=content if isinstance(content, dict) else None,
                    text=line.text,
                )
                found.append(entry)
            case _:
                raise RunDirectoryError(
                    f"{file} line {line.number} is no digest: {line.text[:60]!r}",
                    why="every line names a file of the run directory",
                    fix=f"restore {file}, or remove it: the run is then taken as it is",
                )
    return found


def damage(run: Path, *, is_deep: bool) -> list[Damage]:
    """Everything outside checkpoints that is not as it was written.

    Args:
        run: the run directory.
        is_deep: whether rollout files are read; else it is only seen whether they are there.

    Raises:
        RunDirectoryError: digests.jsonl is damaged, or a file cannot be read.
    """
    if not (run / layout.DIGESTS).exists():
        return [Damage(place=layout.DIGESTS, problem="missing: nothing tells whether the rest is whole")]
    found = entries(run)
    if found and not _is_written(run, found):
        found = found[:-1]  # a kill came between the entry and its write
    problems = [each for name in layout.LINE_FILES for each in _changed_lines(run, name, found)]
    newest = {each.file: each for each in found if not each.is_line}
    for name, entry in newest.items():
        if entry.digest:
            problem = _problem(run / name, entry.digest, is_read=is_deep or entry.step is None)
            problems += [Damage(place=name, problem=problem)] if problem else []
    return problems + _unknown_rollouts(run, found)


def lost(run: Path) -> list[str]:
    """What the run itself recorded as lost, each with the reason."""
    return [f"{each.file}: {each.lost}" for each in entries(run) if each.lost]


def newest_checkpoint(run: Path) -> int | None:
    """The step of the checkpoint that was completed last, whether it is there or not."""
    steps = [each.step for each in entries(run) if each.file.startswith(f"{layout.CHECKPOINTS}/")]
    return max((step for step in steps if step is not None), default=None)


def recover(run: Path) -> list[str]:
    """Write config, environment and finished again where they are not what was written; what was done."""
    told, newest = [], {each.file: each for each in entries(run) if each.file in RECOVERABLE}
    for name, entry in newest.items():
        is_unfinished = name == layout.FINISHED and not (run / name).exists()  # then the run goes on
        if entry.content is None or is_unfinished:
            continue
        problem, data = _problem(run / name, entry.digest, is_read=True), encode(entry.content, indent=2)
        if problem and digest(data) == entry.digest:
            durable.replace(run / name, [data])
            told.append(f"{name} was {problem}, and is restored from {layout.DIGESTS}")
    return told


def _changed_lines(run: Path, name: str, found: Sequence[Entry]) -> list[Damage]:
    """The lines of a file that are not the ones that were written, and those that are missing."""
    wanted = [each for each in found if each.file == name]
    if wanted and not (run / name).exists():
        return [Damage(place=name, problem=f"missing: it had {len(wanted)} lines")]
    have = [digest(line) for line in _lines(run / name)]
    known, problems, at = {each.digest for each in wanted}, list[Damage](), 0
    for entry in wanted:
        if at < len(have) and have[at] == entry.digest:
            at += 1
        elif at < len(have) and have[at] not in known:
            problems.append(Damage(place=f"{name} line {at + 1} (step {entry.step})", problem="changed"))
            at += 1
        else:
            problems.append(Damage(place=f"{name} (step {entry.step})", problem="a line is missing"))
    strange = "the run did not write this line"
    more = range(at, len(have))
    return problems + [Damage(place=f"{name} line {number + 1}", problem=strange) for number in more]


def _unknown_rollouts(run: Path, found: Sequence[Entry]) -> list[Damage]:
    """Rollout files without an entry; those of steps after the last entry may be on their way."""
    known = {each.file for each in found}
    recorded = max((each.step or 0 for each in found if each.file.startswith(layout.ROLLOUTS)), default=0)
    there = layout.written_rollouts(run).items()
    names = [f"{layout.ROLLOUTS}/{file.name}" for step, files in there for file in files if step <= recorded]
    strange = "the run did not record this file"
    return [Damage(place=name, problem=strange) for name in names if name not in known]


def _is_written(run: Path, found: Sequence[Entry]) -> bool:
    """Whether the last entry was followed by its write; without, its file is as the entry before has it."""
    last, same = found[-1], [each for each in found if each.file == found[-1].file]
    if last.is_line:
        whole = [digest(line) for line in _lines(run / last.file) if line.endswith(b"\n")]
        return whole[-1:] == [last.digest] or len(whole) >= len(same)
    before = same[-2].digest if len(same) > 1 else ""
    if not last.digest or not (run / last.file).exists():
        return not last.digest or bool(before)
    return digest((run / last.file).read_bytes()) != before or last.digest == before


def _problem(file: Path, expected: str, *, is_read: bool) -> str:
    """What is wrong with a file; empty where nothing is."""
    if not file.is_file():
        return "missing"
    return "changed" if is_read and digest(file.read_bytes()) != expected else ""


def _lines(file: Path) -> list[bytes]:
    if not file.exists():
        return []
    with file.open("rb") as opened:
        return opened.readlines()


def _is_inside(name: str) -> bool:
    """Whether a name stays below the run directory."""
    return not Path(name).is_absolute() and ".." not in Path(name).parts
