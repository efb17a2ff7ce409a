"""``python -m rillflow_service FOLDER``: serve streams until interrupted.

The folder gets ``token`` (0600) and ``socket``, unless a listen address is given, ``streams.json`` and
``weights``. A service that starts in the folder again has the same token, streams and weights; groups that
were under way must begin again. An address other than loopback requires the user's own token file.
"""

from __future__ import annotations

import argparse
import logging
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn

from rillflow.serving.server import HOW, SignalledServer
from rillflow_service.access import token_for, write_private
from rillflow_service.app import MAX_WEIGHT_BYTES, StreamsApp
from rillflow_service.plane import Plane
from rillflow_service.segments import Memory
from rillflow_service.store import Store


def listening(folder: Path, host: str, token_file: Path | None) -> str:
    """Write the token for clients on this machine into the folder and return it; keep the one that is there.

    Raises:
        StreamError: the address is not loopback and there is no token file, or the token is too short.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = folder / "token"
    token = token_for(host, token_file)
    if token_file is None and kept.exists():
        token = token_for("", kept)
    write_private(kept, token)
    return token


class FolderServer(SignalledServer):
    """Server on a Unix socket, which the folder shows as ``socket`` while the server answers.

    Args:
        app: the ASGI application; its type is the adapter's, ``http_app``.
        folder: the folder, which exists.
    """

    def __init__(self, app: Any, folder: Path) -> None:
        self._hidden, self._shown = folder / "bound", folder / "socket"
        self._hidden.unlink(missing_ok=True)
        made = socket.socket(socket.AF_UNIX)
        made.bind(str(self._hidden))
        super().__init__(uvicorn.Config(app, **HOW, fd=made.detach()))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Show the socket once the server listens; uvicorn handles signals by then."""
        await super().startup(sockets)
        self._hidden.rename(self._shown)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the open requests, and remove the socket."""
        self._shown.unlink(missing_ok=True)
        await super().shutdown(sockets)


def main() -> None:
    """Serve streams over HTTP."""
    parser = argparse.ArgumentParser(prog="python -m rillflow_service", description=main.__doc__)
    parser.add_argument("folder", type=Path, help="folder for socket, token, streams and weights")
    parser.add_argument("--capacity-bytes", type=int, default=2**30, help="memory for all streams, in bytes")
    parser.add_argument(
        "--weights-bytes", type=int, default=MAX_WEIGHT_BYTES, help="largest version of the weights, in bytes"
    )
    parser.add_argument("--host", default="", help="address to listen on instead of the socket")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--token-file",
        type=Path,
        default=None,
        help="file with your token; default: the folder's, or a new one",
    )
    asked = parser.parse_args()
    token = listening(asked.folder, asked.host, asked.token_file)
    logging.basicConfig(level=logging.WARNING)
    first = secrets.randbelow(2**40) + 1
    plane = Plane(Store(Memory(), capacity_bytes=asked.capacity_bytes), first_lease=first)
    size = asked.weights_bytes
    app = StreamsApp(plane, token=token, folder=asked.folder, max_weight_bytes=size).app()
    if asked.host:
        server = SignalledServer(uvicorn.Config(app, **HOW, host=asked.host, port=asked.port))
    else:
        server = FolderServer(app, asked.folder)
    with suppress(KeyboardInterrupt):
        server.run()


if __name__ == "__main__":
    main()
