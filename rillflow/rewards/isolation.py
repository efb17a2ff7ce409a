"""Cell: isolate one row, or one program, in its own processes, /tmp and IPC, which end with it.

    warm process ── start ──> process 1 of a new pid namespace ── furnish ──> the user's function, one row
                                 └─ its child processes: same cell, no capability, filtered calls

Process 1 of a pid namespace cannot be killed or stopped from inside; ``hide_memory`` closes its memory and
descriptors to ptrace and /proc. So a program that the function starts can neither end the function nor reach
the pipe with its answer, and the function keeps its threads. When process 1 ends, the kernel ends all
processes of the cell. Standard library only.
"""

from __future__ import annotations

import os
import resource
import signal
import stat
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rillflow.rewards import kernel, seccomp
from rillflow.rewards.kernel import (
    ALL_BELOW,
    IPC,
    MOUNTS,
    NETWORK,
    NO_DEVICES,
    NO_SET_USER,
    PIDS,
    READ_ONLY,
    ask,
    mount,
    set_attributes,
)
from rillflow.rewards.sandbox import SIZE, bind, mount_processes, outermost

MAX_PROCESSES = 256
"""Largest number of processes and threads of one cell, if its user is not the driver's."""

_KEYCTL = {"x86_64": 250, "aarch64": 219}
_JOIN_SESSION_KEYRING = 1
_NO_SYSTEM_CALL = 38  # ENOSYS


@dataclass(frozen=True, kw_only=True)
class CellRules:
    """The rules of every cell of a sandbox."""

    has_users: bool
    """Whether functions and programs run as separate users."""
    call_filter: bytes
    """Filter of denied system calls, as ``seccomp.build_filter`` returns it."""
    has_door: bool
    """Whether the sandbox's network leads to the policy; programs then get an empty network."""
    python: Sequence[str] = ()
    """Python's paths below /tmp, which every cell shows at the same paths."""
    visible: Sequence[str] = ()
    """Paths of the user's files below /tmp, which the function's cells show."""


def start(run: Callable[[], int]) -> int:
    """Fork process 1 of a new pid namespace; return its id in this namespace.

    Args:
        run: runs in the process; returns its exit status.

    Raises:
        OSError: the kernel refuses.
    """
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        ask("unshare", PIDS)
        try:
            process = fork(run)
        finally:
            kernel.enter(own, PIDS)
    finally:
        os.close(own)
    return process


def fork(run: Callable[[], int | None]) -> int:
    """Fork a process that runs this function and always ends afterwards; return its id.

    Args:
        run: runs in the process; returns its exit status, or None for 0.
    """
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        code = run() or 0
    except BaseException:  # noqa: BLE001  a fork must not return into its parent's code
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def describe_end(ended: int) -> str:
    """Describe how a process ended, from the status of ``waitpid``."""
    code = os.waitstatus_to_exitcode(ended)
    if code >= 0:
        return f"exited with status {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "no name"
    memory = ", possibly because the machine ran out of memory" if -code == signal.SIGKILL else ""
    return f"was killed by signal {-code} ({name}){memory}"


def furnish(rules: CellRules, *, is_program: bool = False) -> None:
    """Give process 1 its own mounts, IPC, keyring and process group. Needs capabilities, and keeps them.

    Raises:
        OSError: the kernel refuses.
    """
    apart = NETWORK if is_program and rules.has_door else 0
    ask("unshare", MOUNTS | IPC | apart)
    kept = {
        name: os.open(name, os.O_PATH | os.O_CLOEXEC)
        for name in outermost((*rules.python, *(() if is_program else rules.visible)))
    }
    mount("none", "/tmp", "tmpfs", NO_SET_USER | NO_DEVICES, f"mode=1777,size={SIZE},nr_inodes=65536")
    for name, descriptor in kept.items():
        bind(f"/proc/self/fd/{descriptor}", name, is_folder=stat.S_ISDIR(os.fstat(descriptor).st_mode))
        os.close(descriptor)
        set_attributes(name, ALL_BELOW, add=READ_ONLY | NO_SET_USER)
    mount_processes("/proc")
    try:
        ask("syscall", _KEYCTL[os.uname().machine], _JOIN_SESSION_KEYRING, None, about="keyctl")
    except OSError as error:
        if error.errno != _NO_SYSTEM_CALL:  # a kernel without keys needs no new keyring
            raise
    os.setpgid(0, 0)  # signals to a process group stay inside
    kernel.hide_memory()


def give_up(user: int | None, rules: CellRules) -> None:
    """Become a user without privileges, and filter system calls. Child processes cannot regain any privilege.

    Args:
        user: id of the user to become; None keeps the driver's.
        rules: see CellRules.

    Raises:
        OSError: the kernel refuses.
    """
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    kernel.drop_capabilities()
    kernel.hide_memory()
    resource.setrlimit(resource.RLIMIT_NPROC, (MAX_PROCESSES, MAX_PROCESSES))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 receives only signals that it has a handler for
    seccomp.deny_calls(rules.call_filter)
