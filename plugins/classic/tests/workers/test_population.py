"""Populations: who copies whom, what is copied, what is changed, and the same again after a resume."""

from __future__ import annotations

import math
import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import rillflow
from rillflow.cli.main import main
from rillflow.config.load import read_toml
from rillflow.errors import ConfigError
from rillflow.runs import layout
from rillflow.runs.json_lines import read_lines
from rillflow_classic.checkpointed import split
from rillflow_classic.recipe import LoadedClassicRecipe
from rillflow_classic.workers.population import (
    PopulationSystem,
    drawn_values,
    exchanges,
    explored,
    open_population,
)

TOML = """
kind = "classic"
[environment]
id = "CartPole-v1"
provider = "gymnasium"
run = "inline"
[network]
hidden = [8]
[algorithm]
name = "ppo"
steps = 6
[workers]
slots = 4
steps = 32
[population]
members = 4
every = 2
perturb = { lr = [1e-5, 1e-2], epochs = [1, 8] }
[evaluate]
every = 3
episodes = 4
video = false
[run]
checkpoint_every = 3
threads = 1
"""
BOUNDS = np.array([(1.0, 8.0), (1e-5, 1e-2)])
"""Of the settings epochs and lr."""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(TOML)
    return tmp_path / "small.toml"


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_the_worst_copy_the_best() -> None:
    scores = np.array([5.0, 1.0, 9.0, 3.0, 8.0, 2.0, 7.0, 4.0])
    found = [exchanges(scores, 0.25, generator(seed)) for seed in range(20)]
    assert all(once.keys() == {1, 5} for once in found)
    copied = [each for once in found for each in once.values()]
    assert set(copied) == {2, 4}, "each of the best share is copied, chosen at random"
    assert exchanges(scores, 0.25, generator(3)) == exchanges(scores, 0.25, generator(3))


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0], {}),
        ([math.nan, math.nan, math.nan], {}),
        ([math.nan, 2.0, 1.0], {2: 1}),
        ([1.0, 2.0], {0: 1}),
    ],
)
def test_nobody_copies_an_equal_or_an_unknown_one(scores: list[float], expected: dict[int, int]) -> None:
    assert exchanges(np.array(scores), 0.25, generator()) == expected


def test_settings_are_drawn_and_changed_within_their_bounds() -> None:
    drawn = np.stack([drawn_values(BOUNDS, generator(seed)) for seed in range(200)])
    logs = np.log10(drawn[:, 1])
    assert -5 <= logs.min() < -4.9 and -2.1 < logs.max() <= -2 and abs(logs.mean() + 3.5) < 0.2
    values = np.array([4.0, 1e-3])
    ratios = np.stack([explored(values, BOUNDS, generator(seed)) / values for seed in range(9)])
    assert set(ratios.round(6).flatten().tolist()) == {0.8, 1.2}
    narrow = np.array([(1.0, 1.0), (1e-2, 1e-2)])
    assert explored(narrow[:, 0], narrow, generator()).tolist() == [1.0, 1e-2]


def opened(recipe: Path, stack: ExitStack, place: str = "inline") -> PopulationSystem:
    from rillflow_classic.build import Parts

    data = read_toml(recipe)
    data["workers"]["place"] = place
    loaded = LoadedClassicRecipe.of(recipe, data, [])
    assert loaded.recipe.population is not None
    return open_population(Parts.of(loaded), loaded.recipe.population, stack)


def tensors(system: PopulationSystem, index: int) -> dict[str, Any]:
    states = system.members.call(index, "states", ["policy"]).read()
    return {name: value.tolist() for name, value in split(states["policy"])[0].items()}


def test_a_worse_member_gets_weights_moments_and_changed_settings_of_a_better_one(recipe: Path) -> None:
    with ExitStack() as stack:
        system = opened(recipe, stack)
        system.reset(1)
        system.step()
        assert system.values[0].tolist() == [4.0, 2.5e-4], "the recipe's own"
        assert len(set(system.values[:, 1].tolist())) == 4
        before = [tensors(system, index) for index in range(4)]
        assert before[0] != before[1] and any("exp_avg" in name for name in before[0])
        system.returns = np.array([(8.0, 2.0), (3.0, 1.0), (2.0, 1.0), (1.0, 1.0)])
        values = system.values.copy()
        assert system.exchange() == {3: 0}
        assert system.scores.tolist() == [4.0, 3.0, 2.0, 4.0]
        after = [tensors(system, index) for index in range(4)]
        assert after == [*before[:3], before[0]]
        assert np.array_equal(system.values[:3], values[:3])
        assert set((system.values[3] / values[0]).round(6).tolist()) <= {0.8, 1.2}
        system.step()
        assert tensors(system, 3) != tensors(system, 0), "it goes its own way"


def test_the_run_evaluates_the_best_member(recipe: Path) -> None:
    with ExitStack() as stack:
        system = opened(recipe, stack)
        system.reset(1)
        system.step()
        system.scores = np.array([1.0, 1.0, 5.0, 2.0])
        assert system.best == 2
        learner = system.learners["policy"]
        found = {name: value.tolist() for name, value in split(learner.state())[0].items()}
        assert found == tensors(system, 2) != tensors(system, 0)


def content(run: Path) -> list[Any]:
    found = [line.data["metrics"] for line in read_lines(run / layout.METRICS).lines]
    return [
        {k: v for k, v in each.items() if k.startswith(("population", "episode", "policy"))} for each in found
    ]


def weights(run: Path, step: int) -> dict[str, Any]:
    folder = run / layout.CHECKPOINTS / f"step-{step:06d}"
    files = {file.name: load_file(file) for file in sorted(folder.glob("*.safetensors"))}
    assert {"policy.safetensors", "population.safetensors"} <= files.keys()
    return {f"{file}:{name}": each.tolist() for file, found in files.items() for name, each in found.items()}


def test_a_resumed_population_equals_one_that_was_not_stopped(recipe: Path) -> None:
    whole = rillflow.train(recipe, dir="whole", quiet=True)
    assert content(whole.path)[1]["population/exchanges/sum"]["sum"] >= 1, "something was exchanged"

    def stop(result: Any) -> None:
        if result.step == 4:
            result.run.stop()

    rillflow.train(recipe, dir="part", quiet=True, callbacks=[stop])
    part = rillflow.train(recipe, dir="part", quiet=True)
    assert part.is_finished and content(part.path) == content(whole.path)
    assert weights(part.path, 6) == weights(whole.path, 6)


@pytest.mark.slow
def test_processes_have_the_bits_of_inline(recipe: Path) -> None:
    for place in ("inline", "process"):
        assert main(["run", str(recipe), "--dir", place, "--set", f"workers.place={place}"]) == 0
    assert content(Path("inline")) == content(Path("process"))
    assert weights(Path("inline"), 6) == weights(Path("process"), 6)


@pytest.mark.slow
def test_a_killed_member_goes_on_from_the_best_of_the_others(recipe: Path) -> None:
    recipe.write_text(TOML.replace("members = 4", "members = 2").replace("every = 2", "every = 50"))
    with ExitStack() as stack:
        system = opened(recipe, stack, "process")
        system.reset(1)
        system.step()
        kept = tensors(system, 0)
        pids = [system.members.call(index, _pid).read() for index in range(2)]
        os.kill(pids[1], signal.SIGKILL)
        metrics = system.step()
        assert system.members.call(1, _pid).read() not in pids
        assert system.members.call(0, _pid).read() == pids[0]
        assert tensors(system, 1) != kept and metrics["policy/loss/mean"]
        system.step()


def _pid(member: Any) -> int:
    return os.getpid()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"population.perturb": {"lrr": [1e-5, 1e-2]}}, ["names 'lrr'", "did you mean 'lr'?"]),
        ({"population.perturb": {"name": [1, 2]}}, ["names 'name'"]),
        ({"population.perturb.lr": [1e-2, 1e-5]}, ["population.perturb.lr is [0.01, 1e-05]"]),
        (
            {"population.perturb.gamma": [0.5, 2.0]},
            ["population.perturb.gamma is [0.5, 2.0], which reaches 2", "at most 1"],
        ),
        ({"population.members": 1}, ["population.members"]),
        (
            {"workers.transport": "shared_memory"},
            ['workers.transport is "shared_memory" and population.members is 4'],
        ),
    ],
)
def test_settings_that_cannot_be(given: dict[str, Any], words: list[str], recipe: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        rillflow.train(recipe, settings=given, quiet=True)
    for word in words:
        assert word in str(caught.value)
