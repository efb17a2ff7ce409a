"""Programs: run a model's Python code isolated from the scoring process.

    run_python(code) ─ a socket for one request ─> process 1 of a namespace: limits, output <─ start ─ runner
                                                      └─ fork ─> the program
    FinishedProgram  <── stdout, stderr, exit code ──────┘

    runner        waits until the current namespace takes a request or ends; then creates the next one
    process 1     consumes one request, from a socket that no program can reach; waits for it, then for the
                  program, its output, its deadline, and the exit of the requester; produces one frame
    shuts down    healthy: the socket ends; crash: the keeper's end kills all of it

Inside a sandboxed reward or agent, the sandbox's runner runs the code in a few milliseconds. Elsewhere each
call starts its own sandbox. The program is a fork of the runner, so that it starts without a new interpreter.
The runner is forked before the function is loaded: its memory holds only the standard library and this
package. The namespace of the next program is created before its request comes, while the current program
runs. Standard library only, so that a reward function starts quickly.
"""

from __future__ import annotations

import atexit
import importlib.util
import io
import math
import os
import resource
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path

from rillflow.errors import RewardError
from rillflow.isolation.frames import Frame, FrameError, FrameReader, encode, read_frames, write_all
from rillflow.isolation.kernel import BIND, MOUNTS, NO_DEVICES, NO_SET_USER, READ_ONLY, ask, mount
from rillflow.isolation.sandbox import PROGRAM_USER, Level, Visible
from rillflow.rewards.isolated_process import NamespaceRules, fork, furnish, give_up, start
from rillflow.rewards.program_files import KEEP
from rillflow.rewards.supervised import RUNNER, Supervised

OUTPUT_BYTES = 1 << 20
"""Bytes of stdout, and of stderr, that are kept; the rest is read and dropped."""

_ANSWER_BYTES = 12 * OUTPUT_BYTES + (1 << 16)
_STOP_S = 10.0
"""Longest time in seconds for a sandbox to end before it is killed."""
_GRACE_S = 10.0
_FILE = "/tmp/program.py"
_LAST_DESCRIPTOR = 4096
_TAKEN, _ENDED = b"t", b"e"


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


def keep_files(*paths: str | os.PathLike[str]) -> None:
    """Keep files that earlier programs of a row left, for the row's later programs.

    In the sandbox a program that a reward starts finds the files as the function left them: what earlier
    programs wrote is removed, except files that the command names. No effect outside the sandbox.

    Args:
        paths: files, or folders with everything in them.

    Example:
        subprocess.run(["cmake", "."], cwd=folder); keep_files(folder); subprocess.run(["make"], cwd=folder)
    """
    sys.audit(KEEP, paths)


def _runner(stack: ExitStack) -> socket.socket:
    """Return the socket of this sandbox's runner, or of a runner started for one program."""
    if RUNNER in os.environ:
        return socket.fromfd(int(os.environ[RUNNER]), socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        status, said = os.pipe()
        stack.callback(os.close, status)
        plan = Supervised(level=Level.FULL, visible=Visible(), status=said, programs=theirs.fileno())
        process = plan.start()
        os.close(said)
        stack.callback(process.end, terminated_s=_STOP_S)
    if wait([ours.fileno(), status]) == [status]:
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


# ---- the runner


def serve_programs(requests: socket.socket, rules: NamespaceRules, visible: Visible) -> None:
    """Run programs until the request socket ends.

    Args:
        requests: socket whose messages carry the socket of one request each.
        rules: see NamespaceRules.
        visible: user files that the sandbox shows and that programs must not see.
    """
    _hide(visible)
    requests.send(b"ready")
    said = _TAKEN
    while said != _ENDED:
        reading, writing = os.pipe()
        start(partial(_one_program, requests, writing, rules))
        os.close(writing)
        while os.waitpid(-1, os.WNOHANG)[0]:  # reap ended namespaces; the new one still runs
            pass
        said = os.read(reading, 1)
        os.close(reading)
        if not said:  # the kernel refused a namespace: one request gets no answer
            for descriptor in socket.recv_fds(requests, 16, 1)[1]:
                os.close(descriptor)


def _hide(visible: Visible) -> None:
    """Cover the user's files, in a mount namespace of the runner."""
    ask("unshare", MOUNTS)
    for name in dict.fromkeys((*visible.shown, *visible.copies)):
        if Path(name).is_dir():
            mount("none", name, "tmpfs", READ_ONLY | NO_SET_USER | NO_DEVICES, "mode=555,size=4k")
        elif Path(name).exists():
            mount("/dev/null", name, None, BIND)


def _one_program(requests: socket.socket, taken: int, rules: NamespaceRules) -> int:
    """Run process 1 of a program's namespace: take a request, run the program, collect its output, answer."""
    furnish(rules, is_program=True)
    _, descriptors, *_ = socket.recv_fds(requests, 16, 1)
    requests.close()
    os.write(taken, _TAKEN if descriptors else _ENDED)
    os.close(taken)
    if not descriptors:
        return 0
    (descriptor,) = descriptors
    request = next(read_frames(descriptor))
    Path(_FILE).write_text(request["code"], "utf-8", "surrogatepass")
    stdin, stdout, stderr = os.pipe(), os.pipe(), os.pipe()
    program = fork(partial(_run, (stdin[0], stdout[1], stderr[1]), request["memory_bytes"], rules))
    for end in (stdin[0], stdout[1], stderr[1]):
        os.close(end)
    kept = {stdout[0]: b"", stderr[0]: b""}
    text = request["stdin"].encode("utf-8", "surrogatepass")
    status = _collect(program, descriptor, stdin[1], text, kept, request["timeout_s"])
    answer: Frame = {
        "type": "finished",
        "exit_code": None if status is None else os.waitstatus_to_exitcode(status),
        "stdout": kept[stdout[0]].decode("utf-8", "replace"),
        "stderr": kept[stderr[0]].decode("utf-8", "replace"),
        "timed_out": status is None,
    }
    write_all(descriptor, encode(answer))
    return 0


def _collect(
    program: int, asker: int, stdin: int, text: bytes, kept: dict[int, bytes], limit_s: float
) -> int | None:
    """Copy input and output until the program ends; return its ``waitpid`` status, or None on timeout.

    Args:
        program: process id of the program.
        asker: socket of the requester; exit if its other end closes.
        stdin: write end of the program's input pipe.
        text: input of the program.
        kept: collected output, by read descriptor.
        limit_s: longest run time.
    """
    until = time.monotonic() + limit_s
    ended, unsent = os.pidfd_open(program), memoryview(text)
    poller = select.poll()
    for descriptor in (ended, *kept):
        poller.register(descriptor, select.POLLIN)
    poller.register(asker, select.POLLRDHUP)
    poller.register(stdin, select.POLLOUT)
    for descriptor in (stdin, *kept):
        os.set_blocking(descriptor, False)
    while (left_s := until - time.monotonic()) > 0:
        found = dict(poller.poll(math.ceil(1000 * left_s)))
        if asker in found:
            os._exit(0)
        if stdin in found:
            unsent = _write_some(stdin, unsent)
            if not unsent:
                poller.unregister(stdin)
                os.close(stdin)
        for descriptor in kept:
            if descriptor in found and not _read_some(descriptor, kept):
                poller.unregister(descriptor)
        if ended in found:
            while any(_read_some(descriptor, kept) for descriptor in kept):
                pass
            return os.waitpid(program, 0)[1]
    return None


def _write_some(stdin: int, unsent: memoryview) -> memoryview:
    try:
        return unsent[os.write(stdin, unsent) :] if unsent else unsent
    except BlockingIOError:
        return unsent
    except BrokenPipeError:
        return memoryview(b"")


def _read_some(descriptor: int, kept: dict[int, bytes]) -> bool:
    """Read available output; return whether more may be available."""
    try:
        piece = os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return False
    kept[descriptor] += piece[: OUTPUT_BYTES - len(kept[descriptor])]
    return bool(piece)


# ---- the program's own process


def _run(standard: tuple[int, int, int], memory_bytes: int, rules: NamespaceRules) -> int:
    """Drop all privileges, then run the file like ``python program.py``; return its exit status."""
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
    os.closerange(3, _LAST_DESCRIPTOR)
    os.chdir("/tmp")
    give_up(PROGRAM_USER if rules.has_users else None, rules)
    for limit, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, memory_bytes)):
        resource.setrlimit(limit, (value, value))
    sys.stdin = _text(io.BufferedReader(io.FileIO(0)), "surrogateescape")
    sys.stdout = _text(io.BufferedWriter(io.FileIO(1, "w")), "surrogateescape")
    sys.stderr = _text(io.BufferedWriter(io.FileIO(2, "w")), "backslashreplace")
    sys.argv, sys.dont_write_bytecode = [_FILE], True
    sys.path.insert(0, "/tmp")
    code = _status_of(_run_main)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    return code


def _text(stream: io.BufferedReader | io.BufferedWriter, errors: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        stream, encoding="utf-8", errors=errors, line_buffering=errors != "surrogateescape"
    )


def _run_main() -> None:
    spec = importlib.util.spec_from_file_location("__main__", _FILE)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules["__main__"] = module
    spec.loader.exec_module(module)


def _status_of(run: Callable[[], None]) -> int:
    """Return the exit status with which an interpreter would end."""
    try:
        run()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return int(ended.code or 0) & 0xFF
        sys.stderr.write(f"{ended.code}\n")
        return 1
    except BaseException as error:  # noqa: BLE001  a program may raise any error
        own = error.__traceback__
        while own is not None and own.tb_frame.f_code.co_filename != _FILE:
            own = own.tb_next
        traceback.print_exception(type(error), error, own)
        return 1
    return 0
