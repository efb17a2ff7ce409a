"""Killed runs: after the same command again, a killed run has the bits of one that was not disturbed."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from rillflow.cli.main import main
from rillflow.runs import layout
from rillflow.runs.json_lines import read_lines

RECIPES = Path(__file__).parents[3] / "recipes/classic"
SHORT: dict[str, dict[str, Any]] = {
    "ppo_cartpole": {"run.checkpoint_every": 6, "algorithm.steps": 16},
    "a2c_cartpole": {"run.checkpoint_every": 20, "algorithm.steps": 60},
    "dqn_cartpole": {"run.checkpoint_every": 5, "algorithm.steps": 16, "algorithm.updates": 8},
    "sac_pendulum": {"run.checkpoint_every": 10, "algorithm.steps": 40, "algorithm.updates": 16},
    "maml_point": {"run.checkpoint_every": 3, "algorithm.steps": 9, "workers.slots": 8},
    "mb_mpo_point": {"run.checkpoint_every": 2, "algorithm.steps": 6, "algorithm.updates": 2},
    "two_trainers": {"run.checkpoint_every": 5, "algorithm.steps": 16, "algorithm.dqn.updates": 8},
    "ppo_population": {
        "run.checkpoint_every": 4,
        "algorithm.steps": 10,
        "population.every": 2,
        "workers.steps": 32,
        "run.threads": 1,
    },
}
"""Recipes whose plans take fragments in rounds, and the settings that make them short."""


def words(recipe: str, run: Path, more: dict[str, Any]) -> list[str]:
    """Return the words of a command that runs a short form of a recipe in a directory."""
    given = {"evaluate.video": "false", "evaluate.episodes": 0, **SHORT.get(recipe, {}), **more}
    changed = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    return ["run", str(RECIPES / recipe / "run.toml"), "--dir", str(run), *changed]


def killed(command: list[str], after: int) -> None:
    """Start a run, and kill it without warning once it has told of a step."""
    process = subprocess.Popen([sys.executable, "-m", "rillflow.cli.main", *command], stdout=subprocess.PIPE)
    assert process.stdout is not None
    for line in process.stdout:
        if f" {after}/".encode() in line:
            process.send_signal(signal.SIGKILL)
            break
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL


def final(run: Path) -> dict[str, str]:
    """Return the digest of every file of the last checkpoint, and of the metrics and evaluations."""
    step = max(layout.kept_steps(run / layout.CHECKPOINTS))
    folder = run / layout.CHECKPOINTS / f"step-{step:06d}"
    files = [*folder.glob("*.safetensors"), folder / "state.json"]
    found = {f"step {step}: {file.name}": hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    for name in (layout.METRICS, layout.EVALUATIONS) if (run / layout.EVALUATIONS).exists() else ():
        lines = [dict(line.data) for line in read_lines(run / name).lines]
        for each in lines:
            each.pop("time_s")
        found[name] = hashlib.sha256(json.dumps(lines).encode()).hexdigest()
    return found


PROCESSES = {"workers.place": "process", "workers.actors": 2}


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        *(
            pytest.param(name, {}, marks=() if name == "ppo_cartpole" else pytest.mark.slow, id=name)
            for name in SHORT
        ),
        pytest.param("ppo_cartpole", PROCESSES, marks=pytest.mark.slow, id="ppo_cartpole in processes"),
    ],
)
def test_a_killed_run_ends_with_the_bits_of_an_undisturbed_one(
    recipe: str, more: dict[str, Any], tmp_path: Path
) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert main([*words(recipe, whole, more), "--quiet"]) == 0
    every = int(SHORT[recipe]["run.checkpoint_every"])
    killed(words(recipe, part, more), every + max(1, every // 2))
    assert not (part / layout.FINISHED).exists()
    kept = layout.kept_steps(part / layout.CHECKPOINTS)
    assert kept and max(kept) < SHORT[recipe]["algorithm.steps"], "it is killed between two checkpoints"
    assert main([*words(recipe, part, more), "--quiet"]) == 0
    assert final(part) == final(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "more", "is_exact"),
    [
        ("ppo_cartpole", {}, True),
        ("a3c_cartpole", {"run.checkpoint_every": 6, "algorithm.steps": 16}, False),
    ],
)
def test_a_run_whose_fork_server_is_killed_repairs_itself(
    recipe: str, more: dict[str, Any], is_exact: bool, tmp_path: Path
) -> None:
    """A plan in rounds has the bits of an undisturbed run.

    Another one saves its last step, unless gradients of the next one have changed the weights already.
    """
    settings = {**PROCESSES, **more}
    process = subprocess.Popen(
        [sys.executable, "-m", "rillflow.cli.main", *words(recipe, tmp_path / "part", settings)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    said = list[str]()
    for line in process.stdout:
        said.append(line)
        if " 9/" in line and len(said) < 12:
            children = psutil.Process(process.pid).children()
            (server,) = (each for each in children if "fork_server" in " ".join(each.cmdline()))
            server.kill()
    assert process.wait() == 0, "".join(said)
    assert any("all ranks start again from step" in line for line in said), "".join(said)
    if is_exact:
        assert main([*words(recipe, tmp_path / "whole", settings), "--quiet"]) == 0
        assert final(tmp_path / "part") == final(tmp_path / "whole")
    else:
        (begun,) = re.findall(r"all ranks start again from step (\d+)", "".join(said))
        assert more["run.checkpoint_every"] <= int(begun) < more["algorithm.steps"], "".join(said)
