"""placement-blind, backend-blind: placement and backend change no number."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.runs import layout
from rillflow.runs.reader import read_rollouts

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "ranks"))
from placements import LIMIT, ROLES, Ran, cluster, partitions, ran, settings, together

PARTITIONS = list(partitions(ROLES))
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
RECIPE = """
[run]
seed = 3
threads = 1
[task]
source = "arithmetic"
digits = 1
operators = "+"
size = 80
held_out = 10
[policy]
lr = 1e-4
model.new = { hidden = 32, layers = 1, heads = 2, kv_heads = 1, context = 16, alphabet = "0123456789+=" }
[rollout]
max_rows = 32
max_tokens = 4
deterministic = true
[warm_start]
steps = 5
prompts_per_step = 33
lr = 3e-3
[algorithm]
name = "grpo"
steps = 3
prompts_per_step = 5
samples_per_prompt = 3
epochs = 2
minibatches = 2
loss.kl = 0.01
[reward]
function = "reward.py:small"
"""
REWARD = """
def small(prompts, completions, **columns):
    return [sum(letter < "5" for letter in text) / 4 for text in completions]
"""
ONE_POOL = {"pools": {"main": 1}}
APART = {
    "backend": "inline",
    "pools": {"a": 1, "b": 1, "c": 1},
    "roles": {"policy": "a", "reference": "b", "reward": "c"},
}


def grpo(folder: Path, placement: dict[str, Any]) -> tuple[list[Any], list[dict[str, float]]]:
    """Return sampled rows and every step's losses."""
    folder.mkdir()
    (folder / "run.toml").write_text(RECIPE)
    (folder / "reward.py").write_text(REWARD)
    settings = [f"run.dir={json.dumps(str(folder / 'run'))}"]
    for name, value in placement.items():
        entries = value.items() if isinstance(value, dict) else ()
        settings += [f"placement.{name}.{key}={json.dumps(entry)}" for key, entry in entries]
        settings += [] if isinstance(value, dict) else [f"placement.{name}={json.dumps(value)}"]
    loaded = load_recipe(folder / "run.toml", settings)
    launch(loaded, quiet=True)
    rollouts = [
        (row.row.prompt, row.row.sample, row.tokens, row.logprobs)
        for step in layout.rollout_files(folder / "run")
        for row in read_rollouts(folder / "run", step)
    ]
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [
        {name: value["mean"] for name, value in json.loads(line)["metrics"].items() if "loss/mean" in name}
        for line in lines
    ]
    return rollouts, losses


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[dict[str, float]]]:
    return grpo(tmp_path_factory.mktemp("alone") / "tiny", ONE_POOL)


def test_roles_in_pools_of_their_own(tmp_path: Path, alone: tuple[Any, Any]) -> None:
    assert grpo(tmp_path / "apart", APART) == alone


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_data_parallel_ranks_inline(ranks: int, tmp_path: Path, alone: tuple[Any, Any]) -> None:
    """Rows that the ranks do not divide: rollouts are the same, losses within 1e-5 of each other.

    Steps are few: Adam divides a gradient by its own size, so rounding grows from step to step.
    """
    rollouts, losses = grpo(tmp_path / "ranks", {"backend": "inline", "pools": {"main": ranks}})
    assert any(loss.get("policy/loss/mean") for loss in losses), "something was learned"
    assert [row[:3] for row in rollouts] == [row[:3] for row in alone[0]]
    for found, expected in zip(losses, alone[1], strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.fixture(scope="module")
def one_pool(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Ran]:
    """Return PPO runs with all roles in one pool, inline, by the number of ranks."""
    folder = tmp_path_factory.mktemp("one-pool")
    return {ranks: together(ranks, folder / str(ranks)) for ranks in (1, 2)}


def test_there_are_fifteen_ways() -> None:
    found = [frozenset(frozenset(held) for held in partition) for partition in PARTITIONS]
    assert len(set(found)) == len(found) == 15
    assert all(
        sorted(role for held in partition for role in held) == sorted(ROLES) for partition in PARTITIONS
    )


def require_alike(found: Ran, ranks: int, one_pool: dict[int, Ran]) -> None:
    """Check for the bits of as many ranks in one pool, and the tokens and rounded losses of one rank."""
    assert found == one_pool[ranks]
    assert found.tokens == one_pool[1].tokens
    assert found.far_from(one_pool[1]) <= LIMIT


def test_the_runs_compared_learn_something(one_pool: dict[int, Ran]) -> None:
    """Losses are not 0, advantages differ, and the policy moves away from the reference."""
    first, last = one_pool[1].metrics
    assert all(abs(loss) > 1e-4 for loss in one_pool[1].losses)
    assert first["policy/loss/mean"] != last["policy/loss/mean"]
    assert last["flow/mean_divergence/mean"]["mean"] > 0
    assert {row["versions"][-1] for row in one_pool[1].rollouts} == {0, 1}


@pytest.mark.parametrize(("number", "ranks"), [(6, 1), (9, 2)])
def test_placement_blind_in_some_placements_of_ppo(
    number: int, ranks: int, tmp_path: Path, one_pool: dict[int, Ran]
) -> None:
    placement = settings(PARTITIONS[number], ranks, "inline")
    require_alike(ran(tmp_path / "run", placement), ranks, one_pool)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("number", range(len(PARTITIONS)))
def test_placement_blind_in_every_placement_of_ppo(
    number: int, ranks: int, tmp_path: Path, one_pool: dict[int, Ran]
) -> None:
    placement = settings(PARTITIONS[number], ranks, "inline")
    require_alike(ran(tmp_path / "run", placement), ranks, one_pool)


def test_grpo_on_local_processes_has_the_bits_of_inline(tmp_path: Path) -> None:
    two = {"pools": {"main": 2}}
    inline = grpo(tmp_path / "inline", {"backend": "inline", **two})
    assert any(loss.get("policy/loss/mean") for loss in inline[1]), "something was learned"
    assert grpo(tmp_path / "process", {"backend": "process", **two}) == inline


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["process", pytest.param("ray", marks=needs_ray)])
def test_backend_blind_ppo_has_the_bits_of_inline(backend: str, tmp_path: Path) -> None:
    """Pools have unequal sizes, so every batch is split anew between them."""
    pools = ["placement.pools.a=2", "placement.pools.b=1"]
    roles = ['placement.roles.critic="b"', 'placement.roles.reference="b"', 'placement.roles.reward="b"']
    inline = ran(tmp_path / "inline", ['placement.backend="inline"', *pools, *roles])
    assert ran(tmp_path / backend, [f'placement.backend="{backend}"', *pools, *roles]) == inline


@pytest.fixture(scope="module")
def one_cluster() -> Iterator[None]:
    with cluster("ray", ranks=len(ROLES)):
        yield


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(PARTITIONS)))
def test_ppo_in_every_placement_on_ray(
    number: int, tmp_path: Path, one_pool: dict[int, Ran], one_cluster: None
) -> None:
    require_alike(ran(tmp_path / "run", settings(PARTITIONS[number], 1, "ray")), 1, one_pool)
