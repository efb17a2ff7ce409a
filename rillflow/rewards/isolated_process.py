"""Isolated process: run one row or one program in a pid namespace with its own /tmp and IPC.

    warm process ─┬─ row 0 ── go ──> namespace: function(**columns of row 0) ──> one frame, exit 0 ──> verdict
                  ├─ row 1 ── created in the meantime, waits for its turn
                  ├─ ...      late, dead, or not exactly one frame: an outcome of that row alone
                  └─ all verdicts ──> one answer to the driver

    start ──> process 1 of a new pid namespace ── furnish, give_up ──> the user's function, one row
                └─ its child processes: same namespace, no capability, filtered calls

Process 1 of a pid namespace cannot be killed or stopped from inside; ``hide_memory`` closes its memory and
descriptors to ptrace and /proc. So a program that the function starts can neither end the function nor reach
the pipe with its answer, and the function keeps its threads. When process 1 ends, the kernel ends all
processes of the namespace. None has access to the pipe to the driver.

``IsolatedRows`` runs the rows of a call:
    consumes      one frame from each row, on a separate pipe
    waits for     the frame and the end of process 1, until the row's deadline
    unblocked by  either; a late row is killed with all processes that it started
    produces      one verdict per row

The function runs on one row at a time. The next row's process is created in the meantime on another core, and
waits before the call. A row gets an equal share of the remaining time; late rows are tried once more with the
time that the others did not use. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import resource
import select
import signal
import socket
import stat
import sys
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial

from rillflow.isolation import kernel
from rillflow.isolation.frames import Frame, FrameError, FrameReader, encode, write_all
from rillflow.isolation.kernel import (
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
from rillflow.isolation.sandbox import FUNCTION_USER, SIZE, bind, mount_processes, outermost
from rillflow.rewards.logged import Sums, merged, sums_of
from rillflow.rewards.outcome import VERDICT_CHARACTERS, Verdict, is_verdict
from rillflow.rewards.program_files import ProgramFiles
from rillflow.rewards.program_watch import ProgramWatch

RESULT_BYTES = 1 << 22
"""Longest answer of one row, in bytes."""
LEAST_LIMIT_S = 0.05
"""Shortest time limit of a row in seconds."""
MAX_PROCESSES = 256
"""Largest number of processes and threads of one namespace, if its user is not the driver's."""

_HIGH_DESCRIPTOR = 200
_KEYCTL = {"x86_64": 250, "aarch64": 219}
_JOIN_SESSION_KEYRING = 1
_NO_SYSTEM_CALL = 38  # ENOSYS


@dataclass(frozen=True, kw_only=True)
class NamespaceRules:
    """The rules of every namespace of a row or program."""

    has_users: bool
    """Whether functions and programs run as separate users."""
    call_filter: bytes
    """Filter of denied system calls, as ``isolation.kernel.build_filter`` returns it."""
    watched_filter: bytes = b""
    """The same filter for rows of a reward, whose programs a ``ProgramWatch`` watches."""
    has_door: bool
    """Whether the sandbox's network leads to the policy; programs then get an empty network."""
    python: Sequence[str] = ()
    """Python's paths below /tmp, which every namespace shows at the same paths."""
    visible: Sequence[str] = ()
    """Paths of the user's files below /tmp, which the function's namespaces show."""


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


def furnish(rules: NamespaceRules, *, is_program: bool = False) -> None:
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


def give_up(user: int | None, rules: NamespaceRules, *, is_watched: bool = False) -> int:
    """Become a user without privileges, and filter system calls. Child processes cannot regain any privilege.

    Args:
        user: id of the user to become; None keeps the driver's.
        rules: see NamespaceRules.
        is_watched: whether starts and waits notify a listener.

    Returns:
        The descriptor of the notifications; -1 if there are none.

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
    if is_watched:
        return kernel.watch_calls(rules.watched_filter)
    kernel.deny_calls(rules.call_filter)
    return -1


# ---- rows in namespaces of their own


@dataclass(frozen=True, kw_only=True)
class _Row:
    """The warm process's handle of a row that waits for its turn."""

    process: int
    """Process 1 of the row's namespace."""
    turn: int
    """Descriptor to which a byte is written to start the call."""
    answers: int
    """Descriptor of its answer."""
    watch: ProgramWatch
    """Ends what the programs of the row leave behind."""

    def end(self) -> int:
        """Kill the rest of the namespace; return its ``waitpid`` status."""
        os.kill(self.process, signal.SIGKILL)
        status = os.waitpid(self.process, 0)[1]
        for descriptor in (self.turn, self.answers):
            os.close(descriptor)
        self.watch.close()
        return status


@dataclass(frozen=True, kw_only=True)
class IsolatedRows:
    """Runner of a function that puts each row in a namespace."""

    rules: NamespaceRules
    """Rules of the namespaces."""
    kept: Sequence[int]
    """Descriptors to close in every namespace: those to the driver."""
    folder: str
    """Working directory of the function; empty: /tmp."""

    def call(self, run: Callable[[Frame], Frame], request: Frame) -> Frame:
        """Answer a request of the driver.

        Args:
            run: calls the function in this process, and returns a frame.
            request: a ``run``, or a ``call`` of several rows with ``limit_s``.
        """
        if request["type"] != "call":
            return next(self._in_turn(run, [request], lambda _: math.inf))
        rows, until = range(request["rows"]), time.monotonic() + request["limit_s"]
        verdicts: dict[int, Verdict] = {}
        logged: dict[int, Sums] = {}
        waiting = list(rows)
        for _ in range(2):  # late rows get a second try
            late: list[int] = []
            asked = [_row_of(request, row) for row in waiting]
            answers = self._in_turn(
                run, asked, lambda left: max(LEAST_LIMIT_S, (until - time.monotonic()) / left)
            )
            with contextlib.closing(answers):
                for row, answer in zip(waiting, answers, strict=True):
                    if answer["type"] == "malformed":
                        return answer
                    verdicts[row], logged[row] = _verdict(answer), _logged(answer)
                    if answer["type"] == "late":
                        late.append(row)
                    if time.monotonic() > until:
                        break
            waiting = late
        unseen = f"no time was left of the call's {request['limit_s']:.3g} s"
        sums = merged(logged.values())
        scores = [verdicts.get(row, {"late": unseen}) for row in rows]
        return {"type": "scores", "scores": scores, **({"logged": sums} if sums else {})}

    def _in_turn(
        self, run: Callable[[Frame], Frame], requests: Sequence[Frame], limit_s: Callable[[int], float]
    ) -> Generator[Frame]:
        """Yield one answer per request: ``raised`` if its process died, ``late`` if it exceeded its time.

        Args:
            run: see ``call``.
            requests: requests of one row each.
            limit_s: returns a row's time limit, given the number of rows without an answer.
        """
        following = self._make(run, requests[0]) if requests else None
        try:
            for place in range(len(requests)):
                row, following = following, None
                assert row is not None, "each row is started before its turn"
                try:
                    with contextlib.suppress(BrokenPipeError):  # the status of its end has the reason
                        os.write(row.turn, b"x")
                    limit = limit_s(len(requests) - place)
                    begun = time.monotonic()
                    if place + 1 < len(requests):
                        following = self._make(run, requests[place + 1], beside=row)
                except BaseException:
                    row.end()
                    raise
                yield _awaited(row, limit, begun)
        finally:
            if following is not None:
                following.end()

    def _make(self, run: Callable[[Frame], Frame], request: Frame, beside: _Row | None = None) -> _Row:
        """Create the process of a row, which waits for its turn.

        Args:
            run: see ``call``.
            request: the request of its row.
            beside: the running row, whose descriptors the new process must not have.
        """
        go_read, go_write = os.pipe()
        reading, writing = os.pipe()
        ours, theirs = socket.socketpair()
        unused = [go_write, reading, ours.fileno()]
        unused += (beside.turn, beside.answers, *beside.watch.descriptors()) if beside else ()
        try:
            process = start(partial(self._within, run, request, go_read, writing, theirs, unused))
        finally:
            theirs.close()
            for descriptor in (go_read, writing):
                os.close(descriptor)
        return _Row(process=process, turn=go_write, answers=reading, watch=ProgramWatch(process, ours))

    def _within(
        self,
        run: Callable[[Frame], Frame],
        request: Frame,
        turn: int,
        writing: int,
        control: socket.socket,
        unused: Sequence[int],
    ) -> int:
        """Run process 1 of the row's namespace."""
        answers = fcntl.fcntl(writing, fcntl.F_DUPFD_CLOEXEC, _HIGH_DESCRIPTOR)
        for descriptor in (writing, *unused, *self.kept):
            os.close(descriptor)
        furnish(self.rules)
        os.chdir(self.folder or "/tmp")
        is_watched = request["type"] != "run"  # an agent's programs may work with what earlier ones left
        user = FUNCTION_USER if self.rules.has_users else None
        listener = give_up(user, self.rules, is_watched=is_watched)
        if is_watched:
            socket.send_fds(control, [b"watch"], [listener])
            os.close(listener)
        control.close()
        if not os.read(turn, 1):
            return 1
        os.close(turn)
        if is_watched:
            sys.addaudithook(ProgramFiles().hear)
        answer = encode(run(request))
        if os.getpid() == 1:  # a fork that returned from the user's code must not answer
            write_all(answers, answer)
        return 0


def _row_of(request: Frame, row: int) -> Frame:
    columns = {name: values[row : row + 1] for name, values in request["columns"].items()}
    return {**request, "rows": 1, "columns": columns}


def _awaited(row: _Row, limit_s: float, begun: float) -> Frame:
    """Return a row's frame after a clean end of its process, or a failure; end the rest of its namespace."""
    until = begun + limit_s
    ended = os.pidfd_open(row.process)
    answers = [row.answers]
    reader, frames, refused = FrameReader(RESULT_BYTES), list[Frame](), ""
    try:
        while True:
            left_s = until - time.monotonic()
            if left_s <= 0:
                return {"type": "late", "what": f"gave no answer within {limit_s:.3g} s"}
            poller = select.poll()
            for descriptor in (*answers, ended, *row.watch.descriptors()):
                poller.register(descriptor, select.POLLIN)
            found = {
                each for each, _ in poller.poll(None if left_s == math.inf else math.ceil(1000 * left_s))
            }
            row.watch.advance(found)
            if row.answers in found:
                piece = os.read(row.answers, 1 << 16)
                frames += reader.feed(piece)
                if not piece:
                    answers.clear()
            elif ended in found:  # all writers have ended, and their data is read
                break
    except FrameError as error:
        refused = f"wrote to the file descriptor of its results: {error}"
    finally:
        os.close(ended)
        status = row.end()
    if refused:
        return {"type": "raised", "what": refused}
    if status or len(frames) != 1 or reader.num_held:
        return {"type": "raised", "what": describe_end(status)}
    return frames[0]


def _logged(answer: Frame) -> Sums:
    """Return what a row logged; nothing if it is of another form, because its process may be hostile."""
    try:
        return sums_of(answer.get("logged", {}))
    except ValueError:
        return {}


def _verdict(answer: Frame) -> Verdict:
    match answer:
        case {"type": "scores", "scores": [value]} if is_verdict(value):
            verdict: Verdict = value
            return verdict
        case {"type": "scores", "scores": [{"late": str(what)}]}:
            return {"late": what[:VERDICT_CHARACTERS]}
        case {"type": "raised", "what": str(what)}:
            return what[:VERDICT_CHARACTERS]
        case {"type": "late", "what": str(what)}:
            return {"late": what}
    return f"answered with a frame of type {answer['type']!r}"
