"""Child: the driver's end of one child process. Start it, send one call at a time, read answers, end it.

    STARTING ─ ready ─> IDLE ─ send ─> BUSY ─ answer ─> IDLE
        └───────────────┴── death, stop() ──┴─────────> ENDED

    consumes      four pipes: answers, status (how the process ended), output (its prints), requests (room)
    waits for     nothing: ``advance`` moves available bytes; ``next_answers`` waits for them or a deadline
    produces      one Answer for each call
    accepts       one frame, of the type and size that the open call expects, with the call's secret number;
                  anything else, or a death, makes the call fail
    shuts down    ``stop``: SIGTERM to the supervisor, which ends all its children; SIGKILL if it does not

``next_answers`` waits for several children at once, for ``RewardWorkers`` and for agents. Only it and
``stop`` block.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import reprlib
import secrets
import select
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto

from rillflow.errors import RewardError
from rillflow.isolation.frames import Frame, FrameError, FrameReader, encode
from rillflow.isolation.sandbox import Level, Visible
from rillflow.rewards.function import FunctionPath, Parameters
from rillflow.rewards.logged import Sums, sums_of
from rillflow.rewards.outcome import VERDICT_CHARACTERS, Outcome, Score, Verdict, is_verdict
from rillflow.rewards.supervised import REFUSED, Supervised
from rillflow.rewards.text_execution import visible_to

START_LIMIT_S = 60.0
"""Longest time in seconds to load the user's file: imports may be slow."""
READY_BYTES = 1 << 20
"""Longest answer to loading the file, in bytes."""
ROW_BYTES = 12 * VERDICT_CHARACTERS
"""Longest answer for one row in bytes: JSON writes a character with up to 12 bytes."""
CALL_BYTES = 1 << 16
"""Longest answer of a call in bytes, in addition to its rows: an error of the whole function."""
RETURNED_BYTES = 1 << 22
"""Longest JSON result of an agent, in bytes."""
STOP_LIMIT_S = 10.0
"""Longest time in seconds for a supervisor to end its children before it is killed."""

_IN_SANDBOX = (
    "; it runs in a sandbox without network, GPU and other files: list files that it reads in reward.files, "
    "or set sandbox = false if it runs no text of an answer"
)
_GRACE_S = 1.0
"""Additional seconds of a sandboxed call, to end the late row and to answer."""
_OUTPUT_BYTES = 2000
_CHUNK_BYTES = 1 << 16
_CHUNKS_PER_TURN = 64


class State(Enum):
    """State of a child process."""

    STARTING = auto()
    IDLE = auto()
    BUSY = auto()
    ENDED = auto()


Answer = list[Score] | Score
"""A score for every row of a call; or a timeout or an error of the call, with the function's last output."""


class Child:
    """One process of the user's function.

    Args:
        function: the function to load.
        memory_bytes: limit of its address space.
        level: strongest isolation to try.
        door: socket through which a sandbox sends a listening socket of its network.

    Raises:
        RewardError: the system cannot start another process.
    """

    def __init__(
        self,
        function: FunctionPath,
        *,
        memory_bytes: int,
        level: Level,
        door: int = -1,
    ) -> None:
        self.state = State.STARTING
        self.parameters: Parameters | None = None
        self.shortcomings = ""
        self.level = Level.NONE
        self._shut_in = level.is_sandbox
        self.start_s = 0.0
        self._started = time.monotonic()
        self.deadline = self._started + START_LIMIT_S
        self._function = function
        self._memory_bytes = memory_bytes
        self._asked: Frame = {}
        self._reader = FrameReader(READY_BYTES)
        self._output = b""
        try:
            self._spawn(level, door)
        except OSError as error:
            raise RewardError(f"cannot start a process for {function}", why=str(error)) from None
        load = {
            "type": "load",
            "file": str(function.file),
            "text": function.text,
            "name": function.name,
            "memory_bytes": memory_bytes,
        }
        self._unsent = memoryview(encode({**load, "path": [entry for entry in sys.path if entry]}))
        self._send_some()  # at once: the child loads in time even if the driver is busy

    def _spawn(self, level: Level, door: int) -> None:
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            requests, self._requests = _pipe(read=theirs, write=ours)
            self._answers, answers = _pipe(read=ours, write=theirs)
            self._status, status = _pipe(read=ours, write=theirs)
            self._printed, printed = _pipe(read=ours, write=theirs)
            self._watched = {self._answers, self._status, self._printed}
            for descriptor in (self._requests, *self._watched):
                os.set_blocking(descriptor, False)
            plan = Supervised(
                level=level,
                visible=visible_to(self._function) if level.is_sandbox else Visible(),
                requests=requests,
                answers=answers,
                status=status,
                door=door,
                memory_bytes=self._memory_bytes,
            )
            self._process = plan.start(printed)
            self._pipes = ours.pop_all()

    def send(self, call: Frame, *, limit_s: float) -> None:
        """Begin a call. ``advance`` returns its answer, or ``expire`` ends it after ``deadline``.

        Args:
            call: see ``call_frame``; a "call" is answered by scores, a "run" by any JSON value.
            limit_s: longest time in seconds.

        Raises:
            RewardError: the call is too long for one message.
        """
        assert self.state is State.IDLE, f"a child that is {self.state.name} takes no call"
        self._asked = {**call, "number": secrets.token_hex(8), "limit_s": limit_s}
        try:
            message = encode(self._asked)
        except FrameError as error:
            raise RewardError(
                f"{call['rows']} rows are too large for one call: {error}",
                why="a call sends its rows in one message",
                fix="raise reward.workers, or use fewer rows per step",
            ) from None
        rows_bytes = call["rows"] * ROW_BYTES if call["type"] == "call" else RETURNED_BYTES
        self._reader.limit_bytes = CALL_BYTES + rows_bytes
        self.state = State.BUSY
        self.deadline = time.monotonic() + limit_s + (_GRACE_S if self.level is not Level.NONE else 0.0)
        self._output = b""
        self._unsent = memoryview(message)
        self._send_some()  # at once: the driver may read answers only later

    def events(self) -> dict[int, int]:
        """Return the descriptors to poll, with their event masks."""
        events = dict.fromkeys(self._watched, select.POLLIN)
        if self._unsent:
            events[self._requests] = select.POLLOUT
        return events

    def advance(self) -> Answer | None:
        """Move the available bytes; return the answer if it is complete.

        Raises:
            RewardError: the function cannot be loaded, or did not return one entry per row.
        """
        ended = self._read(self._status)
        self._send_some()
        answered = self._read(self._answers) or b""
        self._output = (self._output + (self._read(self._printed) or b""))[-_OUTPUT_BYTES:]
        try:
            answer = self._interpret(self._reader.feed(answered), is_over=ended is not None)
        except FrameError as error:
            self.stop()
            return self._ended(f"wrote to the file descriptor of its results: {error}")
        if ended is None:
            return answer
        self.stop()
        return self._ended(ended.decode(errors="replace") or "was killed together with its supervisor")

    def expire(self) -> Score:
        """End a child that is past its deadline.

        Raises:
            RewardError: it has not finished loading the user's file.
        """
        loading = self.state is State.STARTING
        self.stop()
        if loading:
            raise RewardError(
                f"{self._function} was not loaded within {START_LIMIT_S:g} s{self._last_output()}",
                why=f"{self._function.file} computes or waits at module level",
                fix="move that code into the function",
            )
        return self._failure(Outcome.TIMEOUT, f"gave no answer within {self._asked['limit_s']:.3g} s")

    def stop(self) -> None:
        """End the child and every process it started; a second call has no effect.

        Raises:
            RewardError: the kernel does not end the supervisor.
        """
        if self.state is State.ENDED:
            return
        self.state = State.ENDED
        self.deadline = math.inf
        self._pipes.close()
        if self._process.end(terminated_s=STOP_LIMIT_S, killed_s=STOP_LIMIT_S) is not None:
            return
        raise RewardError(
            f"process {self._process.pid} of {self._function} does not end",
            why=f"it was killed {STOP_LIMIT_S:g} s ago; the kernel is waiting for a device or a file system",
        )

    def _interpret(self, frames: list[Frame], *, is_over: bool) -> Answer | None:
        """Return the answer in the frames; an ended process may only give its reason for not starting."""
        loading = self.state is State.STARTING
        if not frames or (is_over and not loading):
            return None
        if len(frames) > 1 or self._reader.num_held or self.state is State.IDLE:
            rest = f" and {self._reader.num_held} bytes" if self._reader.num_held else ""
            raise FrameError(f"expected {int(self.state is not State.IDLE)} frames, got {len(frames)}{rest}")
        number = frames[0].get("number")
        if not loading and number != self._asked["number"]:
            raise FrameError(f"an answer to call {reprlib.repr(number)}, which is not the open one")
        self.state = State.IDLE
        self.deadline = math.inf
        if loading:
            self._loaded(frames[0])
            return None
        return self._called(frames[0])

    def _loaded(self, frame: Frame) -> None:
        match frame:
            case {
                "type": "ready",
                "at_s": float(at_s),
                "shortcomings": str(told),
                "level": str(level),
                "accepted": list(accepted),
                "required": list(required),
                "takes_any": bool(takes_any),
            }:
                if level not in set(Level):
                    raise FrameError(f"an unknown level {reprlib.repr(level)}")
                if not self._started <= at_s <= time.monotonic():
                    raise FrameError(f"loading ended at {at_s:g} s, before it began or in the future")
                if odd := [name for name in (*accepted, *required) if not isinstance(name, str)]:
                    raise FrameError(f"a parameter {reprlib.repr(odd[0])}")
                self.shortcomings, self.level = told, Level(level)
                self.start_s = at_s - self._started
                self.parameters = Parameters(
                    accepted=frozenset(accepted),
                    required=tuple(required),
                    takes_any=takes_any,
                )
            case {"type": "refused", "what": str(what)}:
                raise self._unusable(what)
            case _:
                raise FrameError(f"an answer of type {reprlib.repr(frame['type'])} to loading")

    def _called(self, frame: Frame) -> Answer:
        is_scored = self._asked["type"] == "call"
        match frame:
            case {"type": "scores", "scores": list(verdicts)} if is_scored:
                if len(verdicts) != self._asked["rows"]:
                    raise FrameError(f"{len(verdicts)} scores for {self._asked['rows']} rows")
                return _with_logged([_score(verdict) for verdict in verdicts], _logged(frame))
            case {"type": "returned", "what": str(what)} if not is_scored:
                _require_json(what)
                return [Score(outcome=Outcome.SCORE, message=what, logged=_logged(frame))]
            case {"type": "raised", "what": str(what)}:
                return self._failure(Outcome.ERROR, what)
            case {"type": "malformed", "what": str(what)} if is_scored:
                raise RewardError(
                    f"{self._function} {what}",
                    why="it must return one number or None for every completion",
                    fix="return a list; for one score for all rows, return [score] * len(completions)",
                )
        raise FrameError(f"an answer of type {reprlib.repr(frame['type'])} to a {self._asked['type']}")

    def _ended(self, how: str) -> Score:
        """Return the failure, or raise the error, of a process that ended by itself."""
        if self.parameters is None and how.startswith(REFUSED):
            raise RewardError(
                f"{self._function} {how}",
                why="it needs the sandbox: it runs text, it is not known to be harmless (`rillflow check "
                "--no-code` names the place), or its sandbox setting is true",
                fix="run on a Linux with user namespaces (`rillflow doctor` reports what is missing); "
                "sandbox = false runs it with your rights: an answer that it executes can set its own reward",
            )
        if self.parameters is None:
            raise self._unusable(f"cannot be loaded: the process {how}")
        return self._failure(Outcome.ERROR, how)

    def _unusable(self, what: str) -> RewardError:
        return RewardError(
            f"{self._function} {what}{self._last_output()}",
            why=f"every child process loads {self._function.file}, with {self._memory_bytes} bytes of memory",
            fix="fix the file, or raise reward.memory_bytes if memory ran out"
            + (_IN_SANDBOX if self._shut_in else ""),
        )

    def _failure(self, outcome: Outcome, what: str) -> Score:
        return Score(outcome=outcome, message=what + self._last_output())

    def _last_output(self) -> str:
        text = self._output.decode(errors="replace").strip()
        return f"; its last output: {text}" if text else ""

    def _send_some(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._requests, self._unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._unsent = memoryview(b"")  # the status pipe has the reason

    def _read(self, descriptor: int) -> bytes | None:
        """Return available bytes of a pipe, None if there are none, b"" at its end."""
        pieces: list[bytes] = []
        while descriptor in self._watched and len(pieces) < _CHUNKS_PER_TURN:
            try:
                piece = os.read(descriptor, _CHUNK_BYTES)
            except BlockingIOError:
                return b"".join(pieces) if pieces else None
            if not piece:
                self._watched.discard(descriptor)
            pieces.append(piece)
        return b"".join(pieces)


def _pipe(*, read: contextlib.ExitStack, write: contextlib.ExitStack) -> tuple[int, int]:
    """Return the read and the write end of a pipe, each closed by its stack."""
    reading, writing = os.pipe()
    read.callback(os.close, reading)
    write.callback(os.close, writing)
    return reading, writing


def _score(verdict: Verdict) -> Score:
    """Return the score of a verdict, after checking its number again."""
    match verdict:
        case None:
            return Score(outcome=Outcome.ABSTAIN)
        case str():
            return Score(outcome=Outcome.ERROR, message=verdict)
        case float() if is_verdict(verdict):
            return Score(outcome=Outcome.SCORE, value=verdict)
        case {"late": str(message)}:
            return Score(outcome=Outcome.TIMEOUT, message=message)
    raise FrameError(f"a verdict {reprlib.repr(verdict)}")


def _logged(frame: Frame) -> Sums:
    try:
        return sums_of(frame.get("logged", {}))
    except ValueError as error:
        raise FrameError(str(error)) from None


def _with_logged(scores: list[Score], logged: Sums) -> list[Score]:
    """Return the scores of a call, the first with everything that the call logged."""
    return [replace(scores[0], logged=logged), *scores[1:]] if logged and scores else scores


def _require_json(text: str) -> None:
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"the returned value is not JSON: {error}") from None


def next_answers(
    children: Sequence[Child], until: float = math.inf, woken: int | None = None
) -> list[tuple[Child, Answer]]:
    """Wait for the next event of some children; return the calls that it ended.

    Args:
        children: ended ones are ignored.
        until: time of ``time.monotonic`` at which the wait ends; a deadline of a child ends it earlier.
        woken: further descriptor that ends the wait when it is readable.

    Raises:
        RewardError: see ``Child.advance`` and ``Child.expire``.
    """
    running = [child for child in children if child.state is not State.ENDED]
    poller, owners = select.poll(), dict[int, Child]()
    for child in running:
        for descriptor, mask in child.events().items():
            poller.register(descriptor, mask)
            owners[descriptor] = child
    if woken is not None:
        poller.register(woken, select.POLLIN)
    wait_s = min([until, *(child.deadline for child in running)]) - time.monotonic()
    ready = [descriptor for descriptor, _ in poller.poll(max(0, math.ceil(1000 * wait_s)))]
    moved = {owners[descriptor] for descriptor in ready if descriptor in owners}
    ended = [(child, answer) for child in moved if (answer := child.advance()) is not None]
    late = [child for child in running if child.deadline <= time.monotonic()]
    return [*ended, *((child, child.expire()) for child in late)]
