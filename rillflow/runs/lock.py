"""Lock of a run directory: one driver at a time; the error for a second driver names the first.

The operating system frees the lock when its process ends for any reason, so no stale lock can remain. The
file's content is only used in the error message.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from datetime import datetime
from pathlib import Path

from rillflow.errors import RunDirectoryError
from rillflow.runs.durable import writing
from rillflow.runs.json_lines import JSON, encode, read_json


class Lock:
    """An exclusive lock on a file, held until ``release`` or the end of the process.

    Raises:
        RunDirectoryError: another driver holds it (the message names its process and start time), or the
            file system does not support locks.
    """

    def __init__(self, path: Path) -> None:
        with writing(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._path = path
        try:
            self._take()
            with writing(path):
                self._write_holder()
        except BaseException:
            self.release()
            raise

    def _take(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _held(self._path) from None
        except OSError as error:
            raise RunDirectoryError(
                f"cannot lock {self._path}: {os.strerror(error.errno or 0)}",
                why="without a lock, a second driver could overwrite this run's files",
                fix="choose a run directory on a local disk",
            ) from error

    def require_held(self) -> None:
        """Raise an error if the path no longer leads to the locked file.

        Raises:
            RunDirectoryError: the file was removed or replaced, so another driver may be at work.
        """
        own = os.fstat(self._descriptor)
        try:
            there = self._path.stat()
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino):
            raise RunDirectoryError(
                f"{self._path} was {'removed' if there is None else 'replaced'} while this run wrote",
                why="another driver may be running in the same directory; the steps of both runs would mix",
                fix="leave the file in place; when no other driver runs, run the same command to resume",
            )

    def _write_holder(self) -> None:
        holder: dict[str, JSON] = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        }
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, encode(holder), 0)

    def release(self) -> None:
        """Release the lock and keep its file, because removing the file could let two drivers in at once."""
        os.close(self._descriptor)


def _held(path: Path) -> RunDirectoryError:
    who = "another process"
    with contextlib.suppress(RunDirectoryError, KeyError):
        holder = read_json(path)
        who = f"process {holder['pid']} on {holder['host']}, started {holder['started']}"
    return RunDirectoryError(
        f"run directory {path.parent} is in use by {who}",
        why="two drivers would overwrite each other's files",
        fix="wait until it ends, stop it, or choose another run directory",
    )
