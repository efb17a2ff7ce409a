"""vLLM as a server: its process, rows and weights when either end stops."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from rillflow.errors import RolloutError
from rillflow.rollout.engine import EngineLost
from rillflow_parts.vllm.requests import CoreSettings
from rillflow_parts.vllm.served_core import ServedCore

sys.path.insert(0, str(Path(__file__).parent))
from small_engines import SERVED, both, model, prompts

pytestmark = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed; `make test-vllm` has an environment with it"
)
BEGUN = """
import sys
sys.path.insert(0, sys.argv[1])
from small_engines import SERVED, engine, model, prompts
from rillflow.records.rollout import starts
from rillflow_parts.vllm.engine import VllmEngine
made = engine(VllmEngine, model(), **SERVED)
for start in starts(prompts(), 1):
    made.add(start)
print(made._core._server.pid, flush=True)
while True:
    made.step() if made.has_work else made.wake()
"""


def is_there(process: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(process: int, within_s: float = 30.0) -> bool:
    until = time.monotonic() + within_s
    while is_there(process) and time.monotonic() < until:
        time.sleep(0.05)
    return not is_there(process)


def test_a_server_that_dies_in_mid_generation_is_an_error_with_its_status() -> None:
    made, _ = both(model(), **SERVED)
    parts = made.generate_parts([prompts(1), prompts(9, first=1)], 4)
    next(parts)
    os.kill(made._core._server.pid, signal.SIGKILL)
    ended = r"vLLM's server \(process \d+, \S+\) ended by SIGKILL, in a request to"
    with pytest.raises(EngineLost, match=ended) as caught:
        list(parts)
    assert len(str(caught.value).splitlines()) == 3 and "Warning" not in str(caught.value)
    assert "dmesg" in caught.value.fix and "lower rollout.max_rows" in caught.value.fix
    with pytest.raises(EngineLost, match=f"{ended} wake"):
        made.wake()


def test_a_server_that_hangs_is_waited_for_no_longer_than_it_may_take() -> None:
    made, _ = both(model(), **SERVED)
    process = made._core._server.pid
    made._core._answer_s = 1.0
    os.kill(process, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(EngineLost, match=rf"{process}.* gave no answer for 1 s.*in a request to wake"):
        made.wake()
    assert ends(process)
    assert time.monotonic() - began < 60


def test_a_server_that_is_stopped_is_lost_after_seconds() -> None:
    made, _ = both(model(), **SERVED)
    process = made._core._server.pid
    os.kill(process, signal.SIGSTOP)
    with pytest.raises(EngineLost, match=rf"{process}.* was stopped for 5 s and then killed"):
        made.wake()
    assert ends(process)


def test_a_server_ends_with_whoever_has_it() -> None:
    made, _ = both(model(), **SERVED)
    process = made._core._server.pid
    assert is_there(process)
    del made, _
    gc.collect()
    assert ends(process)


def test_a_server_does_not_outlive_a_killed_process_that_had_it() -> None:
    command = [sys.executable, "-c", BEGUN, str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        process = int(parent.stdout.readline())
        assert is_there(process)
        parent.kill()
        assert ends(process)


def test_what_vllm_refuses_is_said_in_its_words() -> None:
    with pytest.raises(RolloutError, match="vLLM cannot start a Qwen2ForCausalLM") as caught:
        both(model(), max_rows=10**6, **SERVED)
    assert "Error: " in caught.value.why


def test_a_python_that_is_not_there_is_named() -> None:
    settings = CoreSettings(
        directory="", device="cpu", dtype="float32", context=8, max_rows=1, keep_cache=False
    )
    with pytest.raises(RolloutError, match="/no/such/python cannot start vLLM's server"):
        ServedCore(Path("/no/such/python"), settings)
    with pytest.raises(EngineLost, match="ended with exit code 0, in a request to start"):
        ServedCore(Path("/bin/true"), settings)


def test_weights_cross_in_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets are small, also for bfloat16: the largest weight needs hundreds."""
    monkeypatch.setattr("rillflow_parts.vllm.requests.BUCKET_BYTES", 1000)
    of = model()
    of.module.to(torch.bfloat16)
    served, _ = both(of, **SERVED)
    here, _ = both(of)
    found, expected = (each.generate(prompts(4), 2) for each in (served, here))
    assert found.ragged("tokens").lists() == expected.ragged("tokens").lists()
