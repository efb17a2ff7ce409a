"""Pool: the driver's end of the environment processes. It gives rows to them and reads their answers.

    rows ─ begin, step ─> the process with the fewest rows ─ one frame of calls a turn ─> host.py
    Told <─ an observation, or the reason of a failure <─ one frame of answers ──────────────┘

``turn`` (in the thread of the sampler's rank)
    consumes      calls for rows; frames of answers; ends of processes
    waits for     the next answer, at most as long as it is told to, or until the next deadline of a row
    unblocked by  an answer, the end of a process, or a deadline
    produces      one Told for each call
    shuts down    ``close``: all processes end; the driver's death ends them, kill -9 included

A call that takes longer than ``timeout_s`` fails its own row. Its process gets no further row, and is killed
when its other rows have ended. A process that ends by itself fails the rows that it holds. Answers of rows
that have left are dropped.
"""

from __future__ import annotations

import hmac
import math
import secrets
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from rillflow.errors import RolloutError
from rillflow.isolation.frames import Frame, FrameError, FrameReader, encode
from rillflow.isolation.sandbox import Level
from rillflow.rewards.child import START_LIMIT_S, Child, State
from rillflow.rewards.function import FunctionPath, Parameters, choose, place_of
from rillflow.rewards.outcome import Outcome
from rillflow.rewards.text_execution import is_shut_in, visible_to
from rillflow_parts.environments.config import EnvironmentConfig
from rillflow_parts.environments.source import EnvironmentSource

ROWS = 128
"""Largest number of rows that one process holds."""
_HOST = Path(__file__).resolve().parent / "child" / "host.py"
_KEY_BYTES = 32
_OBSERVED = (int, str | list | None, float, bool, dict, list | None)
"""Types of an answer: row, observation, reward, whether the episode has ended, metrics, tools."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """The answer of an environment to one call."""

    row: int
    """Number of the row."""
    observation: str | list[dict[str, Any]] | None = None
    """What the environment says; None for nothing."""
    reward: float = 0.0
    """Reward of the step."""
    is_over: bool = False
    """Whether the episode has ended."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the info."""
    tools: list[dict[str, Any]] | None = None
    """Tools that the policy may call from now on; None: as before."""
    failed: tuple[Outcome, str] | None = None
    """Outcome and reason of a failed call."""


class _Process:
    """One environment process, its socket, and the rows that it holds."""

    def __init__(self, source: EnvironmentSource, config: EnvironmentConfig, *, shut_in: bool) -> None:
        shown = tuple(map(Path, visible_to(source.function).copies))
        function = FunctionPath(file=_HOST, name="serve", files=shown)
        level = Level.FULL if shut_in else Level.NONE
        ours, theirs = socket.socketpair()
        with ours, theirs:
            door = theirs.fileno() if shut_in else -1
            self.child = Child(function, memory_bytes=config.memory_bytes, level=level, door=door)
            theirs.close()
            self._listening = _received(ours) if shut_in else socket.create_server(("127.0.0.1", 0))
        self.parameters: Parameters | None = None
        self.rows = dict[int, float]()
        """Rows whose environments are open, with the deadline of the call; infinity if no call is open."""
        self.is_stuck = False
        """Whether a call of it hangs."""
        self._source, self._config, self._key = source, config, secrets.token_hex(_KEY_BYTES // 2)
        self._is_asked = self._takes_messages = False
        self._link: socket.socket | None = None
        self._reader, self._head = FrameReader(), b""
        self._calls, self._unsent = list[Any](), memoryview(b"")
        self._until = time.monotonic() + 2 * START_LIMIT_S
        if self._listening is not None:
            self._listening.setblocking(False)

    @property
    def is_ended(self) -> bool:
        """Whether the process has ended."""
        return self.child.state is State.ENDED

    @property
    def deadline(self) -> float:
        """Time at which a call, or the start, has taken too long."""
        return min(self.rows.values(), default=math.inf) if self.parameters is not None else self._until

    def call(self, row: int, what: str, given: object) -> None:
        """Queue a call; ``flush`` sends it."""
        if what == "close":
            del self.rows[row]
        else:
            self.rows[row] = math.inf
        self._calls.append([row, what, given])

    def flush(self) -> None:
        """Send the queued calls, as far as the socket takes them."""
        if self.parameters is None or self._link is None:
            return
        if self._calls:
            until = time.monotonic() + self._config.timeout_s
            asked = [self._chosen(*call) for call in self._calls]
            self.rows |= {row: until for row, what, _ in asked if what != "close"}
            self._calls.clear()
            self._unsent = memoryview(bytes(self._unsent) + encode({"type": "calls", "calls": asked}))
        try:
            while self._unsent:
                self._unsent = self._unsent[self._link.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent = memoryview(b"")  # the child's end has the reason

    def events(self) -> dict[int, int]:
        """Return the descriptors to poll, with their event masks."""
        found = self.child.events()
        if self._link is not None:
            found[self._link.fileno()] = select.POLLIN | (select.POLLOUT if self._unsent else 0)
        elif self._listening is not None:
            found[self._listening.fileno()] = select.POLLIN
        return found

    def advance(self, ready: Iterable[int]) -> list[Told]:
        """Move the available bytes; return the answers.

        Raises:
            RewardError: the host cannot be started.
            RolloutError: the class cannot be loaded.
        """
        told: list[Told] = []
        try:
            if {*ready} & {*self.child.events()}:
                told += self._of_child()
            if not self.is_ended and self._link is None:
                self._accept()
            if self._link is not None:
                told += self._read(self._link)
        except FrameError as error:
            told += self._fail(f"wrote to the socket of its answers: {error}")
        return told

    def late(self) -> list[Told]:
        """Fail the rows whose call has taken too long."""
        now = time.monotonic()
        if self.parameters is None and now >= self._until:
            self.stop()
            raise RolloutError(
                f"the environment {self._source.named} was not loaded within {2 * START_LIMIT_S:g} s",
                why=f"{self._source.function.file} computes or waits at module level",
                fix="move that code into the class",
            )
        late = [row for row, until in self.rows.items() if until <= now]
        for row in late:
            del self.rows[row]
        self.is_stuck = self.is_stuck or bool(late)
        what = f"gave no answer within {self._config.timeout_s:.3g} s"
        return [Told(row=row, failed=(Outcome.TIMEOUT, f"{self._name} {what}")) for row in late]

    def stop(self) -> None:
        """End the process."""
        for each in (self._link, self._listening):
            if each is not None:
                each.close()
        self._link = self._listening = None
        self.child.stop()

    @property
    def _name(self) -> str:
        return f"the environment {self._source.function.name} ({place_of(self._source.function)})"

    def _chosen(self, row: int, what: str, given: Any) -> list[Any]:
        assert self.parameters is not None, "calls wait until the class is loaded"
        if what == "reset":
            given = dict(choose(given, self.parameters, f"{self._source.function.name}.reset"))
        elif what == "step":
            given = given["message" if self._takes_messages else "text"]
        return [row, what, given]

    def _of_child(self) -> list[Told]:
        """Read the child's pipes; its end fails all rows that it holds."""
        answer = self.child.advance()
        if self.child.state is State.IDLE and not self._is_asked:
            path = self._source.function
            load = {"file": str(path.file), "text": path.text, "name": path.name}
            columns = {
                "port": 0 if self._listening is None else self._listening.getsockname()[1],
                "key": self._key,
                "load": {**load, "path": [entry for entry in sys.path if entry]},
                "arguments": dict(self._source.arguments),
            }
            self.child.send({"type": "run", "rows": 1, "columns": columns}, limit_s=START_LIMIT_S)
            self.child.deadline, self._until = math.inf, time.monotonic() + 2 * START_LIMIT_S
            self._is_asked = True
            return []
        if answer is None:
            return []
        if self._link is None:
            self._accept()
        told = [] if self._link is None else self._read(self._link)  # what it sent before its end
        why = answer[0].message if isinstance(answer, list) else answer.message
        return [*told, *self._fail(why)]

    def _fail(self, why: str) -> list[Told]:
        """End the process and fail its rows; if it was not loaded yet, the class is at fault."""
        self.stop()
        if self.parameters is None:
            raise self._unusable(why)
        rows, self.rows = [*self.rows], {}
        return [Told(row=row, failed=(Outcome.ERROR, f"{self._name} {why}")) for row in rows]

    def _unusable(self, why: str) -> RolloutError:
        return RolloutError(
            f"{place_of(self._source.function)}: the environment {self._source.function.name} {why}",
            why=f"every environment process loads {self._source.function.file}",
            fix="fix the file, or raise rollout.environment.memory_bytes if memory ran out",
        )

    def _accept(self) -> None:
        if self._listening is None:
            return
        try:
            self._link = self._listening.accept()[0]
        except BlockingIOError:
            return
        self._link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._link.setblocking(False)

    def _read(self, link: socket.socket) -> list[Told]:
        told: list[Told] = []
        while True:
            try:
                piece = link.recv(1 << 16)
            except OSError:  # no more, or the child's end has the reason
                return told
            if not piece:
                return told
            if len(self._head) < _KEY_BYTES:
                self._head, piece = (self._head + piece)[:_KEY_BYTES], (self._head + piece)[_KEY_BYTES:]
                if len(self._head) == _KEY_BYTES and not hmac.compare_digest(self._head, self._key.encode()):
                    link.close()
                    self._link, self._head = None, b""
                    return told
            for frame in self._reader.feed(piece):
                told += self._of_frame(frame)

    def _of_frame(self, frame: Frame) -> list[Told]:
        match frame:
            case {"type": "ready", "accepted": list(accepted), "required": list(required)}:
                self.parameters = Parameters(
                    accepted=frozenset(map(str, accepted)),
                    required=tuple(map(str, required)),
                    takes_any=frame.get("takes_any") is True,
                )
                self._takes_messages = frame.get("takes_messages") is True
                self.flush()
                return []
            case {"type": "refused", "what": str(what)}:
                self.stop()
                raise self._unusable(what)
            case {"type": "answers", "answers": list(answers)}:
                told = [each for each in map(_told, answers) if self.rows.get(each.row, math.inf) < math.inf]
                for each in told:
                    self.rows[each.row] = math.inf
                    if each.is_over or each.failed is not None:
                        del self.rows[each.row]  # the process has closed it
                return told
        raise FrameError(f"an answer of type {frame['type']!r}")


def _told(answer: Any) -> Told:
    if isinstance(answer, list) and len(answer) == len(_OBSERVED) and all(map(isinstance, answer, _OBSERVED)):
        row, said, reward, is_over, metrics, tools = answer
        return Told(row=row, observation=said, reward=reward, is_over=is_over, metrics=metrics, tools=tools)
    match answer:
        case [int(row), str(what)]:
            return Told(row=row, failed=(Outcome.ERROR, f"the environment {what}"))
    raise FrameError("an answer that is no observation")


def _received(ours: socket.socket) -> socket.socket | None:
    """Return the listening socket that a sandbox sends; None if it could not start."""
    ours.settimeout(START_LIMIT_S)
    descriptors = socket.recv_fds(ours, 16, 1)[1]
    return socket.socket(fileno=descriptors[0]) if descriptors else None


class EnvironmentPool:
    """The environment processes of one sampler rank; the first one starts at once.

    Args:
        source: the environment.
        config: its settings.

    Raises:
        RewardError: the system cannot start a process.
    """

    def __init__(self, source: EnvironmentSource, config: EnvironmentConfig) -> None:
        self._source, self._config = source, config
        self._shut_in = is_shut_in(source.function, config.sandbox, unless_harmless=False)
        self._processes = [self._started()]
        self._owners: dict[int, _Process] = {}
        self._numbers, self._told = count(), deque[Told]()

    @property
    def room(self) -> int:
        """Number of further rows that the processes can hold."""
        return self._config.workers * ROWS - len(self._owners)

    def begin(self, columns: Mapping[str, object]) -> int:
        """Make an environment for a row and reset it with these columns; return the row's number.

        Raises:
            RewardError: the system cannot start another process.
        """
        usable = [each for each in self._processes if not each.is_ended and not each.is_stuck]
        process = min(usable, key=lambda each: len(each.rows), default=None)
        if process is None or (process.rows and len(usable) < self._config.workers):
            process = self._started()
            self._processes.append(process)
        number = next(self._numbers)
        self._owners[number] = process
        process.call(number, "reset", columns)
        return number

    def step(self, row: int, text: str, message: Mapping[str, Any]) -> None:
        """Give an environment the policy's turn, as text and as a message."""
        process = self._owners[row]
        if process.is_ended:
            self._told.append(Told(row=row, failed=(Outcome.ERROR, "the environment's process has ended")))
        else:
            process.call(row, "step", {"text": text, "message": message})

    def leave(self, row: int) -> None:
        """Forget a row; its environment is closed."""
        process = self._owners.pop(row)
        if row in process.rows:
            process.call(row, "close", None)

    def flush(self) -> None:
        """Send all calls; end the processes that hang and hold no other row."""
        for process in self._processes:
            if process.is_stuck and not process.rows:
                process.stop()
            process.flush()
        self._processes = [each for each in self._processes if not each.is_ended]

    def turn(self, wait_s: float) -> list[Told]:
        """Send all calls; return the answers that are there, after at most ``wait_s`` seconds.

        Raises:
            RewardError: a process cannot be started.
            RolloutError: the class cannot be loaded.
        """
        self.flush()
        told = [*self._told]
        self._told.clear()
        poller, owners = select.poll(), dict[int, _Process]()
        for process in self._processes:
            for descriptor, mask in process.events().items():
                poller.register(descriptor, mask)
                owners[descriptor] = process
        until = min((each.deadline for each in self._processes), default=math.inf) - time.monotonic()
        limit_s = 0.0 if told else max(0.0, min(wait_s, until))
        ready = [descriptor for descriptor, _ in poller.poll(math.ceil(1000 * limit_s))]
        for process in dict.fromkeys(owners[descriptor] for descriptor in ready):
            told += process.advance(each for each in ready if owners[each] is process)
        if until <= limit_s:
            told += [each for process in self._processes for each in process.late()]
        return [each for each in told if each.row in self._owners]

    def load(self) -> Parameters:
        """Wait until the class is loaded; return the columns that ``reset`` takes.

        Raises:
            RewardError, RolloutError: see ``turn``.
        """
        while self._processes[0].parameters is None:
            self.turn(1.0)
        return self._processes[0].parameters

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.stop()
        self._processes, self._owners = [], {}

    def _started(self) -> _Process:
        return _Process(self._source, self._config, shut_in=self._shut_in)
