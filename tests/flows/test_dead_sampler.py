"""A sampler that dies loses no step of the trainer; on processes every day, on Ray in the slow tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from torch import Tensor

from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.grpo import GRPOConfig
from rillflow.algorithms.steps import group_relative_advantages, publish, with_logprobs
from rillflow.cli.main import main
from rillflow.controller.flow import Flow
from rillflow.graph.handle import Handle
from rillflow.records.batch import Batch
from tests.flows.conftest import SAMPLER_ON_RAY, SUMS, Tiny

if find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)

DIES_IN = 3
REST = f"""
steps = 5
old_logprobs = "sampler"
{SUMS}[evaluate]
problems = 4
{SAMPLER_ON_RAY}"""


def die_once(tokens: Tensor, *, calls: str) -> float:
    """Kill the process that holds the rows, in one step of all runs that share a file of calls."""
    del tokens
    file = Path(calls)
    file.write_text(file.read_text() + "." if file.exists() else ".")
    if file.stat().st_size == DIES_IN or "ALWAYS" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def less(rewards: Tensor, *, deaths: float) -> Tensor:
    """Return the rewards, so that an update waits for the number of deaths, which is 0."""
    return rewards - deaths


def step(flow: Flow, prompts: Batch, config: GRPOConfig) -> Handle:
    """Run GRPO with a sampler that dies between update and publish; with ALWAYS set, before every update."""
    rollouts = flow.policy.generate(prompts, samples=config.samples_per_prompt)
    rewards = flow.reward.score(rollouts)
    if "ALWAYS" in os.environ:
        deaths = flow.number(die_once, rollouts, calls=os.environ["CALLS"])
        rewards = flow.compute(less, rewards, into="rewards", deaths=deaths)
    batches = with_logprobs(flow, rollouts, config)
    advantages = group_relative_advantages(flow, rewards, batches, config)
    report = flow.policy.update(*batches, advantages, loss=config.loss, passes=config)
    flow.number(die_once, rollouts, calls=os.environ["CALLS"])
    publish(flow, config, is_held=False)
    return report


ALGORITHM = Algorithm(config=GRPOConfig, step=step)


def command(tiny: Tiny, name: str, *settings: str) -> list[str]:
    """Return the words of this file's command line that run the recipe."""
    words = [word for setting in settings for word in ("--set", setting)]
    return ["run", str(tiny.recipe), "--dir", str(tiny.folder / name), *words]


@pytest.mark.slow
@pytest.mark.parametrize("freshness", [0, 1])
def test_the_last_whole_step_is_saved_and_the_run_goes_on(
    tiny: Tiny, freshness: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.write(REST)
    monkeypatch.setenv("CALLS", str(tiny.folder / "calls"))
    ahead, inline = f'schedule={{mode="ahead",freshness={freshness}}}', "placement.backend=inline"
    once = command(tiny, "cut", ahead, "run.restarts=0")
    code = main(once, algorithms=[ALGORITHM])
    said = "".join(capsys.readouterr())
    assert code == 1 and "rank 0 of pool 'answers' has died" in said, said
    kept = tiny.steps_kept("cut")[-1]
    assert kept == len(tiny.lines("cut")) and kept >= DIES_IN, said
    assert f"step {kept} is saved" in said
    assert main(command(tiny, "cut", ahead, inline), algorithms=[ALGORITHM]) == 0
    assert len(tiny.lines("cut")) == 5
    fresher = f"step {kept + 1} is sampled by the weights after step {kept}"
    assert (fresher in " ".join(capsys.readouterr().out.split())) == bool(freshness)
    main(["verify", str(tiny.folder / "cut")])
    assert "the ranks that held them died" in capsys.readouterr().out
    if not freshness:
        assert main(command(tiny, "whole", ahead, inline), algorithms=[ALGORITHM]) == 0
        tiny.assert_same_weights("whole", "cut")


@pytest.mark.parametrize("backend", ["process", pytest.param("ray", marks=pytest.mark.slow)])
def test_the_ranks_start_again_from_the_last_whole_step(
    tiny: Tiny, backend: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.write(REST)
    monkeypatch.setenv("CALLS", str(tiny.folder / "calls"))
    code = main(command(tiny, "again", f"placement.backend={backend}"), algorithms=[ALGORITHM])
    said = "".join(capsys.readouterr())
    assert code == 0, said
    assert "rank 0 of pool 'answers' has died" in said
    assert f"all ranks start again from step {DIES_IN} (restart 1 of 3)" in said
    assert main(command(tiny, "whole", "placement.backend=inline"), algorithms=[ALGORITHM]) == 0
    tiny.assert_same_weights("whole", "again")


@pytest.mark.slow
def test_a_rank_that_always_dies_ends_the_run_with_the_first_death(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every start dies before an update, so no restart brings a new checkpoint."""
    tiny.write(REST)
    monkeypatch.setenv("CALLS", str(tiny.folder / "calls"))
    monkeypatch.setenv("ALWAYS", "1")
    this = [sys.executable, "-m", "tests.flows.test_dead_sampler"]
    once = command(tiny, "never", "run.restarts=1")
    done = subprocess.run([*this, *once], capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 1 and "rank 0 of pool 'answers' has died" in said, said
    assert said.count("all ranks start again") == 1 and "(restart 1 of 1)" in said


if __name__ == "__main__":
    raise SystemExit(main(algorithms=[ALGORITHM]))
