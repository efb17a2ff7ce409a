"""The seccomp filter, interpreted as by the kernel: denied and allowed system calls."""

from __future__ import annotations

import errno
import socket

import pytest

from rillflow.isolation.kernel import Line, lines

X86_64, I386, ALLOWED, NOTIFIED = 0xC000003E, 0x40000003, 0x7FFF0000, 0x7FC00000
NEW_USER_NAMESPACE, SIGCHLD = 0x10000000, 17


def judged(program: list[Line], number: int, *arguments: int, architecture: int = X86_64) -> int:
    """Return the result for a call: 0 if it is allowed, -1 if a listener is asked, else the error."""
    place, held = 0, 0
    while True:
        code, if_true, if_false, constant = program[place]
        match code:
            case 0x20:
                known = {0: number, 4: architecture}
                held = known[constant] if constant in known else [*arguments, *[0] * 6][(constant - 16) // 8]
                place += 1
            case 0x06:
                assert constant in (ALLOWED, NOTIFIED) or constant >> 16 == 5
                return {ALLOWED: 0, NOTIFIED: -1}.get(constant, constant & 0xFFFF)
            case _:
                is_true = {0x15: held == constant, 0x35: held >= constant, 0x45: held & constant != 0}[code]
                place += 1 + (if_true if is_true else if_false)


@pytest.mark.parametrize(
    ("number", "arguments", "error"),
    [
        (101, (), errno.EPERM),  # ptrace
        (165, (), errno.EPERM),  # mount
        (250, (), errno.EPERM),  # keyctl
        (272, (), errno.EPERM),  # unshare
        (425, (), errno.EPERM),  # io_uring_setup
        (56, (NEW_USER_NAMESPACE,), errno.EPERM),  # clone
        (56, (SIGCHLD,), 0),
        (435, (), errno.ENOSYS),  # clone3
        (41, (socket.AF_VSOCK,), errno.EAFNOSUPPORT),  # socket
        (41, (socket.AF_INET,), 0),
        (53, (socket.AF_INET,), errno.EAFNOSUPPORT),  # socketpair
        (302, (1,), errno.EPERM),  # prlimit64 of another process
        (302, (0,), 0),
        (72, (3, 8), errno.EPERM),  # fcntl F_SETOWN
        (72, (3, 1), 0),
        (16, (0, 0x5412), errno.EPERM),  # ioctl TIOCSTI
        (0x40000000 + 39, (), errno.EPERM),  # getpid by the x32 table
        (39, (), 0),
        (462, (), 0),  # newer than the table
    ],
)
def test_a_call_is_denied_or_allowed(number: int, arguments: tuple[int, ...], error: int) -> None:
    assert judged(lines("x86_64", is_memory_counted=True), number, *arguments) == error


def test_a_call_of_another_architecture_is_denied() -> None:
    assert judged(lines("x86_64", is_memory_counted=True), 39, architecture=I386) == errno.EPERM


def test_memory_that_nothing_counts_is_denied() -> None:
    for number in (29, 319):  # shmget, memfd_create
        assert judged(lines("x86_64", is_memory_counted=True), number) == 0
        assert judged(lines("x86_64", is_memory_counted=False), number) == errno.ENOSYS


def test_every_other_call_is_allowed() -> None:
    program = lines("x86_64", is_memory_counted=True)
    denied = {number for number in range(600) if judged(program, number)}
    tried = {number for number in range(600) if judged(lines("x86_64", is_memory_counted=False), number)}
    assert tried - denied == {29, 319}
    assert not denied & {0, 1, 2, 3, 9, 10, 11, 12, 39, 57, 59, 60, 61, 62, 202, 231, 257}, (
        "what Python needs"
    )


@pytest.mark.parametrize(
    ("number", "arguments", "result"),
    [
        (56, (SIGCHLD,), -1),  # clone of a process
        (56, (0x00010000 | 0x100,), 0),  # of a thread
        (56, (NEW_USER_NAMESPACE | SIGCHLD,), errno.EPERM),
        (57, (), -1),  # fork
        (58, (), -1),  # vfork
        (61, (), -1),  # wait4
        (247, (), -1),  # waitid
        (435, (), errno.ENOSYS),  # clone3
    ],
)
def test_a_watched_cell_asks_before_it_starts_a_process_or_waits(
    number: int, arguments: tuple[int, ...], result: int
) -> None:
    program = lines("x86_64", is_memory_counted=True, is_watched=True)
    assert judged(program, number, *arguments) == result


def test_watching_changes_no_other_call() -> None:
    plain = lines("x86_64", is_memory_counted=True)
    watched = lines("x86_64", is_memory_counted=True, is_watched=True)
    changed = {number for number in range(600) if judged(plain, number) != judged(watched, number)}
    assert changed == {56, 57, 58, 61, 247}
