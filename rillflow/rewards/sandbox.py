"""Sandbox: a reward function shut in, for code that a model wrote or that is run inside one.

    supervisor ── isolate ──> own user, pid, network, ipc and host-name namespaces
    keeper     ── enclose ──> a root of its own:   Python and the system's libraries   read only
                                                   the folder of the function's file   read only
                                                   /tmp                                empty, 256 MiB
                              no capability, and no way to get one back; no further user namespace

The kernel does it, not Python: whatever the function calls, there is no network, no file of the user's beside
its own folder, no other process to be seen, and none of the environment's variables. A kernel that refuses a
part of it is an error: nothing runs half shut in. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import site
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

SIZE = "256m"
"""Room in the sandbox's /tmp; it is main memory."""

USERS, PIDS = 0x10000000, 0x20000000
"""CLONE_NEWUSER and CLONE_NEWPID."""
SHUT_IN = USERS | PIDS | 0x40000000 | 0x08000000 | 0x04000000
"""The namespaces of the sandbox: these, CLONE_NEWNET, NEWIPC and NEWUTS."""
_CLONE_NEWNS = 0x00020000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_BIND, _MS_MOVE, _MS_REC, _MS_PRIVATE, _MS_SLAVE = 0x1000, 0x2000, 0x4000, 0x40000, 0x80000
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38
_CAPABILITY_VERSION = 0x20080522
_LAST_CAPABILITY = 63

_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin")
_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "OMP_NUM_THREADS")
_NEW_ROOT = "/proc"
"""Where the new root is put together: a folder that is there everywhere and hides nothing that is bound."""


def clean_environment() -> dict[str, str]:
    """The variables a sandboxed function sees: none that could hold a secret."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return {**kept, "HOME": "/tmp", "TMPDIR": "/tmp"}


def isolate(namespaces: int) -> None:
    """Enter namespaces, as the same user; the next fork is process 1 of the pid namespace.

    Raises:
        OSError: the kernel refuses.
    """
    user, group = os.getuid(), os.getgid()
    ask("unshare", namespaces)
    if namespaces & USERS:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def show_own_processes() -> None:
    """Show a pid namespace its own /proc; where that is refused, /proc keeps the outer process ids."""
    with contextlib.suppress(OSError):
        ask("unshare", _CLONE_NEWNS)
        _mount(None, "/", None, _MS_REC | _MS_SLAVE)
        _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


def enclose(folder: str) -> None:
    """Leave this process, and those it forks, with the sandbox's files and without capabilities.

    Args:
        folder: where the function's file is; it can be read. Empty: it has none, and begins in /tmp.

    Raises:
        OSError: the kernel refuses.
    """
    Path("/proc/sys/user/max_user_namespaces").write_text("0")  # a namespace in here would bring new rights
    ask("unshare", _CLONE_NEWNS)
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("none", _NEW_ROOT, "tmpfs", _MS_NOSUID, "mode=755")
    for name in ("/tmp", "/proc"):
        Path(_NEW_ROOT + name).mkdir()
    _mount("none", f"{_NEW_ROOT}/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, f"mode=1777,size={SIZE}")
    links = [name for name in _SYSTEM if Path(name).is_symlink()]
    for name in _outermost(
        [*(name for name in _SYSTEM if name not in links), *_python(), *filter(None, [folder])]
    ):
        _bind(name)
    for name in links:
        Path(_NEW_ROOT + name).symlink_to(Path(name).readlink())
    for name in (*_FILES, *_DEVICES):
        _bind(name)
    _set_attributes(_NEW_ROOT, _AT_RECURSIVE, add=_MS_RDONLY | _MS_NOSUID)
    _set_attributes(
        f"{_NEW_ROOT}/tmp", 0, remove=_MS_RDONLY
    )  # itself: what is bound below it stays read only
    _mount("none", f"{_NEW_ROOT}/proc", "proc", _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    os.chdir(_NEW_ROOT)
    _mount(".", "/", None, _MS_MOVE)
    os.chroot(".")
    os.chdir(folder or "/tmp")
    _drop_capabilities()


def _python() -> list[str]:
    """The interpreter, what is installed for it, and this package; not every folder on its path."""
    installed = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    package = str(Path(__file__).resolve().parents[1])
    return [sys.prefix, sys.base_prefix, *site.getsitepackages(), *installed, package]


def _outermost(names: Sequence[str]) -> list[str]:
    """The folders that exist, without those below another one."""
    found: list[str] = []
    for name in sorted({str(Path(name).absolute()) for name in names}):
        if Path(name).is_dir() and not any(Path(name).is_relative_to(outer) for outer in found):
            found.append(name)
    return found


def _bind(name: str) -> None:
    """Show a file or folder at its own place in the new root."""
    target = Path(_NEW_ROOT + name)
    if Path(name).is_dir():
        target.mkdir(parents=True, exist_ok=True)
    elif Path(name).exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    else:
        return
    _mount(os.path.realpath(name), str(target), None, _MS_BIND | _MS_REC)


def _set_attributes(target: str, flags: int, add: int = 0, remove: int = 0) -> None:
    """mount_setattr(2), whose bits of reading only and of no set-user-id are those of mount(2)."""
    wanted = struct.pack("QQQQ", add, remove, 0, 0)
    ask("syscall", _MOUNT_SETATTR, _AT_FDCWD, target.encode(), flags, wanted, len(wanted), about=target)


def _drop_capabilities() -> None:
    for capability in range(_LAST_CAPABILITY + 1):
        with contextlib.suppress(OSError):  # refused for those this kernel does not have
            ask("prctl", _PR_CAPBSET_DROP, capability, 0, 0, 0)
    ask("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    ask("capset", struct.pack("Ii", _CAPABILITY_VERSION, 0), bytes(24))


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    arguments = [text.encode() if text is not None else None for text in (source, target, kind, options)]
    ask("mount", *arguments[:3], ctypes.c_ulong(flags), arguments[3], about=target)


def ask(call: str, *arguments: object, about: str = "") -> None:
    """Call the C library, as Python 3.11 has neither unshare nor prctl nor mount; its error is an OSError."""
    if ctypes.CDLL(None, use_errno=True)[call](*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}{f' {about}' if about else ''}: {os.strerror(number)}")
