"""Standard streams: output and error output whose failure ends no command that works.

    print, logging, warnings, progress ─> TextIOWrapper ─> BufferedWriter ─> OutputFile ─> descriptor 1 or 2

    output                                command that only prints       command that works, error output
    reader has gone, terminal has gone    the write fails                nothing more is written
    full disk                             the write fails                nothing more is written
    slow reader, stopped terminal         waits                          waits 1 s, then keeps the rest
    character that the encoding lacks     its escape sequence            its escape sequence
    closed at the start                   as /dev/null                   as /dev/null

A failed output becomes /dev/null, so that processes that start later do not fail by it. Imports only the
standard library.
"""

from __future__ import annotations

import io
import os
import select
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

STALL_S = 1.0
"""Longest wait for a reader that takes nothing; until it reads again, no write waits."""
END_S = 5.0
"""Longest wait for such a reader at the end of a command."""
MOST_BYTES = 2**20
"""Bytes that are kept for such a reader; later ones are left out."""
_PIECE_BYTES = 4096
_GAP = "[{} bytes of output are left out here: nothing read them]\n"


class OutputFile(io.RawIOBase):
    """The descriptor of a standard stream.

    Args:
        descriptor: 1 or 2; it stays open.
        goes_on: whether a failure ends no write; see the table of the module.
    """

    def __init__(self, descriptor: int, *, goes_on: bool) -> None:
        super().__init__()
        self.goes_on = goes_on
        """Whether a failure ends no write."""
        self.failure: OSError | None = None
        """Why nothing can be written any more."""
        self._descriptor, self._own, self._original = descriptor, -1, -1
        self._waiting, self._left_out, self._is_stalled = bytearray(), 0, False

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: object) -> int:
        """Write bytes, or keep them for a reader that takes nothing.

        Raises:
            OSError: the output failed, and ``goes_on`` is False.
        """
        piece = bytes(data)  # type: ignore[call-overload]
        if not self.goes_on:
            return self._written(piece)
        if self.failure is not None:
            return len(piece)
        if self._left_out:
            self._left_out += len(piece)
        else:
            self._waiting += piece
        self._drain(0.0 if self._is_stalled else STALL_S)
        if (excess := len(self._waiting) - MOST_BYTES) > 0:
            self._left_out += excess
            del self._waiting[-excess:]
        return len(piece)

    def end(self) -> None:
        """Write what is left, with a last wait for a slow reader, and undo a replacement by /dev/null."""
        if self.goes_on and self.failure is None:
            self._drain(END_S)
        for descriptor in {self._own, self._original} - {-1}:
            if descriptor == self._original:
                os.dup2(descriptor, self._descriptor)
            os.close(descriptor)
        self._own = self._original = -1

    def fail(self, error: OSError) -> None:
        """Write nothing any more."""
        self.failure = error
        self._waiting.clear()
        with suppress(OSError):  # the descriptor may be closed
            self._original = os.dup(self._descriptor)
        with open(os.devnull, "wb", buffering=0) as null:  # noqa: PTH123  a descriptor
            os.dup2(null.fileno(), self._descriptor)

    def _written(self, piece: bytes) -> int:
        """Write bytes, and wait for the reader."""
        try:
            return os.write(self._descriptor, piece)
        except OSError as error:
            self.failure = error
            raise

    def _drain(self, wait_s: float) -> None:
        """Write what waits, until the reader takes nothing for ``wait_s``."""
        descriptor = self._without_waiting()
        ready = select.poll()
        ready.register(descriptor, select.POLLOUT)
        while self._waiting or self._left_out:
            if not self._waiting:
                self._waiting += _GAP.format(self._left_out).encode()
                self._left_out = 0
            if not ready.poll(wait_s * 1000):
                self._is_stalled = True
                return
            try:
                count = os.write(descriptor, self._waiting[:_PIECE_BYTES])
            except BlockingIOError:
                self._is_stalled = True
                return
            except OSError as error:
                self.fail(error)
                return
            del self._waiting[:count]
        self._is_stalled = False

    def _without_waiting(self) -> int:
        """Return a descriptor of the output whose writes do not wait, or its own if there is none.

        A terminal or pipe is opened anew: O_NONBLOCK on its descriptor would hold for other processes too.
        """
        if self._own < 0:
            mode = os.fstat(self._descriptor).st_mode
            with suppress(OSError):  # a socket cannot be opened, nor another user's terminal
                if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
                    how = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
                    self._own = os.open(f"/proc/self/fd/{self._descriptor}", how)
        return self._descriptor if self._own < 0 else self._own


class StandardStreams:
    """The guarded standard streams of a process."""

    def __init__(self, output: OutputFile | None) -> None:
        self._output = output

    @property
    def failure(self) -> OSError | None:
        """Why the standard output cannot be written any more; None while it can."""
        return None if self._output is None else self._output.failure

    def go_on(self) -> None:
        """Let the command outlive its standard output."""
        if self._output is not None:
            sys.stdout.flush()
            self._output.goes_on = True


@contextmanager
def guarded_streams(*, goes_on: bool) -> Iterator[StandardStreams]:
    """Guard ``sys.stdout`` and ``sys.stderr``, unless a program has replaced them; open missing descriptors.

    Args:
        goes_on: whether the standard output may fail without an error; the error output always may.
    """
    open_missing()
    before = sys.stdin, sys.stdout, sys.stderr
    guards = list[OutputFile]()
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  a descriptor, which stays
    try:
        sys.stdout = _guarded(sys.stdout, 1, guards, goes_on=goes_on)
        output = guards[0] if guards else None
        sys.stderr = _guarded(sys.stderr, 2, guards, goes_on=True)
        yield StandardStreams(output)
    finally:
        guarded = sys.stdout, sys.stderr
        sys.stdin, sys.stdout, sys.stderr = before
        _end(guarded, guards)


def keep_going() -> None:
    """Guard the streams of a child process until it ends."""
    open_missing()
    guards = list[OutputFile]()
    sys.stdout = _guarded(sys.stdout, 1, guards, goes_on=True)
    sys.stderr = _guarded(sys.stderr, 2, guards, goes_on=True)


def open_missing() -> None:
    """Open /dev/null for each of the descriptors 0, 1 and 2 that is closed.

    Otherwise the next pipes get these numbers, and a child process, which replaces them, loses its pipes.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            os.dup2(opened, descriptor)  # inheritable, unlike what open returns
            if opened != descriptor:
                os.close(opened)
            else:
                os.set_inheritable(descriptor, True)


def failure_of(stream: TextIO) -> OSError | None:
    """Return why a guarded stream cannot be written any more; None while it can, or if it is not guarded."""
    guard = _guard_of(stream)
    return None if guard is None else guard.failure


def _guard_of(stream: TextIO | None) -> OutputFile | None:
    """Return the OutputFile below a stream; None if it has none."""
    if type(stream) is io.TextIOWrapper and isinstance(stream.buffer, io.BufferedWriter):
        return stream.buffer.raw if isinstance(stream.buffer.raw, OutputFile) else None
    return None


def _guarded(stream: TextIO | None, descriptor: int, guards: list[OutputFile], *, goes_on: bool) -> TextIO:
    """Return a stream whose bytes pass through an OutputFile.

    What a test or a notebook has put in the place of Python's own stream stays, and so does a guarded stream.

    Args:
        stream: Python's own stream, None if its descriptor was closed at the start.
        descriptor: the descriptor in that case.
        guards: receives the new OutputFile.
        goes_on: see OutputFile.
    """
    encoding, errors, is_line_buffered = "utf-8", "strict", descriptor == 2
    if stream is not None:
        if type(stream) is not io.TextIOWrapper or stream.closed or _guard_of(stream) is not None:
            return stream
        try:
            descriptor = stream.fileno()
        except OSError:  # it is in memory
            return stream
        encoding, errors = stream.encoding, stream.errors or errors
        is_line_buffered = stream.line_buffering or stream.write_through  # python -u has no buffer
    guard = OutputFile(descriptor, goes_on=goes_on)
    if stream is not None:
        try:
            stream.flush()
        except OSError as error:
            guard.fail(error)
    guards.append(guard)
    return io.TextIOWrapper(
        io.BufferedWriter(guard),
        encoding=encoding,
        errors="backslashreplace" if errors in ("strict", "surrogateescape") else errors,
        line_buffering=is_line_buffered,
    )


def _end(streams: tuple[TextIO, ...], guards: list[OutputFile]) -> None:
    """Write what guarded streams still hold; let it go if that fails."""
    for stream in streams:
        guard = _guard_of(stream)
        if guard is None or guard not in guards:
            continue
        try:
            stream.flush()
        except OSError as error:
            guard.fail(error)
            guard.goes_on = True  # or the buffer keeps what it cannot write
            stream.flush()
        guard.end()
