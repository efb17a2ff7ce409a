"""Laws of vector environments: seeds, resets at the next step, both kinds of ends, for every provider."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.make import make_environment
from rillflow_classic.environments.vector import VectorEnvironment
from rillflow_classic.fragment import Array
from rillflow_classic.seeds import seed_of


def config(**settings: Any) -> EnvironmentSettings:
    return EnvironmentSettings(**{"id": "CartPole-v1", "provider": "gymnasium", "run": "inline", **settings})


def played(
    environment: VectorEnvironment, seed: int, steps: int, *, moves: int = 5
) -> list[dict[str, Array]]:
    """Play random actions; return copies of every row, the first observation alone."""
    chooser = np.random.default_rng(moves)
    rows = [{"observations": environment.reset(seed).copy()}]
    for _ in range(steps):
        space = environment.action_space
        if isinstance(space, gymnasium.spaces.Discrete):
            actions = chooser.integers(0, space.n, environment.num_slots)
        else:
            actions = chooser.uniform(-1, 1, (environment.num_slots, *space.shape)).astype(np.float32)
        stepped = environment.step(actions)
        rows.append(
            {
                "actions": actions,
                "observations": stepped.observations.copy(),
                "rewards": stepped.rewards.copy(),
                "terminated": stepped.terminated.copy(),
                "truncated": stepped.truncated.copy(),
                "episodes": np.array(
                    [(each.slot, each.length, each.total_reward) for each in stepped.episodes]
                ),
            }
        )
    return rows


def equal(one: list[dict[str, Array]], other: list[dict[str, Array]]) -> bool:
    return all(
        np.array_equal(first[name], second[name])
        for first, second in zip(one, other, strict=True)
        for name in first
    )


PROVIDERS = {
    "gymnasium": config(),
    "envpool": config(provider="envpool"),
    "parallel": config(id="MultiAgentCartPole-v0", provider="auto"),
}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_same_seed_gives_the_same_episodes(provider: str) -> None:
    environment = make_environment(PROVIDERS[provider], 8)
    first = played(environment, 3, 60)
    assert equal(first, played(environment, 3, 60))
    assert not equal(first, played(environment, 4, 60))
    assert equal(first, played(make_environment(PROVIDERS[provider], 8), 3, 60))
    environment.close()


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("limit", [None, 15])
def test_a_slot_resets_at_the_step_after_its_end(provider: str, limit: int | None) -> None:
    """Rewards, flags and episodes agree with each other, whoever steps."""
    settings = PROVIDERS[provider].model_copy(update={"time_limit": limit})
    environment = make_environment(settings, 8)
    rows, slots = played(environment, 1, 200)[1:], environment.num_slots
    after_end, lengths, found, told = np.zeros(slots, bool), np.zeros(slots, int), [], []
    for row in rows:
        assert not row["rewards"][after_end].any() and not row["terminated"][after_end].any()
        assert (row["rewards"][~after_end] == 1.0).all()
        lengths = np.where(after_end, 0, lengths + 1)
        ended = row["terminated"] | row["truncated"]
        found += [(slot, lengths[slot]) for slot in np.flatnonzero(ended & ~after_end)]
        told += [(int(slot), int(length)) for slot, length, total in row["episodes"] if total == length]
        after_end = ended
    assert found == told and len(found) > 10
    if limit is not None:
        assert max(length for _, length in found) == limit


def test_gymnasium_slots_are_plain_loops() -> None:
    environment = make_environment(config(time_limit=20), 3)
    rows = played(environment, 9, 300)
    kinds = set()
    for slot in range(3):
        plain = gymnasium.make("CartPole-v1", max_episode_steps=20)
        observation, _ = plain.reset(seed=seed_of(9, slot))
        assert np.array_equal(rows[0]["observations"][slot], observation)
        is_over = False
        for row in rows[1:]:
            if is_over:
                (observation, _), reward, ends = plain.reset(), 0.0, (False, False)
            else:
                observation, reward, *ends, _ = plain.step(int(row["actions"][slot]))
            assert np.array_equal(row["observations"][slot], observation)
            assert row["rewards"][slot] == reward
            assert (row["terminated"][slot], row["truncated"][slot]) == tuple(ends)
            kinds.add(tuple(ends))
            is_over = any(ends)
    assert {(True, False), (False, True), (False, False)} <= kinds


@pytest.mark.parametrize("provider", ["gymnasium", "envpool"])
def test_an_episode_that_truly_ends_at_its_limit_is_terminated(provider: str) -> None:
    """EnvPool alone reports it as truncated only, and a trainer would bootstrap from a fallen pole."""

    def lengths(limit: int | None) -> tuple[list[int], list[tuple[bool, bool]]]:
        environment = make_environment(config(provider=provider, time_limit=limit), 6)
        environment.reset(2)
        ends: dict[int, tuple[int, tuple[bool, bool]]] = {}
        for step in range(30):
            stepped = environment.step(np.ones(6, np.int64))
            for slot in np.flatnonzero(stepped.terminated | stepped.truncated):
                ends.setdefault(
                    int(slot), (step + 1, (bool(stepped.terminated[slot]), bool(stepped.truncated[slot])))
                )
        return [ends[slot][0] for slot in range(6)], [ends[slot][1] for slot in range(6)]

    fallen, _ = lengths(None)
    limit = sorted(fallen)[3]
    cut, kinds = lengths(limit)
    assert cut == [min(length, limit) for length in fallen]
    assert kinds == [(length <= limit, length >= limit) for length in fallen]
    assert {(True, True), (True, False)} <= set(kinds)


def test_envpool_slots_are_its_own_steps() -> None:
    """Rows are EnvPool's own, bit for bit, where no limit cuts."""
    import envpool

    rows = played(make_environment(config(provider="envpool"), 4), 7, 150)
    pool = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=4, seed=seed_of(7, 0))
    assert np.array_equal(pool.reset()[0], rows[0]["observations"])
    for row in rows[1:]:
        observations, rewards, terminated, truncated, _ = pool.step(row["actions"])
        assert np.array_equal(observations, row["observations"]) and np.array_equal(rewards, row["rewards"])
        assert np.array_equal(terminated, row["terminated"]) and np.array_equal(truncated, row["truncated"])


def test_envpool_cuts_where_its_own_limit_would() -> None:
    import envpool

    settings = config(id="Pendulum-v1", provider="envpool", time_limit=7)
    rows = played(make_environment(settings, 3), 5, 40)
    pool = envpool.make(
        "Pendulum-v1", env_type="gymnasium", num_envs=3, seed=seed_of(5, 0), max_episode_steps=7
    )
    assert np.array_equal(pool.reset()[0], rows[0]["observations"])
    for row in rows[1:]:
        observations, rewards, terminated, truncated, _ = pool.step(row["actions"])
        assert np.array_equal(observations, row["observations"]) and np.array_equal(rewards, row["rewards"])
        assert np.array_equal(terminated, row["terminated"]) and np.array_equal(truncated, row["truncated"])


def test_neighbouring_seeds_share_no_episodes() -> None:
    """EnvPool gives slot i its seed plus i, so slots of seeds s and s + 1 would be the same."""
    environment = make_environment(config(provider="envpool"), 8)
    first, second = environment.reset(1).copy(), environment.reset(2).copy()
    assert len({row.tobytes() for row in (*first, *second)}) == 16


def test_a_class_has_the_recipes_time_limit(tmp_path: Path) -> None:
    (tmp_path / "timeless.py").write_text(
        "import gymnasium\n"
        "import numpy as np\n"
        "class Timeless(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(-9, 9, (1,), np.float64)\n"
        "    action_space = gymnasium.spaces.Discrete(3)\n"
        "    def reset(self, seed=None, options=None):\n"
        "        return np.zeros(1), {}\n"
        "    def step(self, action):\n"
        "        return np.zeros(1), float(action), False, False, {}\n"
    )
    environment = make_environment(config(id=f"{tmp_path}/timeless.py:Timeless", time_limit=3), 3)
    assert environment.observation_space.dtype == np.float32
    rows = [environment.step(np.array([0, 1, 2])) for _ in range(2)]
    assert rows[0].rewards.tolist() == [0.0, 1.0, 2.0]
    last = environment.step(np.array([0, 1, 2]))
    assert last.truncated.all() and not last.terminated.any()


def test_a_package_may_register_its_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_games.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('MyGame-v3', 'gymnasium.envs.classic_control:CartPoleEnv', max_episode_steps=9)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    environment = make_environment(config(id="my_games:MyGame-v3", provider="auto"), 2)
    assert environment.observation_space.shape == (4,)
