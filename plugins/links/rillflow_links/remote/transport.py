"""Transport: carry the requests of a remote sampler to its run; one implementation for HTTP, one for stores.

RunClient ── Transport.ask ─┬─ HttpTransport ── HTTP ───────────────────────────> EngineApp of the run
                            └─ StoreTransport ── files ── bridge beside the run ─┘
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from rillflow.errors import ConfigError, StreamError

SPARE_S = 60.0
"""Longest time without a byte of an answer, beyond the time that the request asked to wait."""
IDLE_S = 30.0
"""Longest time that a connection is kept without a request; servers close idle ones later than that."""
CLIENT = "X-Rillflow-Client"


class Unreachable(StreamError):
    """The run did not answer; it may answer later."""


@dataclass(frozen=True, kw_only=True)
class RunAnswer:
    """The answer to a request."""

    status: int
    """HTTP status."""
    body: bytes
    """Bytes of the answer."""


class Transport(Protocol):
    """Carries requests; several threads use it at once."""

    def ask(self, method: str, path: str, body: bytes | None, wait_s: float) -> RunAnswer:
        """Return the answer to a request.

        Args:
            method: GET or POST.
            path: path after ``/v1/``, with its query.
            body: JSON of a POST.
            wait_s: time that the run may wait before it answers.

        Raises:
            Unreachable: there is no answer.
        """

    def close(self) -> None:
        """End what the transport holds; requests under way end with Unreachable or their answer."""


@dataclass(frozen=True, kw_only=True)
class RunAddress:
    """URL of a sampler rank, and its token."""

    url: str
    """Base URL, which ends in ``/v1``."""
    token: str
    """Bearer token."""

    @staticmethod
    def of_url(url: str, token: str) -> RunAddress:
        """Return the address of a URL with or without ``/v1``.

        Raises:
            ConfigError: it is no URL.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is no address", why="an address is http://HOST:PORT")
        base = url.rstrip("/")
        return RunAddress(url=base if base.endswith("/v1") else f"{base}/v1", token=token)


def address_in(file: Path) -> RunAddress:
    """Return the address in a file that a run writes, ``RUN/service/POOL-RANK.json``.

    Raises:
        Unreachable: there is no such file: the run has not begun, or it has ended.
    """
    try:
        said = json.loads(file.read_text())
        return RunAddress(url=said["url"], token=said["token"])
    except (OSError, ValueError, KeyError) as error:
        raise Unreachable(f"{file} has no address of a run", why=str(error)) from None


@dataclass(kw_only=True)
class _OpenConnection:
    """A connection of one thread."""

    connection: HTTPConnection
    """The connection."""
    address: RunAddress
    """Where it goes."""
    used_at: float = 0.0
    """When its last answer ended."""


class HttpTransport:
    """Requests over HTTP, on one connection for each thread.

    Args:
        address: returns the address; asked again after a connection fails, because a run that starts again
            may have another port.
        name: name of this client, which its leases belong to.
    """

    def __init__(self, address: Callable[[], RunAddress], name: str) -> None:
        self._address, self._name = address, name
        self._own = threading.local()

    def ask(self, method: str, path: str, body: bytes | None, wait_s: float) -> RunAnswer:
        """See Transport."""
        held: _OpenConnection | None = vars(self._own).pop("held", None)
        if held is not None and time.monotonic() - held.used_at > IDLE_S:
            held.connection.close()
            held = None
        if held is not None:
            try:
                return self._sent(held, method, path, body, wait_s)
            except Unreachable:
                if method != "GET":
                    raise
        return self._sent(self._opened(), method, path, body, wait_s)

    def close(self) -> None:
        """See Transport; connections end with their threads."""

    def _opened(self) -> _OpenConnection:
        address = self._address()
        parts = urlsplit(address.url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        return _OpenConnection(connection=kind(parts.hostname or "", parts.port), address=address)

    def _sent(
        self,
        held: _OpenConnection,
        method: str,
        path: str,
        body: bytes | None,
        wait_s: float,
    ) -> RunAnswer:
        connection, address = held.connection, held.address
        headers = {"Authorization": f"Bearer {address.token}", CLIENT: self._name}
        connection.timeout = wait_s + SPARE_S
        try:
            if connection.sock is not None:
                connection.sock.settimeout(connection.timeout)
            connection.request(method, f"{urlsplit(address.url).path}/{path}", body, headers)
            answer = connection.getresponse()
            found = RunAnswer(status=answer.status, body=answer.read())
        except (OSError, HTTPException) as error:
            connection.close()
            why = f"{type(error).__name__}: {error}"
            raise Unreachable(f"the run at {address.url} does not answer", why=why) from None
        held.used_at = time.monotonic()
        vars(self._own)["held"] = held
        return found
