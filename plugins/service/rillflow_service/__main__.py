"""``python -m rillflow_service FOLDER``: serve streams until interrupted.

The folder gets ``token`` (0600) and ``socket``, unless a listen address is given. An address other than
loopback requires the user's own token file, so that nobody exposes a machine by accident.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import uvicorn

from rillflow.serving.server import HOW
from rillflow_service.access import token_for
from rillflow_service.app import Service
from rillflow_service.plane import Plane
from rillflow_service.segments import Memory
from rillflow_service.store import Store


def listening(folder: Path, host: str, token_file: Path | None) -> str:
    """Write the token for clients on this machine into the folder and return it.

    Raises:
        StreamError: the address is not loopback and there is no token file, or the token is too short.
    """
    token = token_for(host, token_file)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / "token").unlink(missing_ok=True)
    (folder / "token").touch(mode=0o600)
    (folder / "token").write_text(token)
    return token


def main() -> None:
    """Serve streams over HTTP."""
    parser = argparse.ArgumentParser(prog="python -m rillflow_service", description=main.__doc__)
    parser.add_argument("folder", type=Path, help="folder for the socket and the token")
    parser.add_argument("--capacity-bytes", type=int, default=2**30, help="memory for all streams, in bytes")
    parser.add_argument("--host", default="", help="address to listen on instead of the socket")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--token-file", type=Path, default=None, help="file with your token; default: a new token"
    )
    asked = parser.parse_args()
    token = listening(asked.folder, asked.host, asked.token_file)
    logging.basicConfig(level=logging.WARNING)
    plane = Plane(Store(Memory(), capacity_bytes=asked.capacity_bytes))
    where = {"host": asked.host, "port": asked.port} if asked.host else {"uds": str(asked.folder / "socket")}
    app = Service(plane, token=token).app()
    uvicorn.run(app, **HOW, **where)


if __name__ == "__main__":
    main()
