"""Settings of workers in a recipe: each reaches the workers, and a run with it makes its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rillflow
from rillflow.errors import ConfigError
from rillflow.runs.reader import read_every_evaluation, read_metrics

TOML = """
kind = "classic"

[environment]
id = "CartPole-v1"

[workers]
actors = 2
slots = 4
steps = 32

[algorithm]
name = "ppo"
steps = 3
minibatches = 2

[evaluate]
episodes = 0
video = false

[run]
dir = "run"
threads = 1
"""
IMPALA = {
    "algorithm.name": "impala",
    "algorithm.minibatches": 1,
    "algorithm.epochs": 1,
    "algorithm.updates": 4,
}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(TOML)
    return path


def metrics(recipe: Path, **given: Any) -> list[Any]:
    settings = {name.replace("__", "."): value for name, value in given.items()}
    result = rillflow.train(recipe, settings=settings, quiet=True, fresh=True)
    return [record.metrics for record in read_metrics(result.path)]


@pytest.mark.parametrize("place", ["inline", pytest.param("process", marks=pytest.mark.slow)])
@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_buffer_workers_give_ppo_the_values_that_it_has(recipe: Path, transport: str, place: str) -> None:
    """Fragments of a round do not grow old, so fresh values are those of the actor, up to rounding."""
    given = {"workers__transport": transport, "workers__place": place}
    plain = metrics(recipe, **given)
    fresh = metrics(recipe, **given, workers__buffer_workers=2)
    assert [each["policy/loss/mean"].value for each in fresh] == pytest.approx(
        [each["policy/loss/mean"].value for each in plain], abs=1e-4
    )


def test_queue_settings_reach_the_trainer(recipe: Path) -> None:
    given = {**IMPALA, "workers.transport": "shared_memory", "workers.depth": 3, "workers.prefetch": False}
    given |= {"workers.reuses": 2, "workers.batch": 2, "workers.max_lag": 4}
    found = metrics(recipe, **{name.replace(".", "__"): each for name, each in given.items()})
    assert len(found) == 3


@pytest.mark.parametrize("workers", [{}, {"workers__transport": "shared_memory"}])
def test_versions_are_judged_by_their_training_episodes(recipe: Path, workers: dict[str, Any]) -> None:
    metrics(recipe, evaluate__from_training=True, evaluate__episodes=2, workers__steps=64, **workers)
    found = [each for each in read_every_evaluation(Path("run")) if each.set == "training"]
    versions = [each.more["version"] for each in found]
    assert versions and versions == sorted(set(versions)) and set(versions) <= {0, 1, 2}
    assert all(each.count == 2 and each.more["policy"] == "policy" for each in found)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"workers.buffer_workers": 1}, "workers.transport is .calls. and workers.buffer_workers is 1"),
        ({"evaluate.from_training": True, "evaluate.episodes": 0}, "an evaluation has 0 episodes"),
        ({"workers.depth": 0}, "workers.depth"),
    ],
)
def test_settings_that_cannot_be(given: dict[str, Any], words: str, recipe: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        rillflow.train(recipe, settings=given, quiet=True)
