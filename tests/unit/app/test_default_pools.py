"""The default pools of a recipe that samples ahead without naming pools, and the notes about them."""

from __future__ import annotations

from typing import Any

import pytest

from rillflow.app import machine
from rillflow.app.placement_needs import require_devices
from rillflow.app.recipe import load_recipe
from rillflow.app.resolved import Resolved
from rillflow.app.schedule_needs import pool_notes
from rillflow.controller.schedules.pools import pools_for
from rillflow.errors import ConfigError

NEW = {"hidden": 16, "layers": 1, "heads": 2, "context": 16, "alphabet": "0123456789+-="}
READY = "schedule.mode=ready_first"
APART = ("placement.pools={ train = 3, sample = 2 }", 'placement.roles={ sampler = "sample" }')


@pytest.fixture(autouse=True)
def eight_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cuda_devices", lambda: 8)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def recipe(*settings: str, name: str = "grpo") -> Resolved:
    sections: dict[str, Any] = {
        "rollout": {"max_tokens": 4},
        "policy": {"model": {"new": NEW}},
        "algorithm": {"name": name, "steps": 9},
    }
    return load_recipe(sections, settings)


@pytest.mark.parametrize(
    ("devices", "main", "answers"), [(0, 1, 1), (1, 1, 1), (2, 1, 1), (3, 2, 1), (5, 3, 2), (8, 4, 4)]
)
def test_trainer_and_sampler_share_the_devices(devices: int, main: int, answers: int) -> None:
    chosen = pools_for(devices)
    assert (chosen.pools, chosen.roles) == ({"main": main, "answers": answers}, {"sampler": "answers"})


def test_functions_that_score_take_no_device() -> None:
    chosen = pools_for(4, scorers=("reward", "cost"))
    assert chosen.pools == {"main": 2, "answers": 2, "scores": 1}
    assert chosen.roles == {"sampler": "answers", "reward": "scores", "cost": "scores"}


def test_a_bound_alone_gives_the_sampler_its_own_ranks() -> None:
    made = recipe('schedule={mode="ahead",freshness=2}')
    assert made.recipe.placement.pools == {"main": 4, "answers": 4} and made.recipe.placement.samples_apart
    (note,) = pool_notes(made)
    assert "placement.pools = {main = 4, answers = 4}" in note and "share 8 devices" in note
    assert "Set both to choose other pools" in note


@pytest.mark.parametrize("where", ["run.device=cpu", "placement.backend=inline", "placement.address=auto"])
def test_devices_that_the_pools_cannot_have_are_not_counted(where: str) -> None:
    made = recipe('schedule={mode="ahead",freshness=2}', where)
    assert made.recipe.placement.pools == {"main": 1, "answers": 1}
    assert "share" not in pool_notes(made)[0]


@pytest.mark.parametrize(
    ("settings", "scored"),
    [
        ((READY,), ["reward"]),
        ((READY, "reward.model=judge"), []),
        ((READY, 'reward.judge={ model = "judge" }'), []),
        ((), []),
    ],
)
def test_ready_first_scores_by_functions_beside_the_trainer(
    settings: tuple[str, ...], scored: list[str]
) -> None:
    made = recipe('schedule={mode="ahead",freshness=1}', *settings)
    assert [role for role, pool in made.recipe.placement.roles.items() if pool == "scores"] == scored
    assert ("scores" in made.recipe.placement.pools) is bool(scored)
    notes = pool_notes(made)
    assert len(notes) == (2 if scored else 1)
    if scored:
        assert "scores do not wait for updates" in notes[1]
        assert (
            'placement.pools = {main = 4, answers = 4}, placement.roles = {sampler = "answers"}' in notes[1]
        )


def test_named_pools_always_win() -> None:
    made = recipe('schedule={mode="ahead",freshness=2}', READY, *APART)
    assert made.recipe.placement.pools == {"train": 3, "sample": 2} and made.recipe.placement.roles == {
        "sampler": "sample"
    }
    assert pool_notes(made) == []


@pytest.mark.parametrize("named", ["placement.pools={ main = 2 }", "placement.roles={}"])
def test_named_ranks_that_take_turns_cannot_sample_ahead(named: str) -> None:
    with pytest.raises(ConfigError, match="the sampler shares its ranks with the policy"):
        recipe('schedule={mode="ahead",freshness=1}', named)


@pytest.mark.parametrize("name", ["grpo", "sft"])
def test_without_a_bound_there_is_one_pool(name: str) -> None:
    made = recipe(name=name)
    assert (
        made.recipe.placement.pools == {"main": 1}
        and made.recipe.placement.roles == {}
        and pool_notes(made) == []
    )


def test_ranks_without_a_device_are_refused_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    eight = recipe('schedule={mode="ahead",freshness=1}', READY)
    require_devices(eight)  # 4 + 4, and a pool of functions
    monkeypatch.setattr(machine, "cuda_devices", lambda: 1)
    require_devices(recipe())
    with pytest.raises(
        ConfigError, match=r"answers, main have 2 ranks, and this machine has 1 CUDA device\n"
    ) as told:
        require_devices(recipe('schedule={mode="ahead",freshness=1}'))
    assert 'schedule.mode = "in_order"' in told.value.fix
    with pytest.raises(
        ConfigError, match=r"answers, main have 8 ranks, and this machine has 1 CUDA device\n"
    ):
        require_devices(eight)
    for where in ("placement.backend=inline", "run.device=cpu", "placement.address=auto"):
        require_devices(recipe('schedule={mode="ahead",freshness=1}', where))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    require_devices(eight)
