"""FakeDisk: the files of a run on a disk that fills up, and that loses data without fsync.

    the run's code ─ open, rename, remove, mkdir ... ─> Python's audit events ─> an event of the timeline
                   ─ os.fsync ────────────────────────> durable from now on

Files are real files in a folder in memory. ``restart(power=True)`` puts the folder into a state that a
journalling file system such as ext4 may have after a loss of power. Renames are durable in their order, all
of them up to the last fsync of any file. A file's bytes are durable up to its own last fsync, plus any number
of the bytes after it.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from tests.simulation.timeline import Timeline

_CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_Names = dict[str, int]
"""Inode of every file and folder, by path below the disk's folder; folders have inode 0."""


class FakeDisk:
    """A disk below a folder.

    Args:
        folder: an existing folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_full = False
        """True if every write fails with "no space left"."""
        self.fails_once = False
        """True if the next write fails with an input/output error."""
        self._root = str(folder)
        self._flushed: dict[int, bytes] = {}
        self._gone: dict[int, bytes] = {}
        self._since: list[_Names] = [self._names()]
        """Names at the last fsync, and before every change since."""

    @contextmanager
    def watched(self, timeline: Timeline) -> Iterator[None]:
        """Make every change below the folder an event of a timeline."""
        before, real = _ACTIVE.pop() if _ACTIVE else None, os.fsync
        assert before is None, "one disk is watched at a time"

        def fsync(descriptor: int) -> None:
            self._changes(timeline, "flush", _path_of(descriptor))
            self._flush(os.fstat(descriptor).st_ino, descriptor)

        _ACTIVE.append((self, timeline))
        os.fsync = fsync
        try:
            yield
        finally:
            os.fsync = real
            _ACTIVE.clear()

    def restart(self, chance: Random, *, power: bool) -> None:
        """Drop the data that a restart loses: after a loss of power, changes without fsync."""
        self.is_full = self.fails_once = False
        if power:
            now = self._names()
            wanted = chance.choice([*self._since, now])
            contents = {name: self._content(name, ino, chance) for name, ino in wanted.items()}
            for path in self.folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            for name, content in sorted(contents.items()):
                path = self.folder / name
                path.mkdir() if content is None else path.write_bytes(content)
        self._flushed = {ino: (self.folder / name).read_bytes() for name, ino in self._names().items() if ino}
        self._gone.clear()
        self._since = [self._names()]

    def heard(self, timeline: Timeline, event: str, arguments: tuple[Any, ...]) -> None:
        """Handle an audit event."""
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITING and isinstance(path, str | os.PathLike):
                self._changes(timeline, "open", os.fspath(path))
        elif event in _CHANGES:
            at = arguments[-1] if event in ("os.remove", "os.rmdir") else -1
            path = os.fspath(arguments[0]) if not isinstance(arguments[0], int) else ""
            if isinstance(at, int) and at >= 0 and not path.startswith("/"):
                path = f"{_path_of(at)}/{path}"
            self._changes(timeline, event.removeprefix("os."), path)

    def _changes(self, timeline: Timeline, what: str, path: str) -> None:
        if not path.startswith(self._root):
            return
        name = path[len(self._root) + 1 :]
        timeline.event(f"{timeline.inside or 'driver'} {what} {name}")
        if what in ("open", "mkdir") and self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.fails_once:
            self.fails_once = False
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if what == "flush":
            return
        names = self._names()
        self._since.append(names)
        touched = [name]
        if what == "rename":
            touched = [each for each in names if not (self.folder / each).is_dir()]
        for each in touched:  # a change may free a file that a loss of power restores
            if names.get(each):
                self._gone[names[each]] = (self.folder / each).read_bytes()

    def _flush(self, ino: int, descriptor: int) -> None:
        if not _path_of(descriptor).startswith(self._root):
            return
        names = self._names()
        for name, each in names.items():
            if each == ino:
                self._flushed[ino] = (self.folder / name).read_bytes()
        self._since = [names]

    def _content(self, name: str, ino: int, chance: Random) -> bytes | None:
        """Return the bytes of a file after a loss of power; None for a folder."""
        if not ino:
            return None
        there = next((each for each, number in self._names().items() if number == ino), None)
        last = self._gone.get(ino, b"") if there is None else (self.folder / there).read_bytes()
        flushed = self._flushed.get(ino, b"")
        if last.startswith(flushed):
            return last[: chance.choice([len(flushed), chance.randint(len(flushed), len(last)), len(last)])]
        return chance.choice([flushed, last])

    def _names(self) -> _Names:
        found: _Names = {}
        left = [self._root]
        while left:
            for entry in os.scandir(left.pop()):
                name = entry.path[len(self._root) + 1 :]
                if entry.is_dir(follow_symlinks=False):
                    left.append(entry.path)
                    found[name] = 0
                else:
                    found[name] = entry.inode()
        return found


def _path_of(descriptor: int) -> str:
    """Return the path of an open file or folder."""
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


_ACTIVE: list[tuple[FakeDisk, Timeline]] = []
"""The watched disk; Python's audit hooks cannot be removed, so one hook looks here."""


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _ACTIVE and (event == "open" or event in _CHANGES):
        disk, timeline = _ACTIVE[0]
        disk.heard(timeline, event, arguments)


sys.addaudithook(_hook)
