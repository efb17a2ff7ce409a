"""Sandbox: the namespaces, files, users, network and memory that isolate a reward function or an agent.

    supervisor ── MemoryGroup.make ──> a memory cgroup, v2 or v1; removed after all processes end
               ── isolate ──> new user, pid, network, ipc and host-name namespaces
    keeper     ── join ──> the memory group, with all processes that it starts
               ── enclose ──> a new root:   Python and the system's libraries             read only
                                            the function's file, the modules it imports   copies
                                            files of reward.files                         read only
                                            /tmp                                          empty, 256 MiB
                   └─ fork ─> warm process ── one namespace per row; see rewards/isolated_process.py

The kernel enforces the isolation, not Python. If the driver may map further users (mostly as root), the
function and its programs each run as a separate user. Otherwise both share the driver's user, and the level
is ``shared-user``. Any other refusal of the kernel is an error: no function runs with partial isolation.
Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import site
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rillflow.isolation.kernel import (
    ALL_BELOW,
    BIND,
    HOST_NAME,
    IPC,
    MOUNTS,
    MOVE,
    NETWORK,
    NO_DEVICES,
    NO_PROGRAMS,
    NO_SET_USER,
    PIDS,
    PRIVATE,
    READ_ONLY,
    RECURSIVE,
    SLAVE,
    USERS,
    ask,
    drop_bounding_capabilities,
    mount,
    set_attributes,
)
from rillflow.runs.busy_machine import WAITS

SIZE = "256m"
"""Size of the sandbox's /tmp; it uses main memory."""
SHUT_IN = USERS | PIDS | NETWORK | IPC | HOST_NAME
"""Namespaces of the sandbox."""
FUNCTION_USER, PROGRAM_USER = 65531, 65532
"""Users of the function and of ``run_python`` programs, if the driver may map them."""

_CGROUPS = Path("/sys/fs/cgroup")
_GROUP_PREFIX = "rillflow-"
_REMOVE_LIMIT_S = 1.0
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin")
_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "OMP_NUM_THREADS", *WAITS)
_NEW_ROOT = "/proc"
"""Mount point for building the new root: it exists everywhere and hides no path that is bound."""


class Level(StrEnum):
    """How strongly a model's text is isolated from its scorer, strongest first: as wanted, or as provided."""

    FULL = "full"
    """A sandbox, with separate users for the function and for programs."""
    SHARED_USER = "shared-user"
    """A sandbox in which function, programs and driver share one user."""
    NONE = "none"
    """No sandbox. A pid namespace ends the function's processes, if this machine allows one."""
    NO_NAMESPACE = "no-namespace"
    """No sandbox and no pid namespace, even if one is allowed; a machine reports it as ``NONE``."""

    @property
    def is_sandbox(self) -> bool:
        """Whether the function is isolated in a sandbox."""
        return self in (Level.FULL, Level.SHARED_USER)


_NO_SANDBOX = "no sandbox: code that the function runs can set its own reward and has the user's rights"
SENTENCES = {
    Level.FULL: "function and programs run in a sandbox, each row in its own processes, as other users "
    "than the driver",
    Level.SHARED_USER: "function and programs run in a sandbox, each row in its own processes, but as "
    "the driver's user: only root may run them as other users",
    Level.NONE: _NO_SANDBOX,
    Level.NO_NAMESPACE: _NO_SANDBOX,
}
"""Each level in words."""


@dataclass(frozen=True, kw_only=True)
class Visible:
    """The user's files that a sandbox shows."""

    folder: str = ""
    """Working directory of the function; empty: /tmp."""
    copies: Sequence[str] = ()
    """Files copied to the same path: the function's file, and the modules next to it that it imports."""
    shown: Sequence[str] = ()
    """Files and folders bound read-only at the same path."""
    packages: Sequence[str] = ()
    """Folders of packages that the driver has installed; a program sees them, too."""


def clean_environment() -> dict[str, str]:
    """Return the environment of a sandboxed function, without variables that could hold a secret."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return {**kept, "HOME": "/tmp", "TMPDIR": "/tmp"}


def isolate(namespaces: int, *, further_users: bool = False) -> bool:
    """Enter namespaces as the same user; the next fork is process 1 of the pid namespace.

    Args:
        namespaces: bits of unshare(2).
        further_users: map ``FUNCTION_USER`` and ``PROGRAM_USER`` too, if allowed.

    Returns:
        Whether they are mapped.

    Raises:
        OSError: the kernel refuses.
    """
    user, group = os.getuid(), os.getgid()
    mapped = False
    if further_users:
        mapped = _unshare_with_users(namespaces, user, group)
    else:
        ask("unshare", namespaces)
    if namespaces & USERS and not mapped:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return mapped


def _unshare_with_users(namespaces: int, user: int, group: int) -> bool:
    """Enter namespaces, and map several users from a fork outside, since only an outside process may."""
    go_read, go_write = os.pipe()
    target = os.getpid()
    mapper = os.fork()
    if mapper == 0:
        os.close(go_write)
        code = 1
        try:
            if os.read(go_read, 1):
                for kind, own in (("uid", user), ("gid", group)):
                    further = f"{FUNCTION_USER} {FUNCTION_USER} 1\n{PROGRAM_USER} {PROGRAM_USER} 1\n"
                    Path(f"/proc/{target}/{kind}_map").write_text(f"{own} {own} 1\n{further}")
                code = 0
        except OSError:
            code = 1
        finally:
            os._exit(code)
    os.close(go_read)
    try:
        ask("unshare", namespaces)
        os.write(go_write, b"x")
    finally:
        os.close(go_write)
        mapped = os.waitpid(mapper, 0)[1] == 0
    return mapped


def show_own_processes() -> None:
    """Show a pid namespace its own /proc; if that is refused, /proc keeps the outer process ids."""
    try:
        ask("unshare", MOUNTS)
        mount(None, "/", None, RECURSIVE | SLAVE)
        mount("proc", "/proc", "proc", NO_SET_USER | NO_DEVICES | NO_PROGRAMS)
    except OSError:
        return


def enclose(visible: Visible) -> None:
    """Restrict this process and its forks to the sandbox's files.

    It keeps the capabilities of its user namespace; the process of a row drops them before any code of
    the user or a model runs in it.

    Args:
        visible: the user's files to show.

    Raises:
        OSError: the kernel refuses, or a file cannot be read.
    """
    Path("/proc/sys/user/max_user_namespaces").write_text("0")  # a nested namespace would give new rights
    ask("unshare", MOUNTS)
    mount(None, "/", None, RECURSIVE | PRIVATE)
    mount("none", _NEW_ROOT, "tmpfs", NO_SET_USER, "mode=755")
    for name in ("/tmp", "/proc"):
        Path(_NEW_ROOT + name).mkdir()
    mount("none", f"{_NEW_ROOT}/tmp", "tmpfs", NO_SET_USER | NO_DEVICES, f"mode=1777,size={SIZE}")
    links = [name for name in _SYSTEM if Path(name).is_symlink()]
    for name in outermost(
        [
            *(name for name in _SYSTEM if name not in links),
            *python_folders(),
            *visible.packages,
            *visible.shown,
        ]
    ):
        _bind(name)
    for name in links:
        Path(_NEW_ROOT + name).symlink_to(Path(name).readlink())
    for name in _DEVICES:
        _bind(name)
    for name in (*_FILES, *visible.copies):  # a bind would be one more mount for every namespace to copy
        _copy(name)
    Path(_NEW_ROOT + "/dev/shm").symlink_to("/tmp")  # semaphores and shared memory are files there
    for name in filter(None, [visible.folder]):
        Path(_NEW_ROOT + name).mkdir(parents=True, exist_ok=True)
    set_attributes(_NEW_ROOT, ALL_BELOW, add=READ_ONLY | NO_SET_USER)
    set_attributes(f"{_NEW_ROOT}/tmp", 0, remove=READ_ONLY)  # mounts below it stay read only
    mount_processes(f"{_NEW_ROOT}/proc")
    os.chdir(_NEW_ROOT)
    mount(".", "/", None, MOVE)
    os.chroot(".")
    os.chdir(visible.folder or "/tmp")
    drop_bounding_capabilities()


def mount_processes(target: str) -> None:
    """Mount the pid namespace's /proc; each user sees only processes that it may inspect."""
    flags = READ_ONLY | NO_SET_USER | NO_DEVICES | NO_PROGRAMS
    mount("none", target, "proc", flags, "hidepid=invisible")


def python_folders() -> list[str]:
    """Return the folders of Python, installed packages, Rillflow and its parts; not all of sys.path."""
    own = Path(__file__).resolve().parents[1]
    rillflow = [str(own), str(own.with_name("rillflow_parts"))]
    return [sys.prefix, sys.base_prefix, *site.getsitepackages(), *installed_folders(), *rillflow]


def installed_folders() -> list[str]:
    """Return the folders of installed packages on this process's path.

    An isolated interpreter, as a sandbox has, lacks those of PYTHONPATH and of the user.
    """
    return [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]


def outermost(names: Sequence[str]) -> list[str]:
    """Return the existing paths, without those below another one."""
    found: list[str] = []
    for name in sorted({str(Path(name).absolute()) for name in names}):
        if Path(name).exists() and not any(Path(name).is_relative_to(outer) for outer in found):
            found.append(name)
    return found


def _bind(name: str) -> None:
    """Show a file or folder at its own path in the new root; it becomes read only with the root."""
    if Path(name).exists():
        bind(os.path.realpath(name), _NEW_ROOT + name, is_folder=Path(name).is_dir())


def bind(source: str, target: str, *, is_folder: bool) -> None:
    """Bind-mount a path at another path, which is created."""
    place = Path(target)
    if is_folder:
        place.mkdir(parents=True, exist_ok=True)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    mount(source, target, None, BIND | RECURSIVE)


def _copy(name: str) -> None:
    """Copy a file, readable by all users, to its path in the new root, unless a folder shows it."""
    target = Path(_NEW_ROOT + name)
    if not target.exists() and Path(name).is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(name, target)


# ---- the memory group


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
            folder = parent / f"{_GROUP_PREFIX}{os.getpid()}"
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
            roots, limit = [_CGROUPS / "memory"], "memory.limit_in_bytes"
        elif not controllers:
            roots, limit = [_CGROUPS, _CGROUPS / "unified"], "memory.max"
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
    for folder in parent.glob(f"{_GROUP_PREFIX}*"):
        process = folder.name.removeprefix(_GROUP_PREFIX)
        if process.isdigit() and not Path(f"/proc/{process}").exists():
            with contextlib.suppress(OSError):
                folder.rmdir()
