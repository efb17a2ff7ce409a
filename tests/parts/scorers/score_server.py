"""An HTTP server that scores, and counts its requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any], dict[str, str]], "tuple[int, object, dict[str, str]]"]


class Server(ThreadingHTTPServer):
    """A server that counts its requests, and how many run at once."""

    daemon_threads, request_queue_size = True, 256

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.lock = answer, threading.Lock()
        self.num_open = self.most_open = self.num_requests = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.num_requests += 1
            self.server.num_open += 1
            self.server.most_open = max(self.server.most_open, self.server.num_open)
        status, reply, headers = self.server.answer(body, dict(self.headers))
        data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        with self.server.lock:
            self.server.num_open -= 1
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def served(answer: Answer) -> Iterator[Server]:
    server = Server(answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
