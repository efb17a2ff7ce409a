"""StoreTransport: the requests of a remote sampler as files, where neither side opens a port.

    ask ─> req/BRIDGE/NAME/SEQ ─ bridge beside the run ─ HTTP ─> EngineApp
        <─ ans/BRIDGE/NAME/SEQ <──────────┘   weights/BRIDGE/VERSION/FILE: written once for all samplers

BRIDGE is another name in every life of a bridge, and NAME in every life of a sampler, so leftovers of earlier
lives are never read. The token is never written: messages carry a MAC.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import time
from threading import Event

from rillflow.errors import ConfigError, StreamError
from rillflow_links.remote.store import SharedStore, StoreMessage, packed, unpacked
from rillflow_links.remote.transport import RunAnswer, Unreachable

BRIDGES, REQUESTS, ANSWERS, FILES = "bridge", "req", "ans", "weights"
"""Folders of a store."""
ANSWER_S = 60.0
"""Longest time until an answer, beyond the time that the request asked to wait."""


class StoreTransport:
    """Requests through a store.

    Args:
        store: the store.
        name: name of this sampler, of letters, digits, ``.``, ``_`` and ``-``.
        token: token of the run.
        poll_s: time between two looks for an answer.

    Raises:
        ConfigError: the name has other characters.
    """

    def __init__(self, store: SharedStore, name: str, token: str, poll_s: float) -> None:
        if not name or not all(each.isalnum() or each in "._-" for each in name) or name.startswith("."):
            raise ConfigError(
                f"the name is {name!r}", why="it is part of file names", fix="use a-z, 0-9 and -"
            )
        self._store, self._token, self._poll_s = store, token, poll_s
        self._name, self._life = name, f"{name}.{secrets.token_hex(4)}"
        self._numbers, self._closed = itertools.count(1), Event()

    def ask(self, method: str, path: str, body: bytes | None, wait_s: float) -> RunAnswer:
        """See Transport."""
        bridge = self._bridge()
        seq = f"{bridge}/{self._life}/{next(self._numbers):09d}"
        says = {
            "method": method,
            "path": path,
            "wait_s": wait_s,
            "client": self._name,
            "has_body": body is not None,
        }
        self._store.put(f"{REQUESTS}/{seq}", packed(says, body or b"", self._token))
        answer = self._awaited(seq, bridge, time.monotonic() + wait_s + ANSWER_S)
        self._store.remove(f"{ANSWERS}/{seq}")
        status = int(answer.says["status"])
        if not answer.is_genuine and status != 401:
            raise StreamError(
                "an answer in the store is not the run's",
                why="its MAC needs the run's token, and whoever wrote it has another one",
                fix="give --token-file the run's token, and let nobody else write into the store",
            )
        if "file" not in answer.says:
            return RunAnswer(status=status, body=answer.body)
        data = self._store.get(str(answer.says["file"]))
        if data is None or hashlib.sha256(data).hexdigest() != answer.says["sha256"]:
            raise Unreachable(f"{answer.says['file']} is damaged in the store", why="its SHA-256 differs")
        return RunAnswer(status=status, body=data)

    def close(self) -> None:
        """See Transport."""
        self._closed.set()

    def _awaited(self, seq: str, bridge: str, until: float) -> StoreMessage:
        look_at_bridge = time.monotonic() + 5.0
        while (answer := unpacked(self._store.get(f"{ANSWERS}/{seq}"), self._token)) is None:
            if self._closed.wait(self._poll_s) or time.monotonic() > until:
                self._store.remove(f"{REQUESTS}/{seq}")
                raise Unreachable("the bridge does not answer", why="it has ended, or the store is slow")
            if time.monotonic() > look_at_bridge:
                look_at_bridge = time.monotonic() + 5.0
                if self._bridge() != bridge:
                    raise Unreachable("the bridge has ended", why="another one is there now")
        return answer

    def _bridge(self) -> str:
        """Return the name of the bridge that serves the store."""
        bridges = {each.split("/")[1] for each in self._store.names(BRIDGES)}
        if len(bridges) != 1:
            why = f"{len(bridges)} bridges write to it" if bridges else "no bridge writes to it"
            raise Unreachable(
                "no run answers in the store", why=why, fix="start rillflow bridge RUN STORE beside the run"
            )
        return bridges.pop()
