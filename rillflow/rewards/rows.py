"""Rows: in the sandbox, run each row of a call in a fork of the process that has loaded the function.

    warm process ─┬─ row 0 ── go ──> cell: function(**columns of row 0) ──> one frame, exit 0 ──> verdict
                  ├─ row 1 ── created in the meantime, waits for its turn
                  ├─ ...      late, dead, or not exactly one frame: an outcome of that row alone
                  └─ all verdicts ──> one answer to the driver

    consumes      one frame from each cell, on a separate pipe
    waits for     the frame and the cell's end, until the row's deadline
    unblocked by  either; a late cell is killed with all processes that it started
    produces      one verdict per row

The function runs in one cell at a time. The next row's cell is created in the meantime on another core, and
waits before the call. A row gets an equal share of the remaining time; late rows are tried once more with the
time that the others did not use. A cell has no access to the pipe to the driver. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import signal
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial

from rillflow.rewards.frames import Frame, FrameError, FrameReader, encode, write_all
from rillflow.rewards.isolation import CellRules, describe_end, furnish, give_up, start
from rillflow.rewards.sandbox import FUNCTION_USER
from rillflow.rewards.verdict import VERDICT_CHARACTERS, Verdict, is_verdict

CELL_BYTES = 1 << 22
"""Longest answer of one cell, in bytes."""
LEAST_LIMIT_S = 0.05
"""Shortest time limit of a row in seconds."""

_HIGH_DESCRIPTOR = 200


@dataclass(frozen=True, kw_only=True)
class _Cell:
    """The warm process's handle of a cell that waits for its turn."""

    process: int
    """Process 1 of the cell."""
    turn: int
    """Descriptor to which a byte is written to start the call."""
    answers: int
    """Descriptor of its answer."""

    def end(self) -> int:
        """Kill the rest of the cell; return its ``waitpid`` status."""
        os.kill(self.process, signal.SIGKILL)
        status = os.waitpid(self.process, 0)[1]
        for descriptor in (self.turn, self.answers):
            os.close(descriptor)
        return status


@dataclass(frozen=True, kw_only=True)
class RowCells:
    """Runner of a function that puts each row in a cell."""

    rules: CellRules
    """Rules of the cells."""
    kept: Sequence[int]
    """Descriptors to close in every cell: those to the driver."""
    folder: str
    """Working directory of the function; empty: /tmp."""

    def call(self, run: Callable[[Frame], Frame], request: Frame) -> Frame:
        """Answer a request of the driver.

        Args:
            run: calls the function in this process, and returns a frame.
            request: a ``run``, or a ``call`` of several rows with ``limit_s``.
        """
        if request["type"] == "run":
            return next(self._in_turn(run, [request], lambda _: math.inf))
        rows, until = range(request["rows"]), time.monotonic() + request["limit_s"]
        verdicts: dict[int, Verdict] = {}
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
                    verdicts[row] = _verdict(answer)
                    if answer["type"] == "late":
                        late.append(row)
                    if time.monotonic() > until:
                        break
            waiting = late
        unseen = f"no time was left of the call's {request['limit_s']:.3g} s"
        return {"type": "scores", "scores": [verdicts.get(row, {"late": unseen}) for row in rows]}

    def _in_turn(
        self, run: Callable[[Frame], Frame], requests: Sequence[Frame], limit_s: Callable[[int], float]
    ) -> Generator[Frame]:
        """Yield one answer per request: ``raised`` if its cell died, ``late`` if it exceeded its time.

        Args:
            run: see ``call``.
            requests: requests of one row each.
            limit_s: returns a row's time limit, given the number of rows without an answer.
        """
        following = self._make(run, requests[0]) if requests else None
        try:
            for place in range(len(requests)):
                cell, following = following, None
                assert cell is not None, "each cell is started before its turn"
                try:
                    with contextlib.suppress(BrokenPipeError):  # the cell's status has the reason
                        os.write(cell.turn, b"x")
                    limit = limit_s(len(requests) - place)
                    begun = time.monotonic()
                    if place + 1 < len(requests):
                        following = self._make(run, requests[place + 1], beside=cell)
                except BaseException:
                    cell.end()
                    raise
                yield _awaited(cell, limit, begun)
        finally:
            if following is not None:
                following.end()

    def _make(self, run: Callable[[Frame], Frame], request: Frame, beside: _Cell | None = None) -> _Cell:
        """Create a cell that waits for its turn.

        Args:
            run: see ``call``.
            request: the request of its row.
            beside: the running cell, whose descriptors the new cell must not have.
        """
        go_read, go_write = os.pipe()
        reading, writing = os.pipe()
        unused = [go_write, reading, *((beside.turn, beside.answers) if beside else ())]
        try:
            process = start(partial(self._within, run, request, go_read, writing, unused))
        finally:
            for descriptor in (go_read, writing):
                os.close(descriptor)
        return _Cell(process=process, turn=go_write, answers=reading)

    def _within(
        self,
        run: Callable[[Frame], Frame],
        request: Frame,
        turn: int,
        writing: int,
        unused: Sequence[int],
    ) -> int:
        """Run process 1 of the cell."""
        answers = fcntl.fcntl(writing, fcntl.F_DUPFD_CLOEXEC, _HIGH_DESCRIPTOR)
        for descriptor in (writing, *unused, *self.kept):
            os.close(descriptor)
        furnish(self.rules)
        os.chdir(self.folder or "/tmp")
        give_up(FUNCTION_USER if self.rules.has_users else None, self.rules)
        if not os.read(turn, 1):
            return 1
        os.close(turn)
        answer = encode(run(request))
        if os.getpid() == 1:  # a fork that returned from the user's code must not answer
            write_all(answers, answer)
        return 0


def _row_of(request: Frame, row: int) -> Frame:
    columns = {name: values[row : row + 1] for name, values in request["columns"].items()}
    return {**request, "rows": 1, "columns": columns}


def _awaited(cell: _Cell, limit_s: float, begun: float) -> Frame:
    """Wait for one frame and a clean end of the cell, then remove it; return the frame or a failure."""
    until = begun + limit_s
    ended = os.pidfd_open(cell.process)
    poller = select.poll()
    for descriptor in (cell.answers, ended):
        poller.register(descriptor, select.POLLIN)
    reader, frames, refused = FrameReader(CELL_BYTES), list[Frame](), ""
    try:
        while True:
            left_s = until - time.monotonic()
            if left_s <= 0:
                return {"type": "late", "what": f"gave no answer within {limit_s:.3g} s"}
            found = {
                each for each, _ in poller.poll(None if left_s == math.inf else math.ceil(1000 * left_s))
            }
            if cell.answers in found:
                piece = os.read(cell.answers, 1 << 16)
                frames += reader.feed(piece)
                if not piece:
                    poller.unregister(cell.answers)
            elif ended in found:  # all writers have ended, and their data is read
                break
    except FrameError as error:
        refused = f"wrote to the file descriptor of its results: {error}"
    finally:
        os.close(ended)
        status = cell.end()
    if refused:
        return {"type": "raised", "what": refused}
    if status or len(frames) != 1 or reader.num_held:
        return {"type": "raised", "what": describe_end(status)}
    return frames[0]


def _verdict(answer: Frame) -> Verdict:
    match answer:
        case {"type": "scores", "scores": [value]} if is_verdict(value):
            verdict: Verdict = value
            return verdict
        case {"type": "raised", "what": str(what)}:
            return what[:VERDICT_CHARACTERS]
        case {"type": "late", "what": str(what)}:
            return {"late": what}
    return f"answered with a frame of type {answer['type']!r}"
