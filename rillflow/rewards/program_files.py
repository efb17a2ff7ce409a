"""Program files: before a row's next program starts, undo what earlier programs left in its files.

    function ─ writes files ─ starts A ─> the files are remembered
             ─ A ends ─ the function writes ─ starts B ─┬─> undone: what A did
                                                        └─> kept: what the function wrote since,
                            files that the command of B names, what a compiler made, ``keep_files``

    consumes      audit events of the function's process: starts of programs, its own changes of files
    waits for     nothing
    produces      the files as the function left them; RuntimeError, which fails the start, if it cannot

It works in the function's own process, because only that process knows which files are its own. Before it
looks, ``running_programs`` makes sure that no ended program has a process left. Programs that run at the same
time share their files until all have ended. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rillflow.isolation.kernel import running_programs

KEEP = "rillflow.keep_files"
"""Audit event with the files that ``programs.keep_files`` keeps."""
ROOT = "/tmp"
"""The only folder of a namespace that its programs can change."""
REMEMBERED_BYTES = 1 << 26
"""Bytes of file contents that are remembered; a changed file beyond them is removed."""
COMPILERS = (
    "gcc",
    "g++",
    "cc",
    "c++",
    "clang",
    "clang++",
    "gfortran",
    "rustc",
    "javac",
    "tsc",
    "nasm",
    "as",
    "ld",
)
"""Programs that translate a file without running any text in it, so what they make is kept."""

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One file, folder or link below ``ROOT``."""

    mode: int
    """Its type and permissions."""
    links: int
    """Number of its names."""
    version: tuple[int, ...]
    """Changes whenever the content does."""
    content: bytes | None
    """Content of a file, target of a link; None: not remembered."""


class ProgramFiles:
    """The files of one row, as its function left them. ``hear`` is an audit hook."""

    def __init__(self) -> None:
        self._files: dict[str, _Entry] | None = None
        self._written: set[str] = set()
        self._removed: set[str] = set()
        self._links: set[str] = set()
        self._only_compilers = True
        self._lock = threading.RLock()
        self._is_at_work = False
        self._events: Mapping[str, Callable[..., None]] = {
            "open": self._opened,
            "os.mkdir": self._wrote,
            "os.truncate": self._wrote,
            "os.rename": self._moved,
            "os.link": lambda _, target, *__: self._wrote(target),
            "os.symlink": lambda _, target, *__: self._linked(target),
            "os.remove": self._took,
            "os.rmdir": self._took,
            "shutil.rmtree": self._took,
            KEEP: self._kept,
            "subprocess.Popen": self._starts,
            "os.posix_spawn": lambda program, command, environment: self._starts(
                program, command, None, environment
            ),
            "os.system": lambda command: self._starts(None, command, None, None),
            "os.exec": lambda program, command, environment: self._starts(
                program, command, None, environment
            ),
        }

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Take an audit event."""
        act = self._events.get(event)
        if act is None:
            return
        with self._lock:
            if self._is_at_work:
                return
            self._is_at_work = True
            try:
                act(*arguments)
            finally:
                self._is_at_work = False

    # ---- what the function does with files

    def _opened(self, path: object, mode: object, flags: int) -> None:
        if flags & _WRITES or (isinstance(mode, str) and set(mode) & set("wax+")):
            self._wrote(path)

    def _wrote(self, path: object, *_: object) -> None:
        if isinstance(path, str | bytes | os.PathLike):
            self._written.add(_absolute(path))

    def _moved(self, source: object, target: object, *_: object) -> None:
        self._took(source)
        self._kept([target])

    def _linked(self, path: object) -> None:
        if isinstance(path, str | bytes | os.PathLike):
            self._links.add(_absolute(path))
            self._wrote(path)

    def _took(self, path: object, *_: object) -> None:
        if isinstance(path, str | bytes | os.PathLike):
            self._removed.add(_absolute(path))

    def _kept(self, paths: Sequence[object]) -> None:
        for path in paths:
            self._wrote(path)
            root = _absolute(path) if isinstance(path, str | bytes | os.PathLike) else ""
            for folder, folders, files in os.walk(root):
                self._written.update(f"{folder}/{name}" for name in (*folders, *files))

    # ---- starts of programs

    def _starts(self, program: object, command: object, folder: object, environment: object) -> None:
        """Undo what earlier programs left, unless one of them runs; remember the files for the next start."""
        is_alone = running_programs() <= 0
        if is_alone:
            try:
                now = dict(_entries(self._files or {}))
                if self._files is not None:
                    self._undo(now, self._named(command, folder))
                    now = dict(_entries(now))
            except (OSError, RecursionError) as error:
                raise RuntimeError(f"what a program left in {ROOT} cannot be removed: {error}") from error
            self._files, self._only_compilers = now, True
            self._written.clear()
            self._removed.clear()
            self._links.clear()
        self._only_compilers &= _is_compiler(program, command, environment)

    def _undo(self, now: dict[str, _Entry], named: set[str]) -> None:
        """Restore the files to their state at the end of the function.

        Args:
            now: the files now.
            named: paths that the next command names.
        """
        before = self._files or {}
        if self._only_compilers:
            return
        self._require_own(now, before)
        own = self._written
        plain = {path for path, entry in now.items() if stat.S_ISREG(entry.mode) and entry.links == 1}
        kept = own | (named & plain)
        kept |= {parent for path in kept for parent in _parents(path)}
        for path, entry in sorted(now.items(), reverse=True):
            if path not in before and path not in kept:
                _remove(path, entry.mode)
        for path, entry in sorted(before.items()):
            if path in own or path in self._removed:
                continue
            if any(parent in self._removed for parent in _parents(path)):
                continue
            if path not in now or now[path].version != entry.version:
                _restore(path, entry, now.get(path))

    def _require_own(self, now: dict[str, _Entry], before: dict[str, _Entry]) -> None:
        """Refuse a file that the function wrote through a link that a program left."""
        for path in self._written:
            for each in (path, *_parents(path)):
                entry = now.get(each)
                is_link = entry is not None and stat.S_ISLNK(entry.mode)
                if is_link and each not in before and each not in self._links:
                    raise RuntimeError(f"a program left a link at {each}, where the function then wrote")
            entry = now.get(path)
            if entry is not None and stat.S_ISREG(entry.mode) and entry.links > 1 and path not in before:
                raise RuntimeError(f"a program left a second name of {path}, where the function then wrote")

    def _named(self, command: object, folder: object) -> set[str]:
        """Return the words of a command that look like paths: with a dot or a slash."""
        start = _absolute(folder) if isinstance(folder, str | bytes | os.PathLike) else Path.cwd()
        return {os.path.normpath(Path(start, word)) for word in _words(command) if set(word) & set("/.")}


def _is_compiler(program: object, command: object, environment: object) -> bool:
    """Return whether a command starts a compiler of the system."""
    parts = [command] if isinstance(command, str | bytes) or not isinstance(command, Sequence) else command
    given = program if program is not None else (parts[0] if parts else "")
    if isinstance(command, str | bytes) or not isinstance(given, str | bytes | os.PathLike):
        return False
    path = dict(environment).get("PATH") if isinstance(environment, Mapping) else None
    found = shutil.which(os.fsdecode(given), path=path)
    real = os.path.realpath(found) if found else ROOT
    is_ours = os.path.commonpath((real, ROOT)) == ROOT
    return Path(os.fsdecode(given)).name in COMPILERS and not is_ours


def _words(command: object) -> Iterator[str]:
    parts = [command] if isinstance(command, str | bytes | os.PathLike) else command
    for part in parts if isinstance(parts, Sequence) else ():
        if not isinstance(part, str | bytes | os.PathLike):
            continue
        text = os.fsdecode(part)
        yield text
        with contextlib.suppress(ValueError):
            yield from shlex.split(text)


def _absolute(path: str | bytes | os.PathLike[Any]) -> str:
    with contextlib.suppress(OSError):
        text = os.path.normpath(Path(Path.cwd(), os.fsdecode(path)))
        shared = f"{os.sep}dev{os.sep}shm"
        return ROOT + text.removeprefix(shared) if text.startswith(shared + os.sep) else text
    return os.fsdecode(path)


def _parents(path: str) -> Iterator[str]:
    while len(path := path.rpartition("/")[0]) > len(ROOT):
        yield path


def _entries(known: Mapping[str, _Entry]) -> Iterator[tuple[str, _Entry]]:
    """Yield everything below ``ROOT``, parents first; contents are taken over where nothing changed."""
    device = Path(ROOT).stat().st_dev
    room = REMEMBERED_BYTES
    waiting = [ROOT]
    while waiting:
        folder = waiting.pop()
        with _readable(folder), os.scandir(folder) as found:
            for each in found:
                status = each.stat(follow_symlinks=False)
                if status.st_dev != device:
                    continue  # a mount: read only
                kind = stat.S_IFMT(status.st_mode)
                version: tuple[int, ...] = (status.st_ino, status.st_mode)
                if kind != stat.S_IFDIR:
                    version += (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                old = known.get(each.path)
                content = old.content if old is not None and old.version == version else None
                if content is None and kind == stat.S_IFREG and status.st_size <= room:
                    content = _content(each.path)
                elif content is None and kind == stat.S_IFLNK:
                    content = os.fsencode(Path(each.path).readlink())
                room -= len(content or b"")
                yield (
                    each.path,
                    _Entry(mode=status.st_mode, links=status.st_nlink, version=version, content=content),
                )
                if kind == stat.S_IFDIR:
                    waiting.append(each.path)


@contextlib.contextmanager
def _readable(folder: str) -> Iterator[None]:
    """Give the owner access to a folder that a program closed."""
    if folder != ROOT and not os.access(folder, os.R_OK | os.X_OK | os.W_OK):
        with contextlib.suppress(PermissionError):
            Path(folder).chmod(stat.S_IMODE(os.lstat(folder).st_mode) | stat.S_IRWXU)
    yield


def _content(path: str) -> bytes | None:
    try:
        return Path(path).read_bytes()
    except PermissionError:
        return None


def _remove(path: str, mode: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(mode):
            Path(path).rmdir()
        else:
            Path(path).unlink()


def _restore(path: str, entry: _Entry, now: _Entry | None) -> None:
    """Write a file, folder or link as it was; a file in place, because the function may hold it open."""
    if stat.S_ISDIR(entry.mode):
        if now is not None and not stat.S_ISDIR(now.mode):
            Path(path).unlink()
        Path(path).mkdir(parents=True, exist_ok=True)
        Path(path).chmod(stat.S_IMODE(entry.mode))
        return
    is_same_file = now is not None and now.version[0] == entry.version[0] and stat.S_ISREG(entry.mode)
    if now is not None and not is_same_file:
        _remove_all(path, now.mode)
    if stat.S_ISLNK(entry.mode) and entry.content is not None:
        Path(path).symlink_to(os.fsdecode(entry.content))
    elif stat.S_ISREG(entry.mode) and entry.content is None:
        _remove(path, entry.mode)
    elif stat.S_ISREG(entry.mode):
        if is_same_file:
            Path(path).chmod(stat.S_IMODE(entry.mode) | stat.S_IRUSR | stat.S_IWUSR)
        Path(path).write_bytes(entry.content or b"")
        Path(path).chmod(stat.S_IMODE(entry.mode))


def _remove_all(path: str, mode: int) -> None:
    if stat.S_ISDIR(mode):
        shutil.rmtree(path)
    else:
        _remove(path, mode)
