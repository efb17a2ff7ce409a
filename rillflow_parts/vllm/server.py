"""Server: vLLM in a process and an environment of its own; ``ServedCore`` starts it and holds its socket.

    ServedCore ── frame ──> answer it: Core ──> frame        the process's one loop
         └─ end of the socket closed ──> the process ends     a thread waits for that, whatever the loop does

consumes      frames of an inherited socket, without name or port, so no other process can connect
waits for     the next frame; the client enforces the deadlines
unblocked by  a frame, or the end of the socket: the client closed it or was killed
produces      an answer to each frame that needs one; an error of ADD or ABORT answers the next frame
shuts down    immediately, whatever it does: the process never outlives its client
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rillflow.isolation.child_process import end_with
from rillflow.records.row import RowId
from rillflow.workers.wire import Arrays, Channel, Message
from rillflow_parts.vllm.requests import (
    AnyCore,
    CoreSettings,
    Word,
    arrays_of,
    ask_of,
    received_weights,
    told,
)

_ERROR_LETTERS = 2000
_UNANSWERED = (Word.ADD, Word.ABORT)


class _Answers:
    """Executor of frames.

    Args:
        channel: connection to the client.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._core: AnyCore

    def of(self, message: Message) -> tuple[Mapping[str, Any], Arrays]:
        """Execute a frame; return the values and arrays of its answer."""
        word, says = Word(message.kind), message.says
        if word is Word.START:
            from rillflow_parts.vllm.core import Core

            torch.set_num_threads(says.pop("threads"))
            self._core = Core(CoreSettings(**says))
            return {"cache_bytes": self._core.cache_bytes}, {}
        if word is Word.STEP:
            return {}, arrays_of(self._core.step(says["most"]))
        simple: Mapping[Word, Callable[[], None]] = {
            Word.ADD: lambda: self._core.add(message.arrays["tokens"].tolist(), ask_of(message)),
            Word.ABORT: lambda: self._core.abort(RowId(*says["row"])),
            Word.RELOAD: lambda: self._take(self._core.reload, says["version"]),
            Word.ADAPT: lambda: self._take(self._core.adapt, says["version"], says["scale"]),
            Word.SLEEP: lambda: self._core.sleep(),
            Word.WAKE: lambda: self._core.wake(),
        }
        simple[word]()
        return {}, {}

    def _take(self, into: Callable[..., None], *named: Any) -> None:
        """Pass weights on as they arrive; after a failure, read the remaining ones all the same."""
        weights = received_weights(self._channel)
        try:
            into(*named, weights)
        finally:
            for _ in weights:
                pass


def main(descriptor: int, *, parent: int) -> None:
    """Answer requests until the client closes the socket of this descriptor, or ends.

    Args:
        descriptor: descriptor of the socket.
        parent: the client's process; the kernel ends the server with it, also if the server is stopped.
    """
    end_with(parent)
    connected = socket.socket(fileno=descriptor)
    threading.Thread(target=_end_with_it, args=(descriptor,), daemon=True).start()
    channel, failed = Channel(connected), ""
    answers = _Answers(channel)
    while True:
        message = channel.receive()
        answer: tuple[Mapping[str, Any], Arrays] = {}, {}
        if not failed:
            try:
                answer = answers.of(message)
            except Exception as error:  # noqa: BLE001  the supervision boundary: vLLM may raise anything
                failed = told(error)[-_ERROR_LETTERS:]
        elif message.kind in (Word.RELOAD, Word.ADAPT):
            for _ in received_weights(channel):
                pass
        if message.kind in _UNANSWERED:
            continue
        if failed:
            channel.send(Word.ERROR, {"why": failed})
        else:
            channel.send(Word.OK, *answer)
        failed = ""


def _end_with_it(descriptor: int) -> None:
    """End the process when the client closes the socket, whatever the main thread does."""
    watched = select.poll()
    watched.register(descriptor, 0)  # poll reports a hang-up even without events
    watched.poll()
    os._exit(0)
