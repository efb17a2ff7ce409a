"""An engine whose process dies, in any request: no step is lost, and the run repairs itself."""

from __future__ import annotations

import os
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from rillflow.cli.main import main
from rillflow.runs.reader import read_rollouts
from tests.flows.conftest import SUMS, Tiny
from tests.flows.warm import Command

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
    "ready first": (
        "placement.pools={main=1,answers=2}",
        'placement.roles={sampler="answers"}',
        "placement.backend=process",
        'schedule={mode="ahead",freshness=1}',
        "schedule.mode=ready_first",
    ),
    "ray": ("placement.pools={main=2}", "placement.backend=ray"),
}
REQUESTS = {"start": 0, "load": 2, "wake": 3, "add": 10, "step": 10, "sleep": 2}
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
    assert time.monotonic() - began < 500, "a rank waited for a deadline"
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
        pytest.param("processes", "sleep", marks=pytest.mark.slow),
        *(
            pytest.param(place, each, marks=pytest.mark.slow)
            for place in PLACES
            for each in REQUESTS
            if (place, each) not in {("one", "sleep"), ("one", "step"), ("processes", "sleep")}
            and not (place in ("apart", "ready first") and each == "sleep")  # it has its devices for itself
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
    assert "has lost its engine: the child (process" in said and "are repeated" not in said, said
    if place == "ready first":
        assert (request_ == "start") != ("a new process takes its place" in said), said
        return
    assert f"in {request_}; all ranks start again from step" in said and "(restart 1 of 3)" in said, said
    tiny.assert_same_weights("whole", "cut")


@pytest.mark.parametrize("how", ["kill", pytest.param("close", marks=pytest.mark.slow)])
def test_a_broken_pipe_of_an_engine_is_its_loss(
    tiny: Tiny, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here in the evaluation after the last step, whose checkpoint is not written yet."""
    plan(tiny.folder / "child.json", "wake", how=how, answers=6)
    assert_repaired(tiny, engine="CarelessEngine")
    said = " ".join("".join(capsys.readouterr()).split())
    assert "has lost its engine: its connection broke (BrokenPipeError: during wake)" in said, said
    assert "all ranks start again from step 5" in said and "are repeated" not in said, said
    tiny.assert_same_weights("whole", "cut")


def test_an_engine_that_always_dies_ends_the_run_with_its_first_loss(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(tiny.folder / "child.json", "load", always=True)
    assert tiny.run("cut", "rollout.engine=child_engine:ChildEngine", "run.restarts=2") == 1
    said = "".join(capsys.readouterr())
    assert said.count("all ranks start again from step 0") == 2 and "(restart 2 of 2)" in said
    assert "error: rank 0 of pool 'main' has lost its engine: the child" in said


@pytest.mark.slow
@pytest.mark.parametrize("place", ["processes", "sharded", "ray"])
def test_an_error_of_one_rank_before_a_collective_hangs_nobody(
    tiny: Tiny, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is no death, so the run ends; the other rank waited in the sum of gradients, and can save."""
    if place == "ray" and find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    plan(tiny.folder / "child.json", "sleep", how="refuse", answers=2)
    own = ("rollout.engine=child_engine:ChildEngine", 'algorithm.loss.correction="none"', *PLACES[place])
    began = time.monotonic()
    assert tiny.run("cut", *own) == 1
    assert time.monotonic() - began < 500, "a rank waited for a deadline"
    said = "".join(capsys.readouterr())
    assert "the child cannot sleep" in said and "step 2 is saved: run the same command to resume" in said, (
        said
    )
    assert tiny.run("cut", *own) == 0
    whole = own if place == "sharded" else (*own, "placement.backend=inline")
    assert tiny.run("whole", *whole) == 0
    tiny.assert_same_weights("whole", "cut")


@pytest.mark.slow
@pytest.mark.parametrize("hangs", ["start", "sleep"])
@pytest.mark.parametrize("place", ["one", "processes"])
def test_ctrl_c_ends_a_repair_that_hangs(tiny: Tiny, place: str, hangs: str) -> None:
    """At once while ranks start, and within ``run.stop_s`` in a step; the finished steps are saved."""
    plan(tiny.folder / "child.json", "step", answers=10, hangs=hangs)
    own = ("rollout.engine=child_engine:ChildEngine", "run.stop_s=2", *PLACES[place])
    words = [word for each in own for word in ("--set", each)]
    command = ["run", str(tiny.recipe), "--dir", str(tiny.folder / "cut"), *words]
    process = Command(command, tiny.folder / "said.txt")
    until = time.monotonic() + 120
    while not (tiny.folder / "child.json.hang").exists():
        assert process.poll() is None and time.monotonic() < until, process.said
        time.sleep(0.05)
    time.sleep(1.0)
    began = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    code = process.wait(60)
    assert time.monotonic() - began < 30, process.said
    assert code == 130, process.said
    assert tiny.steps_kept("cut")[-1] >= 2 and "are repeated" not in process.said, process.said


@pytest.mark.slow
@pytest.mark.parametrize("request_", ["add", "step"])
@pytest.mark.parametrize("kind", ["environment", "agent"])
def test_an_engine_dies_behind_environments_and_agents(
    tmp_path: Path,
    kind: str,
    request_: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No row is told that it failed: the step runs again."""
    pytest.importorskip("uvicorn", reason="the door is the extra `service`")
    monkeypatch.setenv("CHILD", str(tmp_path / "child.json"))
    examples = Path(__file__).parents[2] / "examples"
    recipe = examples / ("guess.toml" if kind == "environment" else "agent.toml")
    small = {
        "run.threads": 1,
        "policy.model.new.hidden": 32,
        "policy.model.new.layers": 1,
        "rollout.engine": "child_engine:ChildEngine",
        "algorithm.loss.correction": "none",
        "algorithm.steps": 3,
        "algorithm.prompts_per_step": 4,
        "algorithm.samples_per_prompt": 4,
        "evaluate.problems": 0,
    }
    words = [word for name, value in small.items() for word in ("--set", f"{name}={value}")]
    plan(tmp_path / "child.json", request_, answers=20 if request_ == "add" else 4)
    assert main(["run", str(recipe), "--dir", str(tmp_path / "cut"), *words]) == 0
    said = " ".join("".join(capsys.readouterr()).split())
    assert "has lost its engine" in said and "are repeated" not in said, said
    outcomes = [row.outcome for step in (1, 2, 3) for row in read_rollouts(tmp_path / "cut", step)]
    assert len(outcomes) == 48 and not [each for each in outcomes if each == "error"]
