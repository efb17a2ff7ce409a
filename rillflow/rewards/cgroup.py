"""Memory group: a cgroup that limits the memory of one sandbox, including tmpfs and memfd.

    supervisor ── MemoryGroup.make ──> a group below its own, v2 or v1 ── remove, after all its processes end
    keeper     ── join ──> the group, with all processes that it starts

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MOUNTED = Path("/sys/fs/cgroup")
_PREFIX = "rillflow-"
_REMOVE_LIMIT_S = 1.0


@dataclass(frozen=True, kw_only=True)
class MemoryGroup:
    """An existing memory cgroup."""

    folder: Path
    """Folder of the group below /sys/fs/cgroup."""
    members: int
    """Descriptor for joining, opened while the process was allowed to."""

    @staticmethod
    def make(limit_bytes: int) -> MemoryGroup:
        """Create a group below this process's own group.

        Raises:
            OSError: there is no memory controller, or it is not writable.
        """
        refusals = []
        for parent, limit in _parents():
            _remove_stale(parent)
            folder = parent / f"{_PREFIX}{os.getpid()}"
            try:
                folder.mkdir()
                try:
                    (folder / limit).write_text(str(limit_bytes))
                    _bound_swap(folder)
                    members = os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
                    return MemoryGroup(folder=folder, members=members)
                except OSError:
                    folder.rmdir()
                    raise
            except OSError as error:
                refusals.append(f"{error.strerror} at {error.filename}")
        raise OSError(0, refusals[0] if refusals else "this kernel has no memory controller")

    def join(self) -> None:
        """Move this process and its future forks into the group."""
        os.write(self.members, b"0")
        os.close(self.members)

    def remove(self) -> None:
        """Remove the group once it is empty."""
        until = time.monotonic() + _REMOVE_LIMIT_S
        while time.monotonic() < until:
            try:
                self.folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.01)
            else:
                return


def _parents() -> Iterator[tuple[Path, str]]:
    """Yield folders of this process's group with the name of the limit file: v1 first, if it has memory."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            roots, limit = [_MOUNTED / "memory"], "memory.limit_in_bytes"
        elif not controllers:
            roots, limit = [_MOUNTED, _MOUNTED / "unified"], "memory.max"
        else:
            continue
        for root in roots:
            for folder in dict.fromkeys((root / path.lstrip("/"), root)):
                if (folder / "cgroup.procs").exists():
                    yield folder, limit


def _bound_swap(folder: Path) -> None:
    """Disable swap, if the kernel has a setting for it."""
    limit = folder / "memory.limit_in_bytes"
    for name, value in (
        ("memory.swap.max", "0"),
        ("memory.memsw.limit_in_bytes", limit.read_text() if limit.exists() else ""),
    ):
        if (folder / name).exists():
            with contextlib.suppress(OSError):
                (folder / name).write_text(value)


def _remove_stale(parent: Path) -> None:
    """Remove groups whose supervisor was killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        process = folder.name.removeprefix(_PREFIX)
        if process.isdigit() and not Path(f"/proc/{process}").exists():
            with contextlib.suppress(OSError):
                folder.rmdir()
