"""Server: serve the page and its API on the loopback device.

RUNS ─ WatchedRuns ─┬─ Api ─┬─ Access ─ LoopbackServer ─> browser
cache ─ Indexing ───┘       │
page/, report/charts/ ──────┘ assets, by name
"""

from __future__ import annotations

import contextlib
import mimetypes
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rillflow.config.user_paths import home
from rillflow.errors import Signalled
from rillflow.serving.http_body import Declined
from rillflow.serving.server import LoopbackServer, bound
from rillflow.serving.token import Token, token_of
from rillflow_parts.report.charts.assets import FOLDER as CHARTS
from rillflow_parts.watch.access import Access, error_response
from rillflow_parts.watch.api import Api
from rillflow_parts.watch.indexing import IndexingProcess
from rillflow_parts.watch.watched_runs import WatchedRuns

PAGE = Path(__file__).with_name("page")
_KINDS = (".js", ".css", ".html", ".svg", ".png", ".woff2", ".json")
_PLAIN = "<!doctype html><title>Rillflow</title><p>The API is below <a href='/api/runs'>/api/runs</a>."


def watch(
    paths: Sequence[Path],
    *,
    port: int,
    token_file: Path | None,
    cache: Path | None,
    announce: Callable[[str], None],
) -> None:
    """Serve until a signal ends it.

    Args:
        paths: run directories, or folders of runs.
        port: port on the loopback device; 0 for a free one.
        token_file: file of the token; made if it is missing. None makes a new token.
        cache: folder of the indexes; None for the user's cache folder, or without one for a temporary one.
        announce: receives the address.

    Raises:
        RillflowError: a path is missing, the port is taken, or the token cannot be used.
    """
    runs, token = WatchedRuns(paths), token_of(token_file)
    listening = bound(port)
    host, port = listening.getsockname()[:2]
    with contextlib.ExitStack() as kept:
        folder = cache or default_cache()
        indexing = IndexingProcess(folder or Path(kept.enter_context(TemporaryDirectory())))
        kept.callback(indexing.close)
        indexing.clear()
        server = LoopbackServer(application(runs, indexing, token, port), listening)
        announce(f"{len(runs.all())} runs: http://{host}:{port}/?token={token.text}")
        with contextlib.suppress(Signalled, KeyboardInterrupt):  # the ordinary end of the command
            server.run()


def application(runs: WatchedRuns, indexing: IndexingProcess, token: Token, port: int) -> Starlette:
    """Return the ASGI application."""
    routes = [
        Route("/", lambda _: _page()),
        Route("/assets/{name}", _asset),
        *Api(runs, indexing).routes(),
    ]
    middleware = [
        Middleware(BaseHTTPMiddleware, dispatch=Access(token, port)),
        Middleware(GZipMiddleware, minimum_size=1000, compresslevel=1),
    ]
    return Starlette(routes=routes, middleware=middleware)


def default_cache() -> Path | None:
    """Return the folder of indexes in the user's cache folder; None for a user without a home folder."""
    base, folder = os.environ.get("XDG_CACHE_HOME", ""), home()
    caches = Path(base) if base else folder and folder / ".cache"
    return caches and caches / "rillflow" / "watch"


def _page() -> Response:
    try:
        return Response((PAGE / "index.html").read_bytes(), media_type="text/html")
    except OSError:
        return Response(_PLAIN, media_type="text/html")


def _asset(request: Request) -> Response:
    name = request.path_params["name"]
    file = assets().get(name)
    if file is None:
        return error_response(Declined(404, f"there is no file {name[:80]!r}"))
    kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    return Response(file.read_bytes(), media_type=kind)


def assets() -> Mapping[str, Path]:
    """Return the files of the page by name. A request names one of these, so it cannot leave the folders."""
    found = {}
    for folder in (CHARTS / "vendor", CHARTS, PAGE):
        for file in folder.iterdir() if folder.is_dir() else ():
            if file.suffix in _KINDS and file.is_file():
                found[file.name] = file
    return found
