"""Served: vLLM's core in a server process, which runs in the environment of another Python.

    rank: VllmEngine ─ ServedCore ══ pair of sockets, frames ══ server: python of another environment ─ Core
                            │                                      imports this package through a link
                            └─ ends ──> the sockets are closed, the server ends

consumes      answers, to one request at a time
waits for     an answer, at most ``START_S`` or ``answer_s``; then it kills the server, and the error names
              the waiting process, the request and the time
unblocked by  the answer, or the end of the socket: the error has the exit status and the log's last lines
shuts down    with the object or the process: the sockets are closed; a server that does not end is killed
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from rillflow.errors import RolloutError
from rillflow.records.row import RowId
from rillflow.rollout.vllm.requests import (
    ENVIRONMENT,
    LOUDNESS,
    Ask,
    CoreSettings,
    Piece,
    Word,
    pieces_of,
    said_of,
    send_weights,
)
from rillflow.workers.wire import Arrays, Channel, Message

START_S = 900.0
"""Longest start in seconds: vLLM's imports, and on a GPU its trial passes."""
ANSWER_S = 600.0
"""Longest wait in seconds for any other answer, or for a part of it."""
_END_S = 10.0
"""Seconds that a server may take to end before it is killed."""
_LOG_BYTES = 2000
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from rillflow.rollout.vllm.server import main; main(int(sys.argv[2]))"
)


class StartRefused(Exception):
    """vLLM does not start; the text is vLLM's reason."""


class ServedCore:
    """See AnyCore.

    Args:
        python: Python of the environment with vLLM.
        settings: start settings.
        answer_s: longest wait for an answer in seconds.

    Raises:
        StartRefused: vLLM rejects the settings or the model.
        RolloutError: there is no such Python, or its process ended.
    """

    def __init__(self, python: Path, settings: CoreSettings, answer_s: float = ANSWER_S) -> None:
        self._python, self._answer_s = python, answer_s
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  it is the server's too
        says = {**asdict(settings), "threads": torch.get_num_threads()}
        with tempfile.TemporaryDirectory(prefix="rillflow-vllm-") as folder:  # until all is imported there
            self._process, self._channel = self._spawned(folder)
            started = self._met(Word.START, lambda: self._channel.send(Word.START, says), within_s=START_S)
        if started.kind == Word.ERROR:
            raise StartRefused(started.says["why"])
        self.cache_bytes = int(started.says["cache_bytes"])

    def _spawned(self, folder: str) -> tuple[subprocess.Popen[bytes], Channel]:
        """Start the server in a session of its own, so that an interrupt reaches only the run."""
        (Path(folder) / "rillflow").symlink_to(Path(__file__).parents[2])
        own, theirs = socket.socketpair()
        try:
            process = subprocess.Popen(
                [self._python, "-E", "-P", "-c", _BOOT, folder, str(theirs.fileno())],
                env={LOUDNESS: "ERROR", **os.environ, **ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError as error:
            raise RolloutError(
                f"{self._python} cannot start vLLM's server",
                why=str(error),
                fix="set rollout.server to the Python interpreter of an environment with vLLM",
            ) from None
        finally:
            theirs.close()
        channel = Channel(own)
        self._end = weakref.finalize(self, _ended, process, channel)
        return process, channel

    def add(self, tokens: Sequence[int], ask: Ask) -> None:
        """See AnyCore; sent with the next request, whose answer reports any error of vLLM."""
        arrays = {"tokens": np.array(tokens, np.int64), "given": np.array(ask.given, np.int64)}
        self._tell(Word.ADD, said_of(ask), arrays)

    def abort(self, row: RowId) -> None:
        """See AnyCore; sent with the next request, whose answer reports any error of vLLM."""
        self._tell(Word.ABORT, {"row": list(row)}, {})

    def step(self, most: int) -> list[Piece]:
        """See AnyCore."""
        return pieces_of(self._ask(Word.STEP, {"most": most}).arrays)

    def reload(self, version: int, weights: Iterator[tuple[str, Tensor]]) -> None:
        """See AnyCore."""
        self._ask(Word.RELOAD, {"version": version}, weights)

    def adapt(self, version: int, scale: float, weights: Iterator[tuple[str, Tensor]]) -> None:
        """See AnyCore."""
        self._ask(Word.ADAPT, {"version": version, "scale": scale}, weights)

    def sleep(self) -> None:
        """See AnyCore."""
        self._ask(Word.SLEEP, {})

    def wake(self) -> None:
        """See AnyCore."""
        self._ask(Word.WAKE, {})

    def _tell(self, word: Word, says: Mapping[str, Any], arrays: Arrays) -> None:
        """Queue a frame without an answer, to be sent with the next one."""
        self._met(word, lambda: self._channel.send(word, says, arrays, later=True), is_answered=False)

    def _ask(
        self, word: Word, says: Mapping[str, Any], weights: Iterator[tuple[str, Tensor]] | None = None
    ) -> Message:
        """Send a frame and return its answer."""

        def send() -> None:
            self._channel.send(word, says)
            if weights is not None:
                send_weights(self._channel, weights)

        answer = self._met(word, send)
        if answer.kind == Word.ERROR:
            raise RolloutError(
                f"vLLM's server (process {self._process.pid}, {self._python}) cannot {word.name.lower()}",
                why=answer.says["why"],
            )
        return answer

    def _met(
        self, word: Word, send: Callable[[], None], *, is_answered: bool = True, within_s: float | None = None
    ) -> Message:
        """Send, and return the answer if there is one; after an error the server is not used again."""
        began, limit_s = time.time(), within_s or self._answer_s
        server = f"vLLM's server (process {self._process.pid}, {self._python})"
        try:
            self._channel.wait_at_most(limit_s)
            send()
            return self._channel.receive() if is_answered else Message(kind=Word.OK, says={})
        except TimeoutError:
            self._process.kill()
            raise RolloutError(
                f"rank process {os.getpid()} has waited for {server} to {word.name.lower()} since "
                f"{time.strftime('%H:%M:%S', time.localtime(began))}, and received nothing for {limit_s:g} s",
                why=f"the server hung and was killed{self._last_lines()}",
                fix="run the recipe again: it resumes from the last checkpoint",
            ) from None
        except OSError:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
            status = self._process.returncode
            raise RolloutError(
                f"{server} exited with status {status} during a request to {word.name.lower()}",
                why=f"vLLM exited, or another process killed it{self._last_lines()}",
                fix="run the recipe again: it resumes from the last checkpoint",
            ) from None
        except BaseException:
            self._end()
            raise

    def _last_lines(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        last = os.pread(self._log.fileno(), _LOG_BYTES, max(0, size - _LOG_BYTES))
        text = last.decode(errors="replace").strip()
        return f"; its last output: {text}" if text else "; it has no output"


def _ended(process: subprocess.Popen[bytes], channel: Channel) -> None:
    """Close the connection; kill the server if it does not end in time."""
    channel.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    process.kill()
    process.wait()
