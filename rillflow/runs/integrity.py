"""Integrity: digests of every line and file of a run directory, to detect and locate damage.

    record a line or a file ──> its entry in digests.jsonl ──> the write itself
    damage      compare entries with lines and files
    recover     restore config, environment and finished from their entries, which include the content

The entry is written first, so a kill leaves at most the last entry without its write; ``mend`` drops it.
Any other difference was made by something other than the run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from rillflow.errors import RunDirectoryError
from rillflow.runs import durable, layout
from rillflow.runs.json_lines import JSON, decode, encode, read_json, read_lines

RECOVERABLE = (layout.CONFIG, layout.ENVIRONMENT, layout.FINISHED)
"""Files whose entry includes their content."""


@dataclass(frozen=True, kw_only=True)
class Damage:
    """One line or file that differs from its record."""

    place: str
    """File, relative to the run directory, with the line number for a line."""
    problem: str
    """Description of the difference."""

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of digests.jsonl."""

    file: str
    """File, relative to the run directory."""
    step: int | None = None
    """Step of the line or file; None for a file of the whole run."""
    digest: str = ""
    """BLAKE2b of the line or the file. Empty for a removed file, a lost file, and a checkpoint, which has its
    own manifest.
    """
    lost: str = ""
    """Reason why a rank could not write the file; empty for a written file."""
    content: Mapping[str, JSON] | None = None
    """Content of a recoverable file as a record."""
    text: bytes
    """Entry as bytes of digests.jsonl."""

    @property
    def is_line(self) -> bool:
        """Whether the entry is for one line of a file."""
        return self.file in layout.LINE_FILES


def digest(data: bytes) -> str:
    """Return the 128-bit BLAKE2b of some bytes in hexadecimal."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class Evidence:
    """Writer of a run's digests.

    Args:
        run: the run directory.
    """

    def __init__(self, run: Path) -> None:
        self._run, self._file = run, run / layout.DIGESTS

    def append(self, name: str, step: int | None, line: bytes, *, is_flushed: bool = False) -> None:
        """Record a line, then append it to a file.

        Args:
            name: path relative to the run directory.
            step: step of the line; None for a line of the whole run.
            line: the line.
            is_flushed: whether a loss of power must keep it: its entry is on the disk first.

        Raises:
            RunDirectoryError: the write failed; then neither the line nor its entry is there.
        """
        with self._entry({"file": name, "step": step, "digest": digest(line)}):
            if is_flushed:
                self._flush(layout.DIGESTS)
            durable.append(self._run / name, line)
        if is_flushed:
            self._flush(name)

    def flush(self) -> None:
        """Wait until all lines are on the disk, so that a loss of power keeps them.

        Raises:
            RunDirectoryError: the disk fails.
        """
        for name in (layout.DIGESTS, *layout.LINE_FILES):
            self._flush(name)

    def write(self, name: str, data: bytes, record: Mapping[str, JSON] | None = None) -> None:
        """Record a file, then replace it.

        Args:
            name: path relative to the run directory.
            data: content of the file.
            record: the content as a record, to make the file recoverable.

        Raises:
            RunDirectoryError: the write failed; the file keeps its old content.
        """
        content: dict[str, JSON] = {} if record is None else {"content": record}
        with self._entry({"file": name, "digest": digest(data), **content}):
            durable.replace(self._run / name, [data])

    def remove(self, name: str) -> None:
        """Record the removal of a file, then remove it."""
        if (self._run / name).exists():
            with self._entry({"file": name}), durable.writing(self._run / name):
                (self._run / name).unlink()

    def of_rollouts(self, step: int, digests: Mapping[str, str]) -> None:
        """Record files that ranks have written, by name."""
        for name, found in digests.items():
            self._record({"file": f"{layout.ROLLOUTS}/{name}", "step": step, "digest": found})

    def of_lost_rollouts(self, step: int, why: str) -> None:
        """Record that ranks could not write a step's rollouts."""
        self._record({"file": f"{layout.ROLLOUTS}/step-{step:06d}", "step": step, "lost": why})

    def of_checkpoint(self, step: int) -> None:
        """Record that a checkpoint is complete; its manifest has the digests of its files."""
        self._record({"file": f"{layout.CHECKPOINTS}/step-{step:06d}", "step": step})

    def rewind(self, step: int) -> None:
        """Drop the entries of later steps; call this before dropping their lines and files."""
        found = entries(self._run)
        kept = [each.text for each in found if each.step is None or each.step <= step]
        if len(kept) < len(found):
            durable.replace(self._file, kept)

    def keep_lines(self, name: str, count: int | None = None) -> None:
        """Keep the first ``count`` lines of a file, and none after one that is damaged or has no entry."""
        lines, found = read_lines(self._run / name).lines, entries(self._run)
        own = [each for each in found if each.file == name]
        pairs = zip(lines, own, strict=False)
        whole = [*takewhile(lambda pair: digest(pair[0].text) == pair[1].digest, pairs)][:count]
        dropped = {id(each) for each in own[len(whole) :]}
        if dropped:
            durable.replace(self._file, [each.text for each in found if id(each) not in dropped])
        if len(lines) > len(whole):
            durable.replace(self._run / name, [line.text for line, _ in whole])

    def mend(self) -> None:
        """Drop a last entry whose write did not happen; create missing entries from the current files."""
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

    def _flush(self, name: str) -> None:
        if (self._run / name).exists():
            with durable.writing(self._run / name):
                durable.flush(self._run / name)

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
    """Return the entries of a run's digests in writing order; none without the file.

    Raises:
        RunDirectoryError: a line before the last is not an entry.
    """
    file, found = run / layout.DIGESTS, list[Entry]()
    for line in read_lines(file).lines:
        name = line.data.get("file")
        if not isinstance(name, str) or not _is_inside(name):
            raise RunDirectoryError(
                f"{file} line {line.number} is not a digest: {line.text[:60]!r}",
                why="every line must have the digest of a file in the run directory",
                fix=f"restore {file}, or remove it to accept the run's files unverified",
            )
        found.append(decode(Entry, line, text=line.text))
    return found


def damage(run: Path, *, is_deep: bool) -> list[Damage]:
    """Return every difference from the record, outside checkpoints.

    Args:
        run: the run directory.
        is_deep: whether to read rollout files; otherwise only check that they exist.

    Raises:
        RunDirectoryError: digests.jsonl is damaged, or a file cannot be read.
    """
    if not (run / layout.DIGESTS).exists():
        return [Damage(place=layout.DIGESTS, problem="missing: the other files cannot be verified")]
    found = entries(run)
    if found and not _is_written(run, found):
        found = found[:-1]  # the process was killed between the entry and its write
    problems = [each for name in layout.LINE_FILES for each in _changed_lines(run, name, found)]
    newest = {each.file: each for each in found if not each.is_line}
    for name, entry in newest.items():
        if entry.digest:
            problem = _problem(run / name, entry.digest, is_read=is_deep or entry.step is None)
            problems += [Damage(place=name, problem=problem)] if problem else []
    return problems + _unknown_rollouts(run, found)


def lost(run: Path) -> list[str]:
    """Return the files that the run itself recorded as lost, each with the reason."""
    return [f"{each.file}: {each.lost}" for each in entries(run) if each.lost]


def newest_checkpoint(run: Path) -> int | None:
    """Return the step of the newest completed checkpoint, even if its folder is gone."""
    steps = [each.step for each in entries(run) if each.file.startswith(f"{layout.CHECKPOINTS}/")]
    return max((step for step in steps if step is not None), default=None)


def recover(run: Path) -> list[str]:
    """Restore damaged config, environment and finished files, and return a line for each restored file."""
    told, newest = [], {each.file: each for each in entries(run) if each.file in RECOVERABLE}
    for name, entry in newest.items():
        is_unfinished = name == layout.FINISHED and not (run / name).exists()  # an unfinished run continues
        if entry.content is None or is_unfinished:
            continue
        problem, data = _problem(run / name, entry.digest, is_read=True), encode(entry.content, indent=2)
        if problem and digest(data) == entry.digest:
            durable.replace(run / name, [data])
            told.append(f"{name} was {problem} and is restored from {layout.DIGESTS}")
    return told


def read_recovered(run: Path, name: str) -> Mapping[str, JSON]:
    """Return the content of a JSON file, or that of its digest if the file is damaged.

    Args:
        run: the run directory.
        name: one of ``RECOVERABLE``.

    Raises:
        RunDirectoryError: the file cannot be read, and its content was not recorded.
    """
    found = [each for each in entries(run) if each.file == name and each.content is not None]
    if found:
        content, newest = found[-1].content, found[-1]
        assert content is not None, "entries without content are left out"
        data = encode(content, indent=2)
        if digest(data) == newest.digest and _problem(run / name, newest.digest, is_read=True):
            return content
    return read_json(run / name)


def _changed_lines(run: Path, name: str, found: Sequence[Entry]) -> list[Damage]:
    """Return the lines of a file that changed, are missing, or were added."""
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
    """Return rollout files without an entry.

    Ignore steps after the last entry, which may still be written, and steps whose rollouts are lost in part.
    """
    known, partly = {each.file for each in found}, {each.step for each in found if each.lost}
    recorded = max((each.step or 0 for each in found if each.file.startswith(layout.ROLLOUTS)), default=0)
    there = layout.written_rollouts(run).items()
    whole = [files for step, files in there if step <= recorded and step not in partly]
    names = [f"{layout.ROLLOUTS}/{file.name}" for files in whole for file in files]
    strange = "the run did not record this file"
    return [Damage(place=name, problem=strange) for name in names if name not in known]


def _is_written(run: Path, found: Sequence[Entry]) -> bool:
    """Return whether the write of the last entry happened.

    Otherwise the file still matches the entry before.
    """
    last, same = found[-1], [each for each in found if each.file == found[-1].file]
    if last.is_line:
        whole = [digest(line) for line in _lines(run / last.file) if line.endswith(b"\n")]
        return whole[-1:] == [last.digest] or len(whole) >= len(same)
    before = same[-2].digest if len(same) > 1 else ""
    if not last.digest or not (run / last.file).exists():
        return not last.digest or bool(before)
    return digest((run / last.file).read_bytes()) != before or last.digest == before


def _problem(file: Path, expected: str, *, is_read: bool) -> str:
    """Return the difference of a file from its digest in words; empty without one."""
    if not file.is_file():
        return "missing"
    return "changed" if is_read and digest(file.read_bytes()) != expected else ""


def _lines(file: Path) -> list[bytes]:
    if not file.exists():
        return []
    with file.open("rb") as opened:
        return opened.readlines()


def _is_inside(name: str) -> bool:
    """Return whether a name stays inside the run directory."""
    return not Path(name).is_absolute() and ".." not in Path(name).parts
