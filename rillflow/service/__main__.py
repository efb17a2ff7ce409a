"""``python -m rillflow.service FOLDER``: serve streams until interrupted.

The folder gets ``token`` (0600) and ``socket``, unless an address is given to listen on; one that is no
loopback wants a token file of one's own, so that nobody opens a machine by accident.
"""

from __future__ import annotations

import argparse
import ipaddress
import logging
import secrets
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rillflow.data_plane.plane import Plane
from rillflow.data_plane.segments import Memory
from rillflow.data_plane.store import Store
from rillflow.errors import StreamError
from rillflow.service.app import Service

HEAD_WITHIN_S = 10.0


class Impatient(H11Protocol):  # type: ignore[misc]
    """A connection that is closed where no whole head of a request comes, however slowly its bytes do."""

    def connection_made(self, transport: Any) -> None:
        """Watch the connection from its first moment."""
        super().connection_made(transport)
        self.loop.call_later(HEAD_WITHIN_S, self._look, None)

    def _look(self, before: Any) -> None:
        if self.transport.is_closing():
            return
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self.cycle is before:
            self.transport.close()
        else:
            self.loop.call_later(HEAD_WITHIN_S, self._look, self.cycle)


def listening(folder: Path, host: str, token_file: Path | None) -> str:
    """The token that requests carry, written where clients of this machine find it.

    Raises:
        StreamError: the address is no loopback, and there is no token file.
    """
    if host and token_file is None and not ipaddress.ip_address(host).is_loopback:
        raise StreamError(
            f"{host} can be reached from elsewhere",
            why="a token is then to be given",
            fix="add --token-file FILE",
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    token = token_file.read_text().strip() if token_file else secrets.token_urlsafe(32)
    if len(token) < 16:
        raise StreamError(f"a token of {len(token)} characters", why="16 are the least that is not guessed")
    (folder / "token").unlink(missing_ok=True)
    (folder / "token").touch(mode=0o600)
    (folder / "token").write_text(token)
    return token


def main() -> None:
    """Serve streams over HTTP."""
    parser = argparse.ArgumentParser(prog="python -m rillflow.service", description=main.__doc__)
    parser.add_argument("folder", type=Path, help="gets the socket and the token")
    parser.add_argument("--capacity-bytes", type=int, default=2**30, help="of memory, for all streams")
    parser.add_argument("--host", default="", help="an address to listen on instead of the socket")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--token-file", type=Path, default=None, help="a token of your own; made anew if left out"
    )
    asked = parser.parse_args()
    token = listening(asked.folder, asked.host, asked.token_file)
    logging.basicConfig(level=logging.WARNING)
    plane = Plane(Store(Memory(), capacity_bytes=asked.capacity_bytes))
    where = {"host": asked.host, "port": asked.port} if asked.host else {"uds": str(asked.folder / "socket")}
    app = Service(plane, token=token).app()
    uvicorn.run(
        app, http=Impatient, log_level="warning", access_log=False, timeout_graceful_shutdown=1, **where
    )


if __name__ == "__main__":
    main()
