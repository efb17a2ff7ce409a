"""Kernel: Linux system calls that Python 3.11 lacks, and the filter of denied system calls.

    names and numbers ── build_filter, once ──> BPF program ── deny_calls ──> a process and its children

The seccomp filter is a deny list, so ordinary programs run unchanged. It denies calls that reach other
processes, create namespaces or mounts, open sockets other than UNIX and IP, or widen the kernel's attack
surface (io_uring, bpf, ...). A denied call fails with an error; no process is killed. x86-64 and aarch64.
Standard library only.

Source: Linux, Documentation/userspace-api/seccomp_filter.rst; numbers from the kernel's syscall tables.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from functools import cache

USERS, PIDS, MOUNTS = 0x10000000, 0x20000000, 0x00020000
"""CLONE_NEWUSER, CLONE_NEWPID and CLONE_NEWNS."""
NETWORK, IPC, HOST_NAME = 0x40000000, 0x08000000, 0x04000000
"""CLONE_NEWNET, CLONE_NEWIPC and CLONE_NEWUTS."""
READ_ONLY, NO_SET_USER, NO_DEVICES, NO_PROGRAMS = 1, 2, 4, 8
BIND, MOVE, RECURSIVE, PRIVATE, SLAVE = 0x1000, 0x2000, 0x4000, 0x40000, 0x80000
ALL_BELOW = 0x8000
"""AT_RECURSIVE."""

_MOUNT_SETATTR, _AT_FDCWD = 442, -100
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER = 1, 4, 24, 36
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION, _LAST_CAPABILITY = 0x20080522, 63


def ask(call: str, *arguments: object, about: str = "") -> None:
    """Call a function of the C library; raise OSError if it fails."""
    if _library()[call](*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}{f' {about}' if about else ''}: {os.strerror(number)}")


@cache
def _library() -> ctypes.CDLL:
    """Return the C library, cached: a row takes about twenty calls, and opening it costs more than most."""
    return ctypes.CDLL(None, use_errno=True)


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """mount(2)."""
    arguments = [text.encode() if text is not None else None for text in (source, target, kind, options)]
    ask("mount", *arguments[:3], ctypes.c_ulong(flags), arguments[3], about=target)


def set_attributes(target: str, flags: int, add: int = 0, remove: int = 0) -> None:
    """mount_setattr(2); its read-only and no-set-user-id bits equal those of mount(2)."""
    wanted = struct.pack("QQQQ", add, remove, 0, 0)
    ask("syscall", _MOUNT_SETATTR, _AT_FDCWD, target.encode(), flags, wanted, len(wanted), about=target)


def enter(namespace: int, kind: int) -> None:
    """Move this process, or its next forks, into a namespace given by its descriptor."""
    ask("setns", namespace, kind)


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants."""
    ask("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    if sys.platform == "linux":
        ask("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def hide_memory() -> None:
    """Close this process to ptrace and to /proc/PID/mem, fd and environ, also for the same user."""
    ask("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)


def drop_bounding_capabilities() -> None:
    """Prevent programs started from here from gaining any capability."""
    for capability in range(_LAST_CAPABILITY + 1):
        try:
            ask("prctl", _PR_CAPBSET_DROP, capability, 0, 0, 0)
        except OSError:  # this kernel has fewer
            return


def drop_capabilities() -> None:
    """Drop every capability permanently."""
    ask("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    ask("capset", struct.pack("Ii", _CAPABILITY_VERSION, 0), bytes(24))


# ---- the seccomp filter

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""AUDIT_ARCH of a machine, and its column in the tables below."""
_DENIED = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # namespaces, mounts, roots
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # attack surface of the kernel
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "fanotify_init": (300, 262),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "personality": (135, 92),
    "memfd_secret": (447, 447),
    "modify_ldt": (154, -1),
    "iopl": (172, -1),
    "ioperm": (173, -1),
}
"""Calls that fail with EPERM, by number on x86-64 and on aarch64; -1: not available."""
_UNCOUNTED = {"memfd_create": (319, 279), "shmget": (29, 194)}
"""Calls whose memory only a memory cgroup counts."""
_CLONE, _CLONE3 = (56, 220), (435, 435)
_FORKS = ((57, -1), (58, -1))
"""fork and vfork."""
_WAITS = ((61, 260), (247, 95))
"""wait4 and waitid."""
_SECCOMP = (317, 277)
_SOCKET, _SOCKETPAIR = (41, 198), (53, 199)
_PRLIMIT, _FCNTL, _IOCTL = (302, 261), (72, 25), (16, 29)
_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
_SOCKETS = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
_SIGNAL_OWNERS = (8, 10, 15)
"""F_SETOWN, F_SETSIG and F_SETOWN_EX: signal another process when a descriptor is ready."""
_TYPING = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX: insert text into a terminal."""
_X32 = 0x40000000

COUNT_PROGRAMS = 0x52494C
"""Kind of child for which a watched process calls waitid to learn how many programs of its namespace run."""

_LINEAR = 4
"""Largest number of calls that are compared one after the other."""
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR, _NOTIFY = 0x7FFF0000, 0x00050000, 0x7FC00000
_THREAD, _SET_FILTER, _NEW_LISTENER = 0x00010000, 1, 8
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2

Line = tuple[int, int, int, int]
"""One instruction: code, jump if true, jump if false, constant."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def has_filter() -> bool:
    """Return whether there is a filter for this machine's processor."""
    return platform.machine() in _ARCHITECTURES


def build_filter(*, is_memory_counted: bool, is_watched: bool = False) -> bytes:
    """Return the filter for this machine's processor, for ``deny_calls`` or ``watch_calls``.

    Args:
        is_memory_counted: whether a memory cgroup limits memory outside any address space.
        is_watched: whether calls that start a process or wait for one notify a listener.

    Raises:
        OSError: the processor is unknown.
    """
    if not has_filter():
        raise OSError(errno.ENOSYS, f"seccomp filter for {platform.machine()}")
    made = lines(platform.machine(), is_memory_counted=is_memory_counted, is_watched=is_watched)
    return b"".join(struct.pack("HBBI", *line) for line in made)


def deny_calls(code: bytes) -> None:
    """Filter the calls of this process and its future children, irreversibly.

    Args:
        code: result of ``build_filter``.

    Raises:
        OSError: the kernel refuses.
    """
    held = ctypes.create_string_buffer(code)
    program = _Program(len(code) // 8, ctypes.addressof(held))
    ask("prctl", _PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0, about="seccomp")


def watch_calls(code: bytes) -> int:
    """Filter the calls of this process and its future children; return the descriptor of the notifications.

    Args:
        code: result of ``build_filter`` with ``is_watched``.

    Raises:
        OSError: the kernel refuses.
    """
    held = ctypes.create_string_buffer(code)
    program = _Program(len(code) // 8, ctypes.addressof(held))
    number = _SECCOMP[_ARCHITECTURES[platform.machine()][1]]
    descriptor: int = _library()["syscall"](number, _SET_FILTER, _NEW_LISTENER, ctypes.byref(program))
    if descriptor < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"seccomp listener: {os.strerror(error)}")
    return descriptor


@cache
def waiting_calls() -> tuple[int, int]:
    """Return the numbers of wait4 and waitid on this machine."""
    column = _ARCHITECTURES[platform.machine()][1]
    return _WAITS[0][column], _WAITS[1][column]


def running_programs() -> int:
    """Return how many programs run in this watched namespace, after all that ended ones left is killed."""
    number: int = _library()["syscall"](waiting_calls()[1], COUNT_PROGRAMS, 0, None, 0, None)
    return number


def lines(machine: str, *, is_memory_counted: bool, is_watched: bool = False) -> list[Line]:
    """Return the filter as instructions.

    Args:
        machine: name of the machine as in ``platform.machine``.
        is_memory_counted: see ``build_filter``.
        is_watched: see ``build_filter``.
    """
    architecture, column = _ARCHITECTURES[machine]
    made: list[Line] = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _ERROR | errno.EPERM),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    if machine == "x86_64":
        made += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _ERROR | errno.EPERM)]
    clone = _argument(_CLONE[column], 0, errno.EPERM, denied=[(_ANY_BIT, _NEW_NAMESPACES)])
    if is_watched:  # a thread is none of a program's processes
        clone[-2:-2] = [(_ANY_BIT, 1, 0, _THREAD), (_RETURN, 0, 0, _NOTIFY)]
        clone[0] = (_EQUAL, 0, len(clone) - 1, _CLONE[column])
        clone[2] = (_ANY_BIT, 3, 0, _NEW_NAMESPACES)
    made += clone
    made += _argument(_SOCKET[column], 0, errno.EAFNOSUPPORT, allowed=_SOCKETS)
    made += _argument(_SOCKETPAIR[column], 0, errno.EAFNOSUPPORT, allowed=(socket.AF_UNIX,))
    made += _argument(_PRLIMIT[column], 0, errno.EPERM, allowed=(0,))
    made += _argument(_FCNTL[column], 1, errno.EPERM, denied=[(_EQUAL, each) for each in _SIGNAL_OWNERS])
    made += _argument(_IOCTL[column], 1, errno.EPERM, denied=[(_EQUAL, each) for each in _TYPING])
    refused, missing = _ERROR | errno.EPERM, _ERROR | errno.ENOSYS
    results = {numbers[column]: refused for numbers in _DENIED.values() if numbers[column] >= 0}
    results[_CLONE3[column]] = missing  # its flags are in memory, which a filter cannot read
    if not is_memory_counted:
        results |= {numbers[column]: missing for numbers in _UNCOUNTED.values()}
    if is_watched:
        results |= {each[column]: _NOTIFY for each in (*_FORKS, *_WAITS) if each[column] >= 0}
    return made + _search(sorted(results.items()))


def _search(results: Sequence[tuple[int, int]]) -> list[Line]:
    """Give some calls a result and allow all others, by binary search: the kernel tries every call at load.

    Args:
        results: numbers of calls in rising order, each with the filter's result.
    """
    if len(results) > _LINEAR:
        middle = len(results) // 2
        below, above = _search(results[:middle]), _search(results[middle:])
        return [(_AT_LEAST, len(below), 0, results[middle][0]), *below, *above]
    tests = [line for number, result in results for line in ((_EQUAL, 0, 1, number), (_RETURN, 0, 0, result))]
    return [*tests, (_RETURN, 0, 0, _ALLOW)]


def _argument(
    number: int,
    index: int,
    error: int,
    *,
    allowed: Sequence[int] = (),
    denied: Sequence[tuple[int, int]] = (),
) -> list[Line]:
    """Allow or deny a call by the low half of one argument, as the kernel reads it.

    Args:
        number: number of the call.
        index: index of the argument.
        error: error of a denied call.
        allowed: allowed values; every other value is denied.
        denied: instructions and constants; if one matches, the call is denied. Either this or ``allowed``.
    """
    deny: Line = (_RETURN, 0, 0, _ERROR | error)
    allow: Line = (_RETURN, 0, 0, _ALLOW)
    tests = denied or [(_EQUAL, value) for value in allowed]
    body = [(code, len(tests) - place, 0, value) for place, (code, value) in enumerate(tests)]
    body += [allow, deny] if denied else [deny, allow]
    return [(_EQUAL, 0, 1 + len(body), number), (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * index), *body]
