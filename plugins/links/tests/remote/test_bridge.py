"""A sampler, a store and a bridge, with a small HTTP server in the place of the run."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from plugins.links.tests.remote.runs import wait_for
from rillflow_links.remote import bridge as bridges
from rillflow_links.remote.bridge import Bridge
from rillflow_links.remote.client import RunClient, RunEnded, WrongToken
from rillflow_links.remote.store import FolderStore, packed
from rillflow_links.remote.store_transport import FILES, REQUESTS, StoreTransport

TOKEN = "a token of this test"


class StubRun(BaseHTTPRequestHandler):
    """Answers a few paths of a run, and writes down what it was asked."""

    asked: list[str]

    def do_GET(self) -> None:
        """Return the model or a file."""
        self.asked.append(self.path)
        assert self.headers["Authorization"] == f"Bearer {TOKEN}"
        self._say(200, b"bytes of a file" if "/weights/" in self.path else b'{"vocabulary": 9}')

    def do_POST(self) -> None:
        """Lease a row once, then say that the run is over."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append(f"{self.path} {self.headers['X-Rillflow-Client']} {json.loads(body)['count']}")
        if sum("take" in each for each in self.asked) > 1:
            said = {"what": "no more rows", "why": "the run has ended", "fix": ""}
            return self._say(410, json.dumps(said).encode())
        return self._say(200, b'{"lease": "one.1", "rows": []}')

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What a run was asked, whose requests a bridge forwards."""
    monkeypatch.setattr(bridges, "LINGER_S", 0.5)
    requests: list[str] = []
    kind = type("CountingStub", (StubRun,), {"asked": requests})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = tmp_path / "main-0.json"
        url = f"http://127.0.0.1:{server.server_port}/v1"
        address.write_text(json.dumps({"url": url, "token": TOKEN}))
        bridge = Bridge(FolderStore(tmp_path / "store"), address, poll_s=0.01, tell=requests.append)
        thread = threading.Thread(target=bridge.serve)
        thread.start()
        wait_for(lambda: bool(FolderStore(tmp_path / "store").names("bridge")))
        yield requests
        bridge.stop()
        thread.join()
        server.shutdown()


def client(tmp_path: Path, token: str = TOKEN) -> RunClient:
    return RunClient(StoreTransport(FolderStore(tmp_path / "store"), "far", token, 0.01))


def test_requests_and_files_arrive_and_a_file_is_fetched_once(asked: list[str], tmp_path: Path) -> None:
    near, far = client(tmp_path), client(tmp_path)
    assert near.model() == far.model() == {"vocabulary": 9}
    assert near.file(3, "model.safetensors") == far.file(3, "model.safetensors") == b"bytes of a file"
    assert asked.count("/v1/weights/3/model.safetensors") == 1
    assert near.take(5, lease_s=1, wait_s=0) is not None and "/v1/rows/take far 5" in asked
    store = FolderStore(tmp_path / "store")
    wait_for(lambda: not store.names(REQUESTS))
    assert len(store.names(FILES)) == 1 and store.names("ans") == []


def test_the_token_is_checked_and_never_in_the_store(asked: list[str], tmp_path: Path) -> None:
    with pytest.raises(WrongToken, match="the token is wrong"):
        client(tmp_path, "another token").model()
    assert client(tmp_path).model() == {"vocabulary": 9} and len(asked) == 1
    files = [path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert all(TOKEN.encode() not in data for data in files)


def test_a_request_that_is_half_there_waits_for_its_rest(asked: list[str], tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    bridge = store.names("bridge")[0].split("/")[1]
    says = {"method": "GET", "path": "model", "wait_s": 0, "client": "far", "has_body": False}
    whole, name = packed(says, b"", TOKEN), f"{REQUESTS}/{bridge}/far.1/000000001"
    store.put(name, whole[:40])
    assert client(tmp_path).model() == {"vocabulary": 9}  # others are answered meanwhile
    store.put(name, whole)
    wait_for(lambda: asked.count("/v1/model") == 2)


def test_paths_outside_the_run_are_refused(asked: list[str], tmp_path: Path) -> None:
    transport = StoreTransport(FolderStore(tmp_path / "store"), "far", TOKEN, 0.01)
    assert transport.ask("GET", "../admin", None, 0.0).status == 404
    assert transport.ask("GET", "other", None, 0.0).status == 404 and not asked


def test_the_end_of_the_run_reaches_the_sampler_and_ends_the_bridge(asked: list[str], tmp_path: Path) -> None:
    far = client(tmp_path)
    far.take(5, lease_s=1, wait_s=0)
    with pytest.raises(RunEnded, match="no more rows"):
        far.take(5, lease_s=1, wait_s=0)
    assert "the run has ended" in asked
    wait_for(lambda: FolderStore(tmp_path / "store").names("") == [])
