"""Durable: the ways a file or folder of a run is written, and what a failed write says.

append   one line at the end: it is there whole, or the file is as it was
replace  a new content: temporary file ─ fsync ─> rename: the old one or the new one, never a mixture
publish_folder   a draft whose files are on the disk ─> rename: likewise, the old one aside and away
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from rillflow.errors import RunDirectoryError
from rillflow.observe.wording import size

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def append(path: Path, line: bytes) -> None:
    """Add a line at the end of a file, at once and unbuffered, so that a killed process loses none.

    Raises:
        RunDirectoryError: the line could not be written; what stood in the file before still does.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            before = os.fstat(descriptor).st_size
            try:
                _write_all(descriptor, line)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, before)
                raise
        finally:
            os.close(descriptor)
    except OSError as error:
        raise write_error(path, error, len(line)) from error


def replace(path: Path, chunks: Iterable[bytes]) -> None:
    """Give a file a new content, atomically, also across a loss of power; its folder is made.

    Raises:
        RunDirectoryError: it could not be written; the file has its old content.
    """
    temporary = temporary_of(path)
    try:
        path.parent.mkdir(exist_ok=True)
        write_flushed(temporary, chunks)
        temporary.replace(path)
        flush(path.parent)
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def cut(path: Path, size: int) -> None:
    """Take back what was appended to a file after it had so many bytes, as far as the disk lets it."""
    with contextlib.suppress(OSError):
        os.truncate(path, size)


def write_flushed(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file under its own name, for a folder that has none yet; then it is on the disk.

    Raises:
        OSError: it could not be written whole.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        for chunk in chunks:
            _write_all(descriptor, chunk)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_of(path: Path) -> Path:
    """The name a file has until it is complete."""
    return path.with_name(f".{path.name}.tmp")


def write_error(path: Path, error: Exception, needed_bytes: int = 0) -> RunDirectoryError:
    """What a failed write says: the file, the reason, the space it needs and there is, the way on.

    Args:
        path: what was written.
        error: an OSError, or another library's that quotes one as ``(os error 28)``.
        needed_bytes: what it takes; 0 where that is not known.
    """
    code = _errno(error)
    reason = os.strerror(code) if code else str(error)
    if code in _FULL:
        fix = (
            "make room (old checkpoints and rollouts are the largest), then run the same command: it resumes"
        )
    elif code in _FORBIDDEN:
        fix = "choose a run directory that you may write"
    else:
        fix = "check the disk, then run the same command: it resumes"
    needs = f"it needs {size(needed_bytes)}, and " if needed_bytes else ""
    why = f"{needs}{_free_space(path)}"
    if code == errno.ENOENT:  # every folder that may be made is made: here the system makes none
        there = next(folder for folder in path.absolute().parents if folder.exists())
        why, fix = f"nothing can be made in {there}", "choose a run directory that you may write, with --dir"
    return RunDirectoryError(f"cannot write {path}: {reason}", why=why, fix=fix)


def _errno(error: Exception) -> int | None:
    """The system's number of an error; safetensors has it in its words alone."""
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
    # A nearly full disk takes a part first and reports the error at the next write.
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def digest_of(path: Path) -> dict[str, int | str]:
    """A file's length and SHA-256, by which it is known again."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def publish_folder(draft: Path, folder: Path) -> None:
    """Give a whole draft its name: a reader finds the old folder or the new one, also across a loss of power.

    Raises:
        OSError: it could not be renamed.
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
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
