"""Stores: files of two sides without a port, and the one bridge that serves them."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from plugins.links.tests.remote.runs import wait_for
from rillflow.errors import ConfigError, StreamError
from rillflow_links.remote import bridge as bridges
from rillflow_links.remote import store_transport
from rillflow_links.remote.bridge import Bridge
from rillflow_links.remote.store import FolderStore, SharedStore, packed, store_at, unpacked
from rillflow_links.remote.store_transport import ANSWERS, BRIDGES, REQUESTS, StoreTransport
from rillflow_links.remote.transport import Unreachable

TOKEN = "a token of this test"


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> SharedStore:
    return store_at(str(tmp_path) if request.param == "folder" else f"memory://{secrets.token_hex(4)}/x")


def test_files_are_written_read_listed_and_removed(store: SharedStore) -> None:
    assert store.get("a/b") is None and store.names("a") == []
    store.put("a/b", b"one")
    store.put("a/c/d", b"two")
    assert store.get("a/b") == b"one" and store.names("a") == ["a/b", "a/c/d"]
    store.remove("a/b")
    store.remove("a/b")
    assert store.names("a") == ["a/c/d"]


def test_a_store_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StreamError, match="cannot be written") as caught:
        FolderStore(tmp_path / "file").put("a/b", b"")
    assert not isinstance(caught.value, Unreachable)


def test_a_failure_that_may_pass_is_tried_again(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="cannot be written"):
        FolderStore(tmp_path).put("b" * 300, b"")


def test_a_message_that_is_cut_off_or_damaged_reads_as_missing() -> None:
    data = packed({"path": "model"}, b"body", TOKEN)
    whole = unpacked(data, TOKEN)
    assert whole is not None and whole.says == {"path": "model"} and whole.body == b"body"
    assert whole.is_genuine
    assert all(unpacked(data[:size], TOKEN) is None for size in range(len(data)))
    for place in range(len(data)):
        flipped = data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]
        other = unpacked(flipped, TOKEN)
        assert other is None or not other.is_genuine or other == whole, place
    forged = unpacked(data, "another token")
    assert forged is not None and not forged.is_genuine


def test_names_of_samplers_stay_in_the_store(store: SharedStore) -> None:
    for name in ("", "../x", "a/b", ".x"):
        with pytest.raises(ConfigError, match="the name is"):
            StoreTransport(store, name, TOKEN, 0.01)


def test_without_a_bridge_a_sampler_waits(store: SharedStore) -> None:
    with pytest.raises(Unreachable, match="no run answers") as caught:
        StoreTransport(store, "far", TOKEN, 0.01).ask("GET", "model", None, 0.0)
    assert "rillflow bridge" in caught.value.fix


def test_a_bridge_that_died_gives_no_answer(store: SharedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_transport, "ANSWER_S", 0.1)
    store.put(f"{BRIDGES}/dead/000000001", b"")
    with pytest.raises(Unreachable, match="does not answer"):
        StoreTransport(store, "far", TOKEN, 0.01).ask("GET", "model", None, 0.0)
    assert store.names(REQUESTS) == []


def served(
    store: SharedStore, tmp_path: Path, told: Callable[[str], None]
) -> tuple[Bridge, threading.Thread]:
    """A bridge that waits for its run."""
    bridge = Bridge(store, tmp_path / "none.json", poll_s=0.01, tell=told)
    thread = threading.Thread(target=bridge.serve)
    thread.start()
    return bridge, thread


def test_a_second_bridge_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridges, "BEAT_S", 0.2)
    store, lines = FolderStore(tmp_path / "store"), list[str]()
    bridge, thread = served(store, tmp_path, lines.append)
    try:
        wait_for(lambda: bool(lines))
        with pytest.raises(StreamError, match="another bridge serves this store"):
            Bridge(store, tmp_path / "none.json", poll_s=0.01, tell=lines.append).serve()
    finally:
        bridge.stop()
        thread.join()
    assert store.names("") == []


def test_leftovers_of_a_dead_bridge_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridges, "BEAT_S", 0.02)
    store, lines = FolderStore(tmp_path / "store"), list[str]()
    for folder in (BRIDGES, REQUESTS, ANSWERS):
        store.put(f"{folder}/dead/one/2", b"left")
    store.put(f"{BRIDGES}/dead/000000007", b"")
    store.remove(f"{BRIDGES}/dead/one/2")
    bridge, thread = served(store, tmp_path, lines.append)
    wait_for(lambda: bool(lines))
    assert len(store.names("")) <= 2 and not [each for each in store.names("") if "dead" in each]
    bridge.stop()
    thread.join()
