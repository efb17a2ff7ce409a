"""Served: vLLM's core in a server process, which runs in the environment of another Python.

    rank: VllmEngine ─ ServedCore ══ pair of sockets, frames ══ server: python of another environment ─ Core
                            │                                      imports this very package
                            └─ ends ──> the sockets are closed, the server ends

consumes      answers, to one request at a time
waits for     an answer, at most ``START_S`` or ``answer_s``; then it kills the server
unblocked by  the answer, or the end of the socket; a server that is stopped is killed (``server_process``)
shuts down    with the object or the process: the sockets are closed; a server that does not end is killed

A server that has ended is lost: this request and all later ones raise EngineLost.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rillflow.errors import RolloutError
from rillflow.records.row import RowId
from rillflow.rollout.engine import EngineLost
from rillflow.workers.collectives import Stranded, is_broken_collective
from rillflow.workers.wire import Arrays, Channel, Message, WireError
from rillflow_parts.vllm.requests import (
    Ask,
    CoreSettings,
    Piece,
    Word,
    pieces_of,
    said_of,
    send_weights,
    unname_memory,
)
from rillflow_parts.vllm.server_process import ServerProcess

START_S = 900.0
"""Longest start in seconds: vLLM's imports, and on a GPU its trial passes."""
ANSWER_S = 600.0
"""Longest wait in seconds for any other answer, or for a part of it."""
_MEMORY = "dmesg lists processes that were killed for memory; if memory is short, lower rollout.max_rows"


class StartRefused(Exception):
    """vLLM does not start; the text is vLLM's reason."""


class ServedCore:
    """See AnyCore.

    Args:
        python: Python of the environment with vLLM.
        settings: start settings.
        answer_s: longest wait for an answer in seconds.
        log: file of the server's output; None for one without a name.

    Raises:
        StartRefused: vLLM rejects the settings or the model.
        RolloutError: there is no such Python.
        EngineLost: its process has ended.
    """

    def __init__(
        self, python: Path, settings: CoreSettings, answer_s: float = ANSWER_S, log: Path | None = None
    ) -> None:
        self._settings, self._answer_s = settings, answer_s
        self._server = ServerProcess(python, log)
        self._channel = Channel(self._server.connection)
        self._end = weakref.finalize(self, self._server.end)
        says = {**asdict(settings), "threads": torch.get_num_threads()}
        started = self._met(Word.START, lambda: self._channel.send(Word.START, says), within_s=START_S)
        if started.kind == Word.ERROR:
            raise StartRefused(started.says["why"])
        self.cache_bytes = int(started.says["cache_bytes"])

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
            what, why = f"{self._server} cannot {_name(word)}", answer.says["why"]
            if self._settings.tp > 1 and is_broken_collective(RuntimeError(why)):
                raise Stranded(what, why=f"{why}; the servers of a copy of the weights work together")
            raise RolloutError(what, why=why)
        return answer

    def _met(
        self, word: Word, send: Callable[[], None], *, is_answered: bool = True, within_s: float | None = None
    ) -> Message:
        """Send, and return the answer if there is one; after an error the server is not used again."""
        began, limit_s = time.time(), within_s or self._answer_s
        try:
            with self._server.asked():
                self._channel.wait_at_most(limit_s)
                send()
                return self._channel.receive() if is_answered else Message(kind=Word.OK, says={})
        except TimeoutError:
            self._server.kill()
            since = time.strftime("%H:%M:%S", time.localtime(began))
            how = f"gave no answer for {limit_s:g} s, since {since}, and was killed"
            raise self._lost(word, how) from None
        except (OSError, WireError):
            raise self._lost(word, self._server.how_lost()) from None
        except BaseException:
            self._server.kill()
            raise

    def _lost(self, word: Word, how: str) -> EngineLost:
        """Return the error of a server that has ended."""
        if self._settings.tp > 1:
            unname_memory(self._settings.port)
        log = f"its output is in {self._server.log}" if self._server.log is not None else ""
        lines, was_killed = self._server.last_lines(), self._server.was_killed()
        silent = "another process or the system ended it" if was_killed else "it has no output"
        return EngineLost(
            f"{self._server} {how}, in a request to {_name(word)}",
            why=f"its last output: {lines}" if lines else silent,
            fix="; ".join(filter(None, [_MEMORY if was_killed else "", log])),
        )


def _name(word: Word) -> str:
    return word.name.lower()
