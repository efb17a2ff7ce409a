"""Bridge: forward the requests that remote samplers write into a store to the run beside it.

    store: req/ ─ look ─> a thread each ─ HTTP ─> EngineApp ─ answer ─> store: ans/, weights/

Loop (``serve``, in the main thread)
    consumes      requests of samplers, each once
    waits for     POLL between two looks
    unblocked by  files in the store; ``stop``
    produces      an answer for each request; a beat, which tells another bridge that this one lives
    shuts down    healthy: a signal, or some seconds after the run has ended; its files are removed

The rules of leases, rows and weights stay in the run: the bridge only carries them. Beats are counted, never
dated, because the clocks of two machines may differ.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock

from rillflow.errors import StreamError
from rillflow_links.remote.store import SharedStore, StoreMessage, packed, unpacked
from rillflow_links.remote.store_transport import ANSWERS, BRIDGES, FILES, REQUESTS
from rillflow_links.remote.transport import HttpTransport, RunAnswer, Unreachable, address_in

BEAT_S = 2.0
"""Time between two beats."""
SILENT_BEATS = 5
"""Beats that a bridge must miss before its files count as leftovers."""
LINGER_S = 10.0
"""Time that a bridge goes on after the run's end, so that every sampler hears of it."""
MOST_THREADS = 64
"""Requests that are forwarded at once."""
KEPT_VERSIONS = 2, 20
"""Newest versions whose whole files, and whose differences, stay in the store."""
_FILE = re.compile(r"weights/(\d{1,12})/([A-Za-z0-9_.-]{1,120})")
_PATH = re.compile(r"(model|status|weights|rows)([/?][A-Za-z0-9_.=&?/-]*)?")


class Bridge:
    """Serves one store for one sampler rank of a run.

    Args:
        store: the store.
        address: the rank's address file.
        poll_s: time between two looks.
        tell: shows a line to the user.
    """

    def __init__(
        self, store: SharedStore, address: Path, *, poll_s: float, tell: Callable[[str], None]
    ) -> None:
        self._store, self._address, self._poll_s, self._tell = store, address, poll_s, tell
        self._id, self._beats = secrets.token_hex(8), 0
        self._stopped, self._lock = Event(), Lock()
        self._begun, self._written = set[str](), dict[str, str]()
        self._transports: dict[str, HttpTransport] = {}
        self._ended_at: float | None = None
        self._token = ""
        self._last_trouble = ""

    def stop(self) -> None:
        """End soon; from any thread or a signal."""
        self._stopped.set()

    def serve(self) -> None:
        """Serve until the run has ended or ``stop`` is called.

        Raises:
            StreamError: another bridge serves the store, or it cannot be written.
        """
        self._beat()
        try:
            self._claim()
            self._await_run()
            next_beat = time.monotonic()
            with ThreadPoolExecutor(MOST_THREADS) as pool:
                while not self._stopped.wait(self._poll_s) and not self._is_over():
                    with self._troubled():
                        if time.monotonic() >= next_beat:
                            self._beat()
                            next_beat = time.monotonic() + BEAT_S
                        for path in self._store.names(f"{REQUESTS}/{self._id}"):
                            if path not in self._begun:
                                self._begun.add(path)
                                pool.submit(self._forward, path)
        finally:
            with self._troubled():
                self._remove_life(self._id)

    def _claim(self) -> None:
        """Make sure that no other bridge lives, and remove what earlier ones left.

        Raises:
            StreamError: one does.
        """
        before = self._others()
        if before and not self._stopped.wait(BEAT_S * SILENT_BEATS):
            alive = [name for name, beat in self._others().items() if beat != before.get(name)]
            if alive:
                raise StreamError(
                    f"another bridge serves this store: {alive[0]}",
                    why="two runs in one store would mix their weights and rows",
                    fix="give each run a store of its own, or end the other bridge",
                )
        for folder in (BRIDGES, REQUESTS, ANSWERS, FILES):
            for path in self._store.names(folder):
                if path.split("/")[1] != self._id:
                    self._store.remove(path)

    def _others(self) -> dict[str, str]:
        """Return the newest beat of every other bridge."""
        beats = (path.split("/")[1:] for path in self._store.names(BRIDGES))
        return {name: beat for name, beat in beats if name != self._id}

    def _await_run(self) -> None:
        """Wait for the run's address file."""
        while not self._stopped.is_set():
            try:
                self._token = address_in(self._address).token
                return
            except Unreachable as error:
                self._trouble(error)
            with self._troubled():
                self._beat()
            self._stopped.wait(max(self._poll_s, BEAT_S))

    def _beat(self) -> None:
        self._beats += 1
        self._store.put(f"{BRIDGES}/{self._id}/{self._beats:09d}", b"")
        if self._beats > 1:
            self._store.remove(f"{BRIDGES}/{self._id}/{self._beats - 1:09d}")

    def _is_over(self) -> bool:
        if self._ended_at is None and not self._address.exists():
            self._end("the run has ended: its address file is gone")
        return self._ended_at is not None and time.monotonic() > self._ended_at + LINGER_S

    def _end(self, why: str) -> None:
        with self._lock:
            if self._ended_at is None:
                self._ended_at = time.monotonic()
                self._tell(why)

    def _forward(self, path: str) -> None:
        """Answer a request; an incomplete one is looked at again."""
        try:
            request = unpacked(self._store.get(path), self._token)
            if request is None:
                self._begun.discard(path)
                return
            answer = packed(*self._answered(request), self._token)
        except Unreachable as error:
            self._trouble(error)
            self._begun.discard(path)
            return
        while not self._stopped.is_set():
            try:
                self._store.put(f"{ANSWERS}/{path.partition('/')[2]}", answer)
                self._store.remove(path)
                return
            except StreamError as error:
                self._trouble(error)
            self._stopped.wait(BEAT_S)

    def _answered(self, request: StoreMessage) -> tuple[dict[str, object], bytes]:
        """Return header and body of the answer to a request."""
        says = request.says
        path, client = str(says.get("path", "")), str(says.get("client", ""))[:64]
        if not request.is_genuine:
            return {"status": 401}, _sentences("the token is wrong", "the MAC needs the run's token")
        if not _PATH.fullmatch(path) or not client.isascii() or not client.isprintable():
            return {"status": 404}, _sentences(f"there is no path {path[:80]}", "the bridge forwards none")
        try:
            self._token = address_in(self._address).token
            return self._passed_on(request, path, client)
        except Unreachable as error:
            if self._ended_at is not None and path.startswith("rows/"):
                return {"status": 410}, _sentences("the run takes no more rows", "the run has ended")
            return {"status": 503}, _sentences(error.what, error.why)

    def _passed_on(self, request: StoreMessage, path: str, client: str) -> tuple[dict[str, object], bytes]:
        with self._lock:
            transport = self._transports.setdefault(
                client, HttpTransport(lambda: address_in(self._address), client)
            )
        says, name = request.says, _FILE.fullmatch(path)
        target = f"{FILES}/{self._id}/{name[1]}/{name[2]}" if name else ""
        if target in self._written:
            return {"status": 200, "file": target, "sha256": self._written[target]}, b""
        body = request.body if says.get("has_body") else None
        method, wait_s = str(says.get("method")), min(float(says.get("wait_s", 0)), 60.0)
        answer: RunAnswer = transport.ask("POST" if method == "POST" else "GET", path, body, wait_s)
        if answer.status == 410 and path.startswith("rows/"):
            self._end("the run has ended")
        if name is None or answer.status != 200:
            return {"status": answer.status}, answer.body
        digest = hashlib.sha256(answer.body).hexdigest()
        self._store.put(target, answer.body)
        self._written[target] = digest
        self._drop_old(int(name[1]))
        return {"status": 200, "file": target, "sha256": digest}, b""

    def _drop_old(self, newest: int) -> None:
        """Remove files of versions that no sampler needs any more."""
        whole, differences = KEPT_VERSIONS
        for path in [*self._written]:
            version, name = path.split("/")[2:]
            if int(version) <= newest - (differences if name.startswith("delta-") else whole):
                self._written.pop(path, None)
                self._store.remove(path)

    def _remove_life(self, name: str) -> None:
        for folder in (REQUESTS, ANSWERS, FILES, BRIDGES):
            for path in self._store.names(f"{folder}/{name}"):
                self._store.remove(path)

    @contextmanager
    def _troubled(self) -> Iterator[None]:
        """Report a failure of the store, and go on."""
        try:
            yield
        except StreamError as error:
            self._trouble(error)

    def _trouble(self, error: StreamError) -> None:
        line = f"{error.what} ({error.why}); trying again"
        with self._lock:
            if line != self._last_trouble:
                self._last_trouble = line
                self._tell(line)


def _sentences(what: str, why: str) -> bytes:
    return json.dumps({"what": what, "why": why, "fix": ""}).encode()
