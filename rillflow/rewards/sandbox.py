"""Sandbox: the files, users and network that a reward function or an agent is shut in with.

    supervisor ── isolate ──> own user, pid, network, ipc and host-name namespaces
    keeper     ── enclose ──> a root of its own:   Python and the system's libraries            read only
                                                   the function's file, the modules it imports   copies
                                                   what reward.files lists                       read only
                                                   /tmp                                 empty, 256 MiB
                   └─ fork ─> warm process ── a cell a row; see rewards/cell.py

The kernel does it, not Python. Where the driver may map further users (root, most often), the function and a
program that it runs each have a user of their own; else both share the driver's, and the level is
``shared-user``. A kernel that refuses anything else is an error: nothing runs half shut in. Standard library
only.
"""

from __future__ import annotations

import os
import shutil
import site
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rillflow.rewards.kernel import (
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

SIZE = "256m"
"""Room in the sandbox's /tmp; it is main memory."""
SHUT_IN = USERS | PIDS | NETWORK | IPC | HOST_NAME
"""The namespaces of the sandbox."""
FUNCTION_USER, PROGRAM_USER = 65531, 65532
"""Users of the function and of the programs of ``run_python``, where they can be had."""

_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin")
_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "OMP_NUM_THREADS")
_NEW_ROOT = "/proc"
"""Where the new root is put together: a folder that is there everywhere and hides nothing that is bound."""


@dataclass(frozen=True, kw_only=True)
class Visible:
    """What of the user's files a sandbox shows."""

    folder: str = ""
    """Where the function begins; empty: in /tmp."""
    copies: Sequence[str] = ()
    """Files that are copied to their own place: the function's, and the modules beside it that it imports."""
    shown: Sequence[str] = ()
    """Files and folders that are bound read only at their own place."""


def clean_environment() -> dict[str, str]:
    """The variables a sandboxed function sees: none that could hold a secret."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return {**kept, "HOME": "/tmp", "TMPDIR": "/tmp"}


def isolate(namespaces: int, *, further_users: bool = False) -> bool:
    """Enter namespaces, as the same user; the next fork is process 1 of the pid namespace.

    Args:
        namespaces: bits of unshare(2).
        further_users: map ``FUNCTION_USER`` and ``PROGRAM_USER`` too, where that is allowed.

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
    """Enter namespaces while a fork outside them maps several users, as only a process outside may."""
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
    """Show a pid namespace its own /proc; where that is refused, /proc keeps the outer process ids."""
    try:
        ask("unshare", MOUNTS)
        mount(None, "/", None, RECURSIVE | SLAVE)
        mount("proc", "/proc", "proc", NO_SET_USER | NO_DEVICES | NO_PROGRAMS)
    except OSError:
        return


def enclose(visible: Visible) -> None:
    """Leave this process, and those it forks, with the sandbox's files.

    It keeps the capabilities of its own user namespace, which a cell gives up before any code of the user's
    or a model's runs in it.

    Args:
        visible: what of the user's files can be read.

    Raises:
        OSError: the kernel refuses, or a file cannot be read.
    """
    Path("/proc/sys/user/max_user_namespaces").write_text("0")  # a namespace in here would bring new rights
    ask("unshare", MOUNTS)
    mount(None, "/", None, RECURSIVE | PRIVATE)
    mount("none", _NEW_ROOT, "tmpfs", NO_SET_USER, "mode=755")
    for name in ("/tmp", "/proc"):
        Path(_NEW_ROOT + name).mkdir()
    mount("none", f"{_NEW_ROOT}/tmp", "tmpfs", NO_SET_USER | NO_DEVICES, f"mode=1777,size={SIZE}")
    links = [name for name in _SYSTEM if Path(name).is_symlink()]
    for name in outermost(
        [*(name for name in _SYSTEM if name not in links), *python_folders(), *visible.shown]
    ):
        _bind(name)
    for name in links:
        Path(_NEW_ROOT + name).symlink_to(Path(name).readlink())
    for name in _DEVICES:
        _bind(name)
    for name in (*_FILES, *visible.copies):  # a bind would be one more mount that every cell has to copy
        _copy(name)
    Path(_NEW_ROOT + "/dev/shm").symlink_to("/tmp")  # where semaphores and shared memory are files
    for name in filter(None, [visible.folder]):
        Path(_NEW_ROOT + name).mkdir(parents=True, exist_ok=True)
    set_attributes(_NEW_ROOT, ALL_BELOW, add=READ_ONLY | NO_SET_USER)
    set_attributes(f"{_NEW_ROOT}/tmp", 0, remove=READ_ONLY)  # what is bound below it stays read only
    mount_processes(f"{_NEW_ROOT}/proc")
    os.chdir(_NEW_ROOT)
    mount(".", "/", None, MOVE)
    os.chroot(".")
    os.chdir(visible.folder or "/tmp")
    drop_bounding_capabilities()


def mount_processes(target: str) -> None:
    """Show the pid namespace's processes, to each user those that it may look into."""
    flags = READ_ONLY | NO_SET_USER | NO_DEVICES | NO_PROGRAMS
    mount("none", target, "proc", flags, "hidepid=invisible")


def python_folders() -> list[str]:
    """The interpreter, what is installed for it, and this package; not every folder on its path."""
    installed = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    package = str(Path(__file__).resolve().parents[1])
    return [sys.prefix, sys.base_prefix, *site.getsitepackages(), *installed, package]


def outermost(names: Sequence[str]) -> list[str]:
    """The paths that exist, without those below another one."""
    found: list[str] = []
    for name in sorted({str(Path(name).absolute()) for name in names}):
        if Path(name).exists() and not any(Path(name).is_relative_to(outer) for outer in found):
            found.append(name)
    return found


def _bind(name: str) -> None:
    """Show a file or folder at its own place in the new root, read only once the root is."""
    if Path(name).exists():
        bind(os.path.realpath(name), _NEW_ROOT + name, is_folder=Path(name).is_dir())


def bind(source: str, target: str, *, is_folder: bool) -> None:
    """Show what a path leads to at another one, for which a place is made."""
    place = Path(target)
    if is_folder:
        place.mkdir(parents=True, exist_ok=True)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    mount(source, target, None, BIND | RECURSIVE)


def _copy(name: str) -> None:
    """Put a copy that every user can read at a file's own place, unless a folder shows it already."""
    target = Path(_NEW_ROOT + name)
    if not target.exists() and Path(name).is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(name, target)
