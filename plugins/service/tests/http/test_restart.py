"""A service that is killed and starts again; weights larger than a message; contracts of columns."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette", reason="the service is the extra `service`")

from plugins.service.tests.http.conftest import serving
from rillflow.errors import StreamError
from rillflow_service import http_client
from rillflow_service.http_client import ServiceClient

SMALL = ("--capacity-bytes", str(2**22))
COLUMNS: dict[str, Any] = {
    "prompt": {"dtype": "int64", "ragged": True, "per": "group", "least": 0, "most": 99},
    "tokens": {"dtype": "int64", "ragged": True, "least": 0, "most": 99},
    "logprobs": {"dtype": "float32", "ragged": True, "aligned": "tokens", "finite": True, "most": 0},
}
STAGES = [
    {"name": "sample", "reads": ["prompt"], "writes": ["tokens", "logprobs"]},
    {"name": "train", "reads": ["tokens", "logprobs"]},
]
PROMPTS = (np.arange(3), np.array([1, 2]))


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_service_and_removes_its_socket(
    sent: signal.Signals, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A client that waits for the socket of the next service would be refused by a socket that stays."""
    with serving(tmp_path, *SMALL) as process:
        process.send_signal(sent)
        assert process.wait(60.0) == (0 if sent == signal.SIGINT else -sent)
    assert not {"socket", "bound"} & {path.name for path in tmp_path.iterdir()}
    assert "Traceback" not in capfd.readouterr().err


def test_a_killed_service_comes_back_with_token_streams_and_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases of before are refused; more weights than fit into the store, in several files."""
    monkeypatch.setattr(http_client, "FILE_BYTES", 2**22)
    weights = {f"w{index}": np.full(2**20, index, np.float32) for index in range(3)}
    with serving(tmp_path, *SMALL):
        task = ServiceClient(tmp_path, name="task")
        for name in ("s", "closed"):
            task.create(name, columns=COLUMNS, stages=STAGES, capacity=16)
        task.close("closed")
        task.begin("s", {"prompt": PROMPTS}, rows=[1, 1])
        task.put_weights(0, weights)
        taken = task.take("s", "sample", 2)
        assert taken is not None
    with serving(tmp_path, *SMALL):
        again = ServiceClient(tmp_path, name="task")
        assert again.status("s")["begun"] == 0
        with pytest.raises(StreamError, match="there is no stream 'closed'"):
            again.status("closed")
        found = again.get_weights()
        assert found is not None and found[0] == 0
        assert {name: float(each[0]) for name, each in found[1].items()} == {"w0": 0, "w1": 1, "w2": 2}
        again.begin("s", {"prompt": PROMPTS}, rows=[1, 1])
        fresh = again.take("s", "sample", 2)
        own = {
            "tokens": (np.arange(2), np.array([1, 1])),
            "logprobs": (np.zeros(2, np.float32), np.array([1, 1])),
        }
        with pytest.raises(StreamError, match="does not hold group 0"):
            again.done(taken, own)
        assert fresh is not None
        again.done(fresh, own)
        again.put_weights(1, weights)
        with pytest.raises(StreamError, match="other cannot close"):
            ServiceClient(tmp_path, name="other").close("s")


def test_a_version_larger_than_the_limit_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path, *SMALL, "--weights-bytes", "100000"):
        client = ServiceClient(tmp_path, name="trainer")
        with pytest.raises(StreamError, match="has more than 100000 bytes"):
            client.put_weights(0, {"w": np.zeros(2**20)})
        client.put_weights(0, {"w": np.zeros(2**10)})


def test_columns_keep_what_the_stream_says_of_them(tmp_path: Path) -> None:
    with serving(tmp_path, *SMALL):
        client = ServiceClient(tmp_path, name="sampler")
        client.create("s", columns=COLUMNS, stages=STAGES, capacity=16)
        client.begin("s", {"prompt": PROMPTS}, rows=[1, 1])
        taken = client.take("s", "sample", 2)
        assert taken is not None
        tokens, two = (np.arange(3), np.array([1, 2])), np.array([1, 2])
        for own, said in (
            (
                {"tokens": tokens, "logprobs": (np.zeros(3, np.float32), np.array([2, 1]))},
                "entry 0 has 2 values",
            ),
            (
                {"tokens": tokens, "logprobs": (np.array([0, np.nan, 0], np.float32), two)},
                "value 1 of column",
            ),
            (
                {"tokens": tokens, "logprobs": (np.array([0, 0, 3], np.float32), two)},
                "value 2 of column 'logprobs' is 3",
            ),
            (
                {"tokens": (-np.arange(3), two), "logprobs": (np.zeros(3, np.float32), two)},
                "value 1 of column 'tokens'",
            ),
        ):
            with pytest.raises(StreamError, match=said):
                client.done(taken, own)
        client.done(taken, {"tokens": tokens, "logprobs": (np.zeros(3, np.float32), two)})
        odd = {**COLUMNS, "logprobs": {**COLUMNS["logprobs"], "aligned": "prompt"}}
        with pytest.raises(StreamError, match="is aligned with 'prompt'"):
            client.create("odd", columns=odd, stages=STAGES, capacity=16)
