"""``rillflow watch`` as a process: its address, its token, its port, and its end."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from rillflow.errors import StreamError
from rillflow.runs import layout
from rillflow.serving.server import bound
from rillflow_parts.watch.index import Index
from rillflow_parts.watch.indexing import IndexingProcess, RunIndexer
from rillflow_parts.watch.watched_runs import WatchedRun, WatchedRuns
from tests.parts.watch.conftest import STEPS, WrittenRun

PROGRAM = "import sys; from rillflow.cli.main import main; sys.exit(main(sys.argv[1:]))"


@dataclass(frozen=True, kw_only=True)
class Page:
    """A running server."""

    process: subprocess.Popen[str]
    port: int
    token: str

    def get(self, path: str, **how: Any) -> httpx.Response:
        """Send a request with the token."""
        headers = {"Authorization": f"Bearer {self.token}"}
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", headers=headers, timeout=60, **how)


@contextmanager
def served(*words: str | Path) -> Iterator[Page]:
    command = [sys.executable, "-c", PROGRAM, "watch", *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)", process.stdout.readline())
        assert found is not None
        yield Page(process=process, port=int(found[1]), token=found[2])
    finally:
        process.kill()
        process.wait()


def waited(found: Any, seconds: float = 60.0) -> Any:
    """Return the first result of a function that is true."""
    ends = time.monotonic() + seconds
    while not (result := found()):
        assert time.monotonic() < ends, "waited too long"
        time.sleep(0.05)
    return result


def test_two_pages_run_side_by_side_and_a_taken_port_is_refused(written: WrittenRun, tmp_path: Path) -> None:
    cache = ("--cache", tmp_path / "cache")
    with served(written.path.parent, "--port", "0", *cache) as page:
        command = [sys.executable, "-c", PROGRAM, "watch", str(written.path), "--port", str(page.port)]
        refused = subprocess.run(command, capture_output=True, text=True, check=False)
        assert refused.returncode == 2, "refused before the start"
        assert f"cannot listen on 127.0.0.1:{page.port}" in refused.stderr
        other = int(re.findall(r"--port (\d+)", refused.stderr)[0])
        token = tmp_path / "token"
        with served(written.path, "--port", str(other), "--token-file", token, *cache) as second:
            assert second.port == other and token.read_text() == second.token
            assert [run["run"] for run in second.get("/api/runs").json()] == ["first"]
            cookies = {
                httpx.get(f"http://127.0.0.1:{one.port}/?token={one.token}")
                .headers["set-cookie"]
                .partition("=")[0]
                for one in (page, second)
            }
            assert len(cookies) == 2, "a browser keeps one cookie for both ports"
            path = "/api/rollouts?run=first&q=STRASSE"
            for one in (page, second):
                assert waited(lambda one=one: one.get(path).json()["total"] == 3 * STEPS)
        children = psutil.Process(page.process.pid).children(recursive=True)
        page.process.send_signal(signal.SIGTERM)
        assert page.process.wait(30) == 0
        assert all(not child.is_running() or child.status() == "zombie" for child in children)


def test_news_of_a_growing_run_arrive(written: WrittenRun, tmp_path: Path) -> None:
    with served(written.path, "--port", "0", "--cache", tmp_path / "cache") as page:
        url, headers = (
            f"http://127.0.0.1:{page.port}/api/events?runs=first",
            {"Authorization": f"Bearer {page.token}"},
        )
        with httpx.stream("GET", url, headers=headers, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines) == ": open"
            written.step(STEPS + 1)
            news = next(line for line in lines if line.startswith("data: "))
        assert json.loads(news.removeprefix("data: ")) | {"updated": 0} == {
            "run": "first",
            "steps": STEPS + 1,
            "updated": 0,
        }


def test_an_index_process_that_was_killed_is_started_again(written: WrittenRun, tmp_path: Path) -> None:
    indexing = IndexingProcess(tmp_path / "cache")
    try:
        folder = indexing.folder(written.path, "run")
        waited(lambda: len(Index(folder)) == 6 * STEPS)
        (child,) = [
            one for one in psutil.Process().children() if "rillflow_parts.watch.indexing" in one.cmdline()
        ]
        assert child.nice() == 19
        child.kill()
        child.wait()
        written.step(STEPS + 1)
        waited(lambda: len(Index(indexing.folder(written.path, "run"))) == 6 * (STEPS + 1))
    finally:
        indexing.close()


def test_indexes_of_deleted_runs_are_removed(written: WrittenRun, tmp_path: Path) -> None:
    for name, run in (("kept", written.path), ("gone", tmp_path / "gone")):
        (tmp_path / "cache").mkdir(exist_ok=True)
        indexer = RunIndexer(run, tmp_path / "cache" / name)
        indexer.advance(60)
        indexer.close()
    (tmp_path / "cache" / "mine").mkdir()
    (tmp_path / "cache" / "mine" / "head.json").write_text("[]")
    IndexingProcess(tmp_path / "cache").clear()
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {"kept", "mine"}


def test_a_taken_port_names_a_free_one() -> None:
    with bound(0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StreamError) as caught:
            bound(port)
    named = re.search(r"--port (\d+)", caught.value.fix)
    assert named is None or int(named[1]) > port
    with pytest.raises(StreamError):
        bound(70_000)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))


def test_a_copy_of_a_run_has_an_index_of_its_own(written: WrittenRun) -> None:
    names = {
        WatchedRun(path, "a").identity()
        for path in (written.path, written.path / ".." / "first", written.path)
    }
    assert len(names) == 2
    (written.path / layout.ENVIRONMENT).write_text('{"run": "../../etc"}')
    assert "/" not in WatchedRun(written.path, "a").identity()


def test_columns_of_runs_out_of_use_are_dropped(written: WrittenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    other = WrittenRun.new(written.path.with_name("second"), steps=2)
    other.directory.close()
    runs = WatchedRuns([written.path.parent])
    for run in runs.all():
        with run.lock:
            run.metrics()
    monkeypatch.setattr("rillflow_parts.watch.watched_runs.MOST_BYTES", 0)
    runs.trim()
    first, second = (runs.one(name) for name in ("first", "second"))
    assert first.nbytes == 0 < second.nbytes, "the run that was used last is kept"
    with first.lock:
        assert len(first.metrics()) == STEPS
