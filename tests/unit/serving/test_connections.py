"""Connections: idle ones stay longer than clients keep them; slow ones end; a new one replaces an old one."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("uvicorn", reason="the door is the extra `service`")

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rillflow.serving import http_body, server
from rillflow.serving.http_body import Declined
from rillflow.serving.request_reader import HeldRoom, RequestReader
from rillflow.serving.server import KEEP_ALIVE_S, LoopbackServer, bound


def application() -> Starlette:
    reader = RequestReader(2**20)

    async def length(request: Request) -> Response:
        try:
            return JSONResponse(len(await reader.body(request)))
        except Declined as error:
            return JSONResponse(error.what, status_code=error.status)

    return Starlette(routes=[Route("/", length, methods=["POST"])], middleware=[Middleware(HeldRoom)])


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(server, "HEAD_WITHIN_S", 0.5)
    monkeypatch.setattr(http_body, "BODY_WITHIN_S", 1.0)
    with LoopbackServer(application(), listening := bound(0)):
        yield listening.getsockname()[1]


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20.0)


def post(body: bytes, more: str = "") -> bytes:
    return f"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body


def answer(connection: socket.socket) -> bytes:
    """Return an answer with its body; empty if the server has closed the connection."""
    said = connection.recv(2**16)
    while said and b"\r\n\r\n" in said and said.endswith(b"\r\n\r\n"):
        said += connection.recv(2**16)
    return said


def test_a_connection_may_idle_longer_than_a_head_may_take(port: int) -> None:
    assert KEEP_ALIVE_S > 90  # Go's clients keep connections that long
    with connected(port) as connection:
        for _ in range(3):
            connection.sendall(post(b"abc"))
            assert answer(connection).endswith(b"3")
            time.sleep(0.7)


def test_a_head_ends_in_time_however_slowly_it_arrives(port: int) -> None:
    """On a new connection, and on one that has been used."""
    for used in (False, True):
        with connected(port) as connection:
            if used:
                connection.sendall(post(b""))
                answer(connection)
            begin = time.monotonic()
            with pytest.raises(OSError):  # reset, or a broken pipe
                while time.monotonic() - begin < 15.0:
                    connection.sendall(b"G")
                    time.sleep(0.1)
                    connection.settimeout(0.01)
                    try:
                        if answer(connection) == b"":
                            raise OSError
                    except TimeoutError:
                        pass


def test_a_body_of_a_byte_at_a_time_ends_in_time(port: int) -> None:
    with connected(port) as connection:
        connection.sendall(post(b"")[:-2].replace(b"Length: 0", b"Length: 1000") + b"\r\n")
        for _ in range(12):
            connection.sendall(b" ")
            time.sleep(0.1)
        assert b" 408 " in answer(connection)


def test_bodies_that_unpack_or_are_too_long_are_refused(port: int) -> None:
    with connected(port) as connection:
        connection.sendall(post(b"abc", "Content-Encoding: gzip\r\n"))
        assert b" 415 " in answer(connection)
    with connected(port) as connection:
        connection.sendall(post(b"")[:-2].replace(b"Length: 0", b"Length: 9999999999") + b"\r\n")
        assert b" 413 " in answer(connection)
    with connected(port) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        connection.sendall((b"80000\r\n" + b" " * 2**19 + b"\r\n") * 2 + b"1\r\na\r\n")
        assert b" 413 " in answer(connection)


def test_a_new_connection_replaces_an_idle_one_and_a_slow_one_but_no_request(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEAD_WITHIN_S", 30.0)
    monkeypatch.setattr(http_body, "BODY_WITHIN_S", 30.0)
    monkeypatch.setattr(server, "most_connections", lambda: 8)
    opened = []
    for place in range(30):
        opened.append(connected(port))
        if place % 2:
            opened[-1].sendall(post(b"")[:-2].replace(b"Length: 0", b"Length: 9") + b"\r\n")
    with connected(port) as connection:
        connection.sendall(post(b"abc"))
        assert answer(connection).endswith(b"3")
    for each in opened:
        each.close()
