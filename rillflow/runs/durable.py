"""Durable: write files and folders of a run so that a crash never leaves half of one; word the write errors.

append   add one line at the end: the whole line is there, or the file is unchanged
replace  set new content: temporary file ─ fsync ─> rename: the old or the new content, never a mixture
publish_folder   rename a flushed draft: the old or the new folder; the old one is moved away, then deleted
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from rillflow.errors import RunDirectoryError
from rillflow.runs.formatting import size

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def append(path: Path, line: bytes) -> None:
    """Append a line to a file with one unbuffered write, so that a killed process loses no line.

    Raises:
        RunDirectoryError: the line could not be written; the file keeps its previous content.
    """
    with writing(path, len(line)), _opened(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as descriptor:
        before = os.fstat(descriptor).st_size
        try:
            _write_all(descriptor, line)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, before)
            raise


def replace(path: Path, chunks: Iterable[bytes]) -> None:
    """Replace a file's content atomically, also across a power loss; create its folder if needed.

    Raises:
        RunDirectoryError: the content could not be written; the file keeps its old content.
    """
    temporary = temporary_of(path)
    try:
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            write_flushed(temporary, chunks)
            temporary.replace(path)
            flush(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def cut(path: Path, size: int) -> None:
    """Truncate a file to ``size`` bytes; ignore an error of the disk."""
    with contextlib.suppress(OSError):
        os.truncate(path, size)


def write_flushed(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file in a folder that is still a draft, and wait until it is on the disk.

    Raises:
        OSError: the file could not be written completely.
    """
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
        for chunk in chunks:
            _write_all(descriptor, chunk)
        os.fsync(descriptor)


def temporary_of(path: Path) -> Path:
    """Return the temporary name of a file while it is written."""
    return path.with_name(f".{path.name}.tmp")


@contextlib.contextmanager
def writing(path: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Turn an OSError of the block into the error for a failed write; see ``write_error``."""
    try:
        yield
    except OSError as error:
        raise write_error(path, error, needed_bytes) from error


def write_error(path: Path, error: Exception, needed_bytes: int = 0) -> RunDirectoryError:
    """Return the error for a failed write, with the file, the reason, needed and free space, and a fix.

    Args:
        path: the file that was written.
        error: an OSError, or another library's error that quotes one as ``(os error 28)``.
        needed_bytes: size of the write; 0 if unknown.
    """
    code = _errno(error)
    reason = os.strerror(code) if code else str(error)
    if code in _FULL:
        fix = (
            "free disk space (old checkpoints and rollouts are largest), then run the same command to resume"
        )
    elif code in _FORBIDDEN:
        fix = "choose a writable run directory"
    else:
        fix = "check the disk, then run the same command to resume"
    if code in _FORBIDDEN:
        return RunDirectoryError(f"cannot write {path}: {reason}", why=_forbidden(path, code), fix=fix)
    needs = f"it needs {size(needed_bytes)}, and " if needed_bytes else ""
    why = f"{needs}{_free_space(path)}"
    if code == errno.ENOENT:  # Rillflow creates missing folders; ENOENT thus means the system allows none
        there = next(folder for folder in path.absolute().parents if folder.exists())
        why, fix = f"{there} does not allow new files", "choose a writable run directory with --dir"
    return RunDirectoryError(f"cannot write {path}: {reason}", why=why, fix=fix)


def _forbidden(path: Path, code: int) -> str:
    """Return the reason why the system does not allow a write."""
    there = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
    if code == errno.EROFS:
        return f"the file system of {there} is mounted read-only"
    try:
        known = there.stat()
    except OSError as error:
        return f"{there} cannot be read: {error.strerror}"
    user = os.geteuid()
    mode = f"{there} belongs to user {known.st_uid} and has the mode {stat.filemode(known.st_mode)}"
    if code == errno.EPERM or user == 0:
        return f"the system allows no change of {there}, whatever its mode"
    return f"{mode}; this process runs as user {user}"


def _errno(error: Exception) -> int | None:
    """Return the errno of an error; safetensors errors contain it only in their message."""
    if isinstance(error, OSError):
        return error.errno
    quoted = re.search(r"\(os error (\d+)\)", str(error))
    return int(quoted[1]) if quoted else None


def _free_space(path: Path) -> str:
    for folder in path.absolute().parents:
        try:
            return f"{size(shutil.disk_usage(folder).free)} are free on its disk"
        except OSError:
            continue
    return "the free space of its disk is unknown"


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    # On a nearly full disk, a write can be partial; the next write then reports the error.
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def digest_of(path: Path) -> dict[str, int | str]:
    """Return a file's length and SHA-256."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def publish_folder(draft: Path, folder: Path) -> None:
    """Rename a complete draft folder; a reader finds the old or the new folder, also after a power loss.

    Raises:
        OSError: the draft could not be renamed.
    """
    flush(draft)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    draft.rename(folder)
    flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def flush(path: Path) -> None:
    """Wait until a file, or a directory's entries, are on the disk."""
    with _opened(path, os.O_RDONLY) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
