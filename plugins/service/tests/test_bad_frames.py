"""Whatever comes in on a socket: an error or a closed connection, and the server serves on."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rillflow.errors import StreamError
from rillflow.workers.wire import HEAD_BYTES, Message, head_of, message_of, packed
from rillflow_service.client import Client
from rillflow_service.requests import Hello, Kind
from tests.unit.data_plane.streams import diamond

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        "stream",
        "stage",
        "columns",
        "stages",
        "capacity",
        "count",
        "lease",
        "segment",
        "nbytes",
        "reason",
        "wait_s",
        "address",
        "holder",
    ]
)


def frame(kind: int, says: dict[str, object], number: int, **arrays: np.ndarray) -> bytes:
    found = packed(kind, says, arrays, number=number)
    data = bytearray(found.nbytes)
    found.write_into(data)
    return bytes(data)


def connected(folder: Path, *, token: str | None = None) -> socket.socket:
    end = socket.socket(socket.AF_UNIX)
    end.settimeout(10.0)
    end.connect(str(folder / "socket"))
    hello = Hello(token=(folder / "token").read_text() if token is None else token, name="fuzz")
    end.sendall(frame(Kind.HELLO, hello.model_dump(), 0))
    return end


def answer(end: socket.socket) -> Message | None:
    """The next frame, or None where the connection is closed."""
    data = b""
    while len(data) < HEAD_BYTES or len(data) < head_of(data).body_at + head_of(data).body_bytes:
        try:
            piece = end.recv(1 if len(data) < HEAD_BYTES else 2**16)
        except ConnectionError:
            return None
        if not piece:
            return None
        data += piece
    head = head_of(data)
    return message_of(head, data[HEAD_BYTES : HEAD_BYTES + head.json_bytes], data[head.body_at :])


@pytest.fixture
def client(folder: Path) -> Client:
    found = Client(folder, name="witness")
    found.create("s", diamond(), capacity=8)
    return found


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(junk=st.binary(min_size=1, max_size=200), is_framed=st.booleans())
def test_garbage_ends_its_own_connection_alone(
    folder: Path, client: Client, junk: bytes, is_framed: bool
) -> None:
    with connected(folder) as end:
        assert answer(end) is not None
        good = frame(Kind.LOOK, {"stream": "s"}, 1)
        end.sendall(good[:24] + junk + good[24 + len(junk) :] if is_framed else junk)
        end.shutdown(socket.SHUT_WR)
        while answer(end) is not None:
            pass
    assert client.status("s")["begun"] == 0


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(kind=st.integers(0, 14), says=st.dictionaries(FIELDS, JSON | st.just("s"), max_size=5))
def test_any_request_is_answered_with_an_error_that_says_something(
    folder: Path, client: Client, kind: int, says: dict[str, object]
) -> None:
    with connected(folder) as end:
        assert answer(end) is not None
        end.sendall(frame(kind, {**says, "wait_s": 0}, 1))
        found = answer(end)
        assert found is not None
        assert found.kind == Kind.OK or (found.kind == Kind.ERROR and found.says["what"])
    assert client.status("s")["begun"] == 0


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (frame(Kind.LOOK, {"stream": "s"}, 0), "received frame 0 instead of 1"),
        (frame(Kind.LOOK, {"stream": "s"}, 1).replace(b"RILL\x01", b"RILL\x00"), "of version 0"),
        (
            frame(Kind.LOOK, {"stream": "s"}, 1)[:16] + struct.pack("<Q", 4 * 2**30) + bytes(40),
            "4294967296 bytes",
        ),
        (frame(Kind.HELLO, {"token": "x", "name": "y"}, 1), "sent its greeting twice"),
        (frame(77, {}, 1), "of kind 77"),
    ],
)
def test_what_breaks_the_rules_of_the_wire_is_answered_and_the_connection_closed(
    folder: Path, sent: bytes, said: str
) -> None:
    with connected(folder) as end:
        assert answer(end) is not None
        end.sendall(sent)
        found = answer(end)
        assert found is not None and found.kind == Kind.ERROR and said in found.says["what"]
        assert answer(end) is None


@pytest.mark.parametrize("token", ["", "x" * 43])
def test_a_wrong_token_is_refused(folder: Path, token: str) -> None:
    with connected(folder, token=token) as end:
        found = answer(end)
        assert found is not None and found.says["what"] == "the token is wrong" and answer(end) is None


def test_no_array_is_read_from_who_has_shown_no_token(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(str(folder / "socket"))
        end.sendall(frame(Kind.LOOK, {"stream": "s"}, 0, x=np.zeros(9)))
        found = answer(end)
        assert found is not None and found.says["what"] == "arrays came before the token"


@pytest.mark.parametrize("segment", [0, -1, 999])
def test_nobody_begins_with_a_segment_that_is_not_its_own_to_write(
    folder: Path, client: Client, segment: int
) -> None:
    with connected(folder) as end:
        answer(end)
        end.sendall(frame(Kind.BEGIN, {"stream": "s", "segment": segment}, 1))
        found = answer(end)
        why = "has not reserved that segment" if segment >= 0 else "greater than or equal to 0"
        assert found is not None and why in found.says["why"]


def test_a_segment_with_garbage_is_refused(folder: Path, client: Client) -> None:
    with connected(folder) as end:
        hello = answer(end)
        assert hello is not None
        end.sendall(frame(Kind.RESERVE, {"nbytes": 4096}, 1))
        found = answer(end)
        assert found is not None
        (Path(folder / "segments") / str(found.says["segment"])).write_bytes(b"\xff" * 4096)
        end.sendall(frame(Kind.BEGIN, {"stream": "s", "segment": found.says["segment"]}, 2))
        found = answer(end)
        assert found is not None and found.kind == Kind.ERROR and "begins with" in found.says["what"]
    with pytest.raises(StreamError, match="timeout after"):
        client.take("s", "sample", 1, wait_s=0.0)
