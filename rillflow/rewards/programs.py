"""Programs: run a model's Python code isolated from the process that scores it.

    run_python(code) ──> a fresh process: no network, no user files, its own /tmp, processes and user
                  <── FinishedProgram: exit code, stdout, stderr

Inside a sandboxed reward or agent, the sandbox's runner runs the code in a few milliseconds. RemoteStore each
call starts its own sandbox. Standard library only, so that a reward function starts quickly.
"""

from __future__ import annotations

import os
import select
import socket
from contextlib import ExitStack
from dataclasses import dataclass

from rillflow.errors import RewardError
from rillflow.rewards.frames import Frame, FrameError, FrameReader, encode
from rillflow.rewards.runner import OUTPUT_BYTES
from rillflow.rewards.sandbox import Visible
from rillflow.rewards.supervised import RUNNER, Containment, Supervised

_ANSWER_BYTES = 12 * OUTPUT_BYTES + (1 << 16)
_GRACE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class FinishedProgram:
    """The result of a program.

    Example:
        FinishedProgram(exit_code=0, stdout="42\\n", stderr="", timed_out=False)
    """

    exit_code: int | None
    """Exit status; negative: the signal that killed it; None: it timed out."""
    stdout: str
    """First MiB of its standard output."""
    stderr: str
    """First MiB of its standard error, including the traceback of an exception."""
    timed_out: bool
    """Whether it was killed at its time limit."""


def run_python(
    code: str, *, stdin: str = "", timeout_s: float = 5.0, memory_bytes: int = 512 * 1024**2
) -> FinishedProgram:
    """Run code as ``python program.py`` in a sandbox; return its result.

    The program sees Python and its installed packages, and an empty /tmp. It sees no network, no user files,
    no environment variables that could hold a secret, and only its own processes. All processes that it
    starts end with it. Compare its output with the expected output in your own process: a program cannot copy
    data that it cannot read.

    Args:
        code: the program.
        stdin: its standard input.
        timeout_s: longest run time.
        memory_bytes: address space of each of its processes.

    Raises:
        RewardError: this machine cannot provide a sandbox.

    Example:
        run_python("print(6 * 7)").stdout == "42\\n"
    """
    request = {
        "type": "program",
        "code": code,
        "stdin": stdin,
        "timeout_s": timeout_s,
        "memory_bytes": memory_bytes,
    }
    with ExitStack() as stack:
        runner = stack.enter_context(_runner(stack))
        ours, theirs = map(stack.enter_context, socket.socketpair())
        socket.send_fds(runner, [b"program"], [theirs.fileno()])
        theirs.close()
        ours.settimeout(timeout_s + _GRACE_S)
        ours.sendall(encode(request))
        return _finished(ours)


def _runner(stack: ExitStack) -> socket.socket:
    """Return the socket of this sandbox's runner, or of a runner started for one program."""
    if RUNNER in os.environ:
        return socket.fromfd(int(os.environ[RUNNER]), socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        status, said = os.pipe()
        stack.callback(os.close, status)
        plan = Supervised(
            status=said, programs=theirs.fileno(), containment=Containment.SANDBOX, visible=Visible()
        )
        process = plan.start()
        os.close(said)
        stack.callback(process.wait)
        stack.callback(process.terminate)
    if select.select([ours.fileno(), status], [], [])[0] == [status]:
        told = os.read(status, 4096).decode(errors="replace")
        raise RewardError(
            "run_python cannot run programs on this machine",
            why=told or "its sandbox ended at once",
            fix="run on a Linux with user namespaces; `rillflow doctor` reports what is missing",
        )
    ours.recv(16)
    return ours


def _finished(answers: socket.socket) -> FinishedProgram:
    reader, frames = FrameReader(_ANSWER_BYTES), list[Frame]()
    try:
        while not frames and (piece := answers.recv(1 << 16)):
            frames += reader.feed(piece)
    except (FrameError, OSError) as error:
        raise RewardError("a program's sandbox gave no result", why=str(error)) from None
    match frames:
        case [
            {
                "type": "finished",
                "exit_code": int() | None as code,
                "stdout": str(stdout),
                "stderr": str(stderr),
                "timed_out": bool(timed_out),
            }
        ]:
            return FinishedProgram(exit_code=code, stdout=stdout, stderr=stderr, timed_out=timed_out)
    raise RewardError("a program's sandbox ended without a result", why="the kernel refused part of it")
