"""Ray's folder: where a cluster of our own has its sockets, logs and token; errors of its start.

    RAY_TMPDIR, or else TMPDIR, /tmp, /var/tmp, /dev/shm ─ writable, short enough, not full ─> rf-.../r

Ray's sockets are below this folder, and the system limits the length of their paths. This module does not
import Ray.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from rillflow.errors import ClusterError
from rillflow.runs.formatting import size

_SHORT = ("/tmp", "/var/tmp", "/dev/shm")
"""Folders to try if the temporary directory cannot be used."""
_SOCKET_BYTES = 107
"""Longest path of a Unix socket on Linux."""
_BELOW = "/rf-12345678/r/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""Longest path of a socket below the folder that is chosen."""
MOST_FOLDER_BYTES = _SOCKET_BYTES - len(_BELOW)
"""Longest path of a folder for a cluster of our own."""
_LEAST_FREE_BYTES = 16 * 2**20
"""Free space that Ray's logs need at least."""
_LOG_CHARACTERS = 200
_WITHOUT = 'placement.backend = "process" starts the same ranks without Ray'


def private_folder() -> Path:
    """Create and return a folder of mode 0700 with a folder ``r`` for Ray; see ``folder_choice``.

    Raises:
        ClusterError: no folder can be used.
    """
    made = Path(tempfile.mkdtemp(prefix="rf-", dir=folder_choice()))
    (made / "r").mkdir()
    return made


def folder_choice() -> Path:
    """Return the folder for a cluster of our own: RAY_TMPDIR, or the first of several that can be used.

    Raises:
        ClusterError: the folder of RAY_TMPDIR cannot be used, or none of the others.
    """
    wanted = os.environ.get("RAY_TMPDIR")
    candidates = [wanted] if wanted else [os.environ.get("TMPDIR"), *_SHORT]
    problems = []
    for folder in (Path(each).absolute() for each in dict.fromkeys(filter(None, candidates))):
        problem = _folder_problem(folder)
        if not problem:
            return folder
        problems.append(f"{folder} {problem}")
    raise ClusterError(
        f"Ray has no folder for its sockets and logs{'' if wanted is None else ': RAY_TMPDIR'}",
        why="; ".join(problems),
        fix="set RAY_TMPDIR to a folder that can be written, with a path of at most "
        f"{MOST_FOLDER_BYTES} bytes; {_WITHOUT}",
    )


def _folder_problem(folder: Path) -> str:
    """Return why a folder cannot hold a cluster; empty if it can."""
    length = max(len(os.fsencode(path)) for path in (folder, os.path.realpath(folder)))
    if length > MOST_FOLDER_BYTES:
        return f"has a path of {length} bytes, and Ray's sockets allow {MOST_FOLDER_BYTES}"
    try:
        with tempfile.TemporaryDirectory(prefix="rf-", dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"cannot be written: {error.strerror}"
    return f"has {size(free)} free" if free < _LEAST_FREE_BYTES else ""


def start_error(error: Exception, folder: Path) -> ClusterError:
    """Return the error of a cluster that did not start, with the variable or limit to change.

    Args:
        error: the error of Ray, or of the system.
        folder: the cluster's private folder.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
    number = error.errno if isinstance(error, OSError) else None
    if "AF_UNIX" in said:
        fix = f"set RAY_TMPDIR to a folder with a path of at most {MOST_FOLDER_BYTES} bytes, such as /tmp"
    elif number in (errno.ENOSPC, errno.EDQUOT):
        fix = f"free space in {folder.parent}, or set RAY_TMPDIR to a short folder on another disk"
    elif number in (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM):
        fix = "raise the limits of files, processes and memory: see ulimit -a, and rillflow doctor"
    elif "home directory" in said or number in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOENT):
        fix = "set HOME, and RAY_TMPDIR, to folders that can be written"
    else:
        fix = "check the machine's load, its free memory, /dev/shm, and variables that begin with RAY_"
    return ClusterError(
        "Ray did not start on this machine", why=_with_log(said, folder), fix=f"{fix}; {_WITHOUT}"
    )


def _with_log(said: str, folder: Path) -> str:
    """Return an error with the last lines that Ray's daemons wrote to their error logs."""
    for name in ("gcs_server.err", "raylet.err"):
        with suppress(OSError):
            text = (folder / "r" / "session_latest" / "logs" / name).read_text("utf-8", "replace")
            if lines := [line.strip() for line in text.splitlines() if line.strip()]:
                said += f"; {name}: {lines[-1][:_LOG_CHARACTERS]}"
    return said
