"""An engine whose process dies, in any request: no step is lost, and the run repairs itself."""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.flows.conftest import SUMS, Tiny

sys.path.insert(0, str(Path(__file__).parent))
from child_engine import plan

REST = f"""
steps = 5
{SUMS}[evaluate]
problems = 4
"""
REWARD = """
def reward(prompts, completions, **_):
    return [sum(letter < "5" for letter in text) / 3 for text in completions]
"""
PLACES = {
    "one": (),
    "threads": ("placement.pools={main=2}", "placement.backend=inline"),
    "processes": ("placement.pools={main=2}", "placement.backend=process"),
    "sharded": (
        "placement.pools={main=2}",
        "placement.backend=process",
        "placement.train_parallel={main={fsdp=2}}",
    ),
    "apart": (
        "placement.pools={main=2,answers=1}",
        'placement.roles={sampler="answers"}',
        "placement.backend=process",
    ),
    "ray": ("placement.pools={main=2}", "placement.backend=ray"),
}
REQUESTS = {"start": 0, "load": 2, "wake": 3, "add": 40, "step": 10, "sleep": 2}
"""Requests, and how many of each are answered before the engine dies: it dies in the third step or so."""


@pytest.fixture
def tiny(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    tiny.write(REST, REWARD)
    monkeypatch.setenv("CHILD", str(tiny.folder / "child.json"))
    return tiny


def assert_repaired(tiny: Tiny, *settings: str, engine: str = "ChildEngine", steps: int = 5) -> None:
    """Run with an engine that dies; check that no step ran twice, and that the weights are undisturbed."""
    own = (f"rollout.engine=child_engine:{engine}", 'algorithm.loss.correction="none"', *settings)
    began = time.monotonic()
    assert tiny.run("cut", *own) == 0
    assert time.monotonic() - began < 120, "a rank waited for a deadline"
    assert (tiny.folder / "child.json.death").exists(), "the engine did not die"
    assert len(tiny.lines("cut")) == steps
    plan(tiny.folder / "child.json", "nothing")
    whole = own if any("fsdp" in each for each in own) else (*own, "placement.backend=inline")
    assert tiny.run("whole", *whole) == 0


@pytest.mark.parametrize(
    ("place", "request_"),
    [
        ("one", "sleep"),
        ("one", "step"),
        ("processes", "sleep"),
        *(
            pytest.param(place, each, marks=pytest.mark.slow)
            for place in PLACES
            for each in REQUESTS
            if (place, each) not in {("one", "sleep"), ("one", "step"), ("processes", "sleep")}
        ),
    ],
)
def test_a_dead_engine_loses_no_step_and_the_run_repairs_itself(
    tiny: Tiny, place: str, request_: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine that dies on its way to sleep has nothing to free, so the step is finished."""
    if place == "ray" and find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    plan(tiny.folder / "child.json", request_, answers=REQUESTS[request_])
    assert_repaired(tiny, *PLACES[place])
    said = " ".join("".join(capsys.readouterr()).split())
    assert "has lost its engine: the child (process" in said, said
    assert f"in {request_}; all ranks start again from step" in said, said
    assert "(restart 1 of 3)" in said and "are repeated" not in said, said
    tiny.assert_same_weights("whole", "cut")
