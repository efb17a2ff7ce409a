"""A signal at any time ends a run of several processes with a checkpoint, a report and code 128 + N."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from tests.flows.conftest import SAMPLER_ON_RAY, SUMS, Tiny

if find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)

REST = f"""
steps = 12
{SUMS}[evaluate]
problems = 4
{SAMPLER_ON_RAY}"""
REWARD = """
import time
from pathlib import Path

def reward(prompts, completions, **_):
    if not Path(__file__).with_name("quick").exists():
        time.sleep(0.2)
    return [sum(letter < "5" for letter in text) / 3 for text in completions]
"""
LONG_S = 600.0


@pytest.fixture
def tiny(tiny: Tiny) -> Tiny:
    tiny.write(REST, REWARD)
    return tiny


def begun(tiny: Tiny, name: str, *settings: str) -> subprocess.Popen[str]:
    """Start a run in its own process group, as a scheduler does."""
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "rillflow.cli.main", "run", str(tiny.recipe), "--dir"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*command, str(tiny.folder / name), *words], start_new_session=True, **pipes)


def steps_of(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def wait_for_steps(run: Path, steps: int, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + LONG_S
    while steps_of(run) < steps:
        if process.poll() is not None:
            pytest.fail(process.communicate()[0])
        assert time.monotonic() < end, f"the run made no step in {LONG_S:g} s"
        time.sleep(0.02)


def assert_ended_and_resumes(tiny: Tiny, process: subprocess.Popen[str], number: int, *settings: str) -> None:
    """Check the exit code; after a step, its checkpoint and report; after a resume, the bits of ``whole``."""
    said, _ = process.communicate(timeout=LONG_S)
    assert process.returncode == 128 + number, said
    made, run = steps_of(tiny.folder / "cut"), tiny.folder / "cut"
    assert "run the same command" in said or "interrupted" in said, said
    if made:
        assert tiny.steps_kept("cut")[-1] == made, said
        assert (run / "report.html").is_file() and (run / "summary.json").is_file(), said
    assert not (run / "finished.json").exists()
    (tiny.folder / "quick").touch()
    assert tiny.run("cut", *settings) == 0
    assert tiny.run("whole", *settings) == 0
    tiny.assert_same("whole", "cut")


@pytest.mark.parametrize("backend", ["process", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_sigterm_to_the_process_group_ends_a_run_that_samples_ahead(tiny: Tiny, backend: str) -> None:
    process = begun(tiny, "cut", 'schedule={mode="ahead",freshness=1}', f"placement.backend={backend}")
    wait_for_steps(tiny.folder / "cut", 3, process)
    os.killpg(process.pid, signal.SIGTERM)
    ahead = ('schedule={mode="ahead",freshness=1}', "placement.backend=inline")
    assert_ended_and_resumes(tiny, process, signal.SIGTERM, *ahead)


@pytest.mark.slow
@pytest.mark.parametrize("freshness", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("draw", range(5))
def test_a_signal_at_a_random_moment_ends_a_run_on_ray(
    tiny: Tiny, freshness: int, number: signal.Signals, draw: int
) -> None:
    """The moments lie between the first imports and the last step: two of five in the start."""
    moment, ahead = (
        random.Random(f"{draw} {freshness} {number}"),
        f'schedule={{mode="ahead",freshness={freshness}}}',
    )
    process = begun(tiny, "cut", ahead)
    if draw < 2:
        time.sleep(moment.uniform(1.0, 12.0))
    else:
        wait_for_steps(tiny.folder / "cut", moment.randrange(1, 10), process)
        time.sleep(moment.uniform(0.0, 0.4))
    os.killpg(process.pid, number)
    assert_ended_and_resumes(tiny, process, number, ahead, "placement.backend=inline")


STUCK = """
import time
from pathlib import Path

def reward(prompts, completions, **_):
    while Path(__file__).with_name("stuck").exists():
        Path(__file__).with_name("hangs").touch()
        time.sleep(0.1)
    return [sum(letter < "5" for letter in text) / 3 for text in completions]
"""
STOP = ("run.stop_s=1", "run.checkpoint_minutes=0", "reward.timeout_s=900")


def hanging(tiny: Tiny, *settings: str) -> subprocess.Popen[str]:
    """Start a run of some steps whose open step hangs."""
    tiny.write(REST, STUCK)
    function = 'function = "scores.py:reward"'
    tiny.recipe.write_text(tiny.recipe.read_text().replace(function, f"{function}\nsandbox = false"))
    process = begun(tiny, "cut", *settings)
    wait_for_steps(tiny.folder / "cut", 3, process)
    (tiny.folder / "stuck").touch()
    made = -1
    while not (tiny.folder / "hangs").exists() or steps_of(tiny.folder / "cut") != made:
        made = steps_of(tiny.folder / "cut")
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.5)
    return process


def stopped(tiny: Tiny, process: subprocess.Popen[str]) -> str:
    """Stop a run that hangs; return its output. Check that none of its processes outlives it."""
    there = psutil.Process(process.pid).children(recursive=True)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGTERM)
    said, _ = process.communicate(timeout=LONG_S)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert time.monotonic() - began < 60, said  # some seconds on a quiet machine
    assert psutil.wait_procs(there, timeout=5)[1] == []
    (tiny.folder / "stuck").unlink()
    made = steps_of(tiny.folder / "cut")
    assert f"step {made + 1} did not end within 1 s (run.stop_s) and was abandoned" in said, said
    assert (tiny.folder / "cut/report.html").is_file(), said
    return said


@pytest.mark.slow
@pytest.mark.parametrize("freshness", [0, 1])
def test_a_step_that_hangs_is_abandoned_and_the_step_before_it_saved(tiny: Tiny, freshness: int) -> None:
    ahead = (*STOP, f'schedule={{mode="ahead",freshness={freshness}}}')
    said = stopped(tiny, hanging(tiny, *ahead))
    made = steps_of(tiny.folder / "cut")
    assert f"stopped after step {made}, as requested" in said, said
    assert tiny.steps_kept("cut")[-1] == made, said
    assert tiny.run("cut", *ahead, "placement.backend=inline") == 0
    assert tiny.run("whole", *ahead, "placement.backend=inline") == 0
    tiny.assert_same("whole", "cut")


@pytest.mark.parametrize("placed", ["inline", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_call_on_the_ranks_of_the_policy_ends_when_the_step_is_abandoned(tiny: Tiny, placed: str) -> None:
    """One rank has all roles; inline it is the main thread of the run."""
    one = (*STOP, f"placement.backend={placed}", "placement.pools={ main = 1 }", "placement.roles={}")
    said = stopped(tiny, hanging(tiny, *one))
    made = steps_of(tiny.folder / "cut")
    assert tiny.steps_kept("cut")[-1] == made, said
    assert tiny.run("cut", *one[:3], "placement.backend=inline") == 0
    assert tiny.run("whole", *one[:3], "placement.backend=inline") == 0
    tiny.assert_same("whole", "cut")
