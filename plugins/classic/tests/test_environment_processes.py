"""Environments in child processes: the same results as inline, faults, replacements, and their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rillflow.errors import ConfigError
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.make import make_environment
from rillflow_classic.environments.vector import EnvironmentFailure, VectorEnvironment
from rillflow_classic.fragment import Array

FAULTY = Path(__file__).with_name("faulty.py")
COUNTER = f"{FAULTY}:Counter"


def config(id: str = "CartPole-v1", run: str = "processes", **settings: Any) -> EnvironmentSettings:
    return EnvironmentSettings(
        **{"id": id, "run": run, "provider": "gymnasium", "processes": 2, "step_timeout_s": 20.0, **settings}
    )


def processes(environment: Any) -> list[int]:
    return [process.pid for process, _ in environment.children]


def rows(environment: VectorEnvironment, steps: int, highest: int = 2) -> list[Array]:
    chooser = np.random.default_rng(0)
    found = [environment.reset(11).copy()]
    for _ in range(steps):
        stepped = environment.step(chooser.integers(0, highest, environment.num_slots))
        found += [
            each.copy()
            for each in (stepped.observations, stepped.rewards, stepped.terminated, stepped.truncated)
        ]
        found.append(np.array([(e.slot, e.length, e.total_reward) for e in stepped.episodes]))
    environment.close()
    return found


@pytest.mark.parametrize(
    ("id", "slots"), [("CartPole-v1", 5), ("Pendulum-v1", 2), ("MultiAgentCartPole-v0", 2)]
)
def test_processes_give_the_bits_of_inline(id: str, slots: int) -> None:
    settings = {"id": id, "provider": "auto" if "Multi" in id else "gymnasium", "time_limit": 30}
    if id == "Pendulum-v1":
        chooser = np.random.default_rng(0)
        actions = chooser.normal(0, 3, (40, slots, 1)).astype(np.float32)
        found = []
        for run in ("inline", "processes"):
            environment = make_environment(config(run=run, **settings), slots)
            environment.reset(11)
            found.append([environment.step(each).observations.copy() for each in actions])
            environment.close()
        assert np.array_equal(*found)
        return
    one, other = (
        rows(make_environment(config(run=run, **settings), slots), 80) for run in ("inline", "processes")
    )
    assert all(np.array_equal(first, second) for first, second in zip(one, other, strict=True))


@pytest.mark.parametrize("fault", ["dies", "hangs", pytest.param("spins", marks=pytest.mark.slow)])
def test_a_lost_process_is_replaced_and_the_other_slots_go_on(fault: str, tmp_path: Path) -> None:
    arguments = {"fault": fault, "once": str(tmp_path / "done"), "length": 6}
    timeout = 20.0 if fault == "dies" else 1.5
    environment = make_environment(config(COUNTER, arguments=arguments, step_timeout_s=timeout), 4)
    environment.reset(0)
    seen = []
    for _ in range(10):
        stepped = environment.step(np.ones(4, np.int64))
        seen.append((stepped.observations.copy(), stepped.truncated.copy(), stepped.rewards.copy()))
    lost = seen[2][1].nonzero()[0].tolist()
    assert lost in ([0, 1], [2, 3]), "the slots of one process are truncated"
    others = [slot for slot in range(4) if slot not in lost]
    assert (seen[2][0][lost, 0] == 2).all() and (seen[2][2][lost] == 0).all(), "the last whole observation"
    assert (seen[3][0][lost, 0] == 0).all() and (seen[4][0][lost, 0] == 1).all(), "a new episode"
    assert [row[0][others[0], 0] for row in seen] == [1, 2, 3, 4, 5, 6, 0, 1, 2, 3]
    environment.close()


def test_a_process_killed_from_outside_is_replaced_until_the_limit() -> None:
    environment: Any = make_environment(config(COUNTER, restarts=1), 2)
    os.kill(processes(environment)[1], signal.SIGKILL)
    time.sleep(0.2)
    assert environment.step(np.zeros(2, np.int64)).truncated.tolist() == [False, True]
    assert environment.num_restarts == 1
    os.kill(processes(environment)[0], signal.SIGKILL)
    with pytest.raises(
        EnvironmentFailure, match=r"of slot 0 .* died with exit code -9 \(signal 9\)"
    ) as failure:
        for _ in range(2):
            environment.step(np.zeros(2, np.int64))
    assert "environment.restarts is 1" in failure.value.why
    environment.close()


def test_a_process_that_dies_in_its_reset_is_replaced() -> None:
    environment: Any = make_environment(config(COUNTER), 2)
    os.kill(processes(environment)[0], signal.SIGKILL)
    assert environment.reset(1)[:, 0].tolist() == [0, 0]
    first = environment.reset(1).copy()
    assert np.array_equal(first, make_environment(config(COUNTER, run="inline"), 2).reset(1))
    environment.close()


def test_the_error_of_a_child_is_the_error_of_the_run() -> None:
    environment = make_environment(config(COUNTER, arguments={"fault": "raises"}), 4)
    with pytest.raises(EnvironmentFailure, match=r"Counter.step of slot [02] raised ZeroDivisionError"):
        for _ in range(3):
            environment.step(np.zeros(4, np.int64))
    environment.close()


def test_an_environment_that_cannot_be_made_says_so() -> None:
    with pytest.raises(ConfigError, match="unexpected keyword argument 'wrong'"):
        make_environment(config(COUNTER, arguments={"wrong": 1}), 2)


def test_children_end_with_their_parent_even_if_an_environment_hangs(tmp_path: Path) -> None:
    program = (
        "import numpy as np, os, sys\n"
        "from rillflow_classic.environments.config import EnvironmentSettings\n"
        "from rillflow_classic.environments.make import make_environment\n"
        f"settings = EnvironmentSettings(id={COUNTER!r}, run='processes', processes=2, "
        "step_timeout_s=600.0,\n"
        "    arguments={'fault': 'spins', 'at': 1})\n"
        "environment = make_environment(settings, 2)\n"
        "print(*[process.pid for process, _ in environment.children], flush=True)\n"
        "environment.step(np.zeros(2, np.int64))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    children = [int(each) for each in parent.stdout.readline().split()]
    assert len(children) == 2
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{each}/stat").exists() and _is_alive(each) for each in children):
        assert time.monotonic() < deadline, "a child outlived its parent"
        time.sleep(0.1)
    parent.stdout.close()


def _is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
