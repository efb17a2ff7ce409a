"""Messages between an engine and vLLM's server, without vLLM; tests/vllm has the other tests."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from rillflow.errors import RolloutError
from rillflow.records.row import RowId
from rillflow.rollout.config import RolloutConfig, SamplingConfig
from rillflow.workers.wire import SMALL_BYTES, Channel
from rillflow_parts.vllm import requests
from rillflow_parts.vllm.requests import Ask, CoreSettings, Piece
from rillflow_parts.vllm.served_core import ServedCore, StartRefused
from rillflow_parts.vllm.server import _Answers

SETTINGS = CoreSettings(directory="", device="cpu", dtype="float32", context=8, max_rows=1, keep_cache=False)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    both = [Channel(each) for each in socket.socketpair()]
    for each in both:
        each.wait_at_most(20)
    yield both[0], both[1]
    for each in both:
        each.close()


def test_an_ask_and_what_came_of_it_arrive_as_they_were(ends: tuple[Channel, Channel]) -> None:
    sampling = RolloutConfig(temperature=0.7, top_k=3, top_p=0.1 + 0.2, stop=("end",))
    ask = Ask(
        row=RowId(-1, 2, 3), sampling=sampling, seed=2**31 - 1, begin=4, most=5, stop=(6, 7), given=(8,)
    )
    ends[0].send(requests.Word.ADD, requests.said_of(ask), {"given": torch.tensor(ask.given).numpy()})
    found = requests.ask_of(ends[1].receive())
    drawn = SamplingConfig(temperature=0.7, top_k=3, top_p=0.1 + 0.2)
    assert found == Ask(**{**vars(ask), "sampling": drawn})
    pieces = [
        Piece(row=RowId(0, 0, 1), tokens=[5, 6], logprobs=[-0.1, -1e-30], has_ended=False),
        Piece(row=RowId(0, 0, 2), tokens=[], logprobs=[], has_ended=True),
    ]
    for each in (pieces, []):
        ends[1].send(requests.Word.OK, {}, requests.arrays_of(each))
        assert requests.pieces_of(ends[0].receive().arrays) == each


def test_frames_arrive_in_order_whichever_may_go_later(ends: tuple[Channel, Channel]) -> None:
    large = np.arange(SMALL_BYTES, dtype=np.int64)
    how = [(0, True), (1, True), (SMALL_BYTES, True), (2, True), (3, False), (SMALL_BYTES, False), (4, False)]
    found: list[list[int]] = []
    reader = threading.Thread(
        target=lambda: found.extend(ends[1].receive().arrays["a"].tolist() for _ in range(len(how)))
    )
    reader.start()
    for length, later in how:
        ends[0].send(requests.Word.STEP, {}, {"a": large[:length]}, later=later)
    reader.join()
    assert [len(each) for each in found] == [length for length, _ in how]


def test_weights_arrive_whole_whatever_a_frame_holds(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "BUCKET_BYTES", 100)
    sent = {
        "a.weight": torch.randn(7, 11),
        "b.weight": torch.randn(33, 5).to(torch.bfloat16).T,
        "scalar": torch.tensor(3.0),
        "none": torch.empty(0, 4),
    }
    found: dict[str, torch.Tensor] = {}
    reader = threading.Thread(target=lambda: found.update(requests.received_weights(ends[1])))
    reader.start()
    requests.send_weights(ends[0], sent.items())
    reader.join()
    assert list(found) == list(sent)
    for name, tensor in sent.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    for tensor in sent.values():
        tensor.untyped_storage().resize_(0)  # as resharding does between generation and training


class Adapted:
    """A core without vLLM that stores its adapters."""

    cache_bytes = 5
    made: ClassVar[list[Adapted]] = []

    def __init__(self, settings: CoreSettings) -> None:
        self.settings, self.adapters = settings, list[tuple[int, float, dict[str, torch.Tensor]]]()
        self.made.append(self)

    def adapt(self, version: int, scale: float, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.adapters.append((version, scale, dict(weights)))


def test_a_server_hands_an_adapter_on_with_its_version_and_scale(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rillflow_parts.vllm.core", SimpleNamespace(Core=Adapted))
    client, own = ends
    answers = _Answers(own)
    client.send(requests.Word.START, {**asdict(SETTINGS), "threads": torch.get_num_threads()})
    assert answers.of(own.receive()) == ({"cache_bytes": 5}, {})
    client.send(requests.Word.ADAPT, {"version": 7, "scale": 0.5})
    requests.send_weights(client, [("lora_A", torch.ones(2))])
    assert answers.of(own.receive()) == ({}, {})
    ((version, scale, weights),) = Adapted.made[-1].adapters
    assert (version, scale, weights["lora_A"].tolist()) == (7, 0.5, [1.0, 1.0])


def test_a_server_says_what_it_cannot_do_or_with_what_it_ended() -> None:
    with pytest.raises(RolloutError, match="/no/such/python cannot start vLLM's server"):
        ServedCore(Path("/no/such/python"), SETTINGS)
    with pytest.raises(RolloutError, match="ended with exit code 0, in a request to start") as caught:
        ServedCore(Path("/bin/true"), SETTINGS)
    assert "it has no output" in caught.value.why
    with pytest.raises(RolloutError, match="ended with exit code 2") as caught:
        ServedCore(Path("/bin/sh"), SETTINGS)
    assert "its last output: " in caught.value.why


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_server_without_vllm_says_so() -> None:
    with pytest.raises(StartRefused, match="ModuleNotFoundError: No module named 'vllm'"):
        ServedCore(Path(sys.executable), SETTINGS)
