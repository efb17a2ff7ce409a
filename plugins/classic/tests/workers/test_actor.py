"""Actor: fragments hold every step once, with resets, states, versions and policies in their places."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

from rillflow.errors import ConfigError
from rillflow_classic.fragment import Fragment
from rillflow_classic.workers.actor import Actor

sys.path.insert(0, str(Path(__file__).parent))
from counting import AffinePolicy, CountingEnvironment


def sampled(actor: Actor) -> Fragment:
    fragment = actor.sample()
    assert isinstance(fragment, Fragment)
    return fragment


def test_fragments_are_one_history_cut_into_pieces() -> None:
    long = sampled(Actor([CountingEnvironment()], {"policy": AffinePolicy()}, 12))
    actor = Actor([CountingEnvironment()], {"policy": AffinePolicy()}, 4)
    parts = [sampled(actor) for _ in range(3)]
    for name in ("actions", "rewards", "terminated", "truncated", "valid"):
        joined = np.concatenate([getattr(each, name) for each in parts])
        assert np.array_equal(joined, getattr(long, name)), name
    assert np.array_equal(np.concatenate([each.observations[:-1] for each in parts]), long.observations[:-1])
    assert all(np.array_equal(a.observations[-1], b.observations[0]) for a, b in itertools.pairwise(parts))
    assert [e for each in parts for e in each.episodes] == list(long.episodes)


def test_a_row_after_an_end_is_a_reset_and_no_step() -> None:
    fragment = sampled(Actor([CountingEnvironment(1, length=3)], {"policy": AffinePolicy()}, 8))
    assert fragment.observations[:, 0, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert fragment.ended[:, 0].tolist() == [False, False, True, False, False, False, True, False]
    assert fragment.valid[:, 0].tolist() == [True, True, True, False, True, True, True, False]
    assert fragment.num_steps == 6
    assert [each.length for each in fragment.episodes] == [3, 3]
    assert fragment.terminated.sum() == fragment.truncated.sum() == 1


def test_a_fragment_does_not_change_when_the_actor_goes_on() -> None:
    actor = Actor([CountingEnvironment()], {"policy": AffinePolicy()}, 5)
    first = sampled(actor)
    copies = [array.copy() for array in (first.observations, first.actions, first.valid, first.rewards)]
    sampled(actor)
    sampled(actor)
    now = (first.observations, first.actions, first.valid, first.rewards)
    assert all(np.array_equal(a, b) for a, b in zip(now, copies, strict=True))


def test_a_ring_gives_the_slots_of_all_its_environments() -> None:
    ring = [CountingEnvironment(2), CountingEnvironment(2)]
    fragment = sampled(Actor(ring, {"policy": AffinePolicy()}, 6))
    assert fragment.observations.shape == (7, 4, 3)
    assert ring[0].seeds != ring[1].seeds


@pytest.mark.parametrize("steps", [3, 5, 40])
def test_recurrent_state_restarts_after_the_reset_row(steps: int) -> None:
    actor = Actor([CountingEnvironment(1, length=3)], {"policy": AffinePolicy(is_recurrent=True)}, steps)
    parts = [sampled(actor) for _ in range(max(1, 40 // steps))]
    calls = np.concatenate([each.outputs["calls"][:, 0] for each in parts])
    step = np.concatenate([each.observations[:-1, 0, 0] for each in parts])
    assert np.array_equal(calls, step), "a state counts the steps of its own episode"
    for each in parts:
        assert each.state is not None
        assert each.state[0, 0] == each.outputs["calls"][0, 0]


def test_versions_name_the_weights_of_every_step() -> None:
    actor = Actor([CountingEnvironment()], {"policy": AffinePolicy()}, 2)
    seen = [sampled(actor).versions.tolist()]
    actor.load(7, {"bias": np.array([3])})
    after = sampled(actor)
    assert seen == [[-1, -1]]
    assert after.versions.tolist() == [7, 7]
    assert np.array_equal(after.actions, after.observations[:-1, :, 0].astype(np.int64) + 3)


def test_the_same_seed_gives_the_same_fragments() -> None:
    policy = AffinePolicy()
    actor = Actor([CountingEnvironment()], {"policy": policy}, 5)
    actor.reset(11)
    first = sampled(actor)
    sampled(actor)
    actor.reset(11)
    again = sampled(actor)
    actor.reset(12)
    assert np.array_equal(first.observations, again.observations)
    assert not np.array_equal(first.observations, sampled(actor).observations)
    assert policy.seeds[0] == policy.seeds[1] != policy.seeds[2]


def test_agents_go_to_the_first_policy_that_matches_their_whole_name() -> None:
    agents = ["car_0", "bus_0", "car_1", "car_10"]
    environment = CountingEnvironment(4, agents)
    even, other = AffinePolicy(), AffinePolicy()
    other.load(2, {"bias": np.array([50])})
    routes = {"car_[02]": "even", ".*": "other"}
    actor = Actor([environment], {"even": even, "other": other}, 9, routes=routes)
    fragments = actor.sample()
    assert isinstance(fragments, dict)
    assert fragments["even"].observations[0, :, 2].tolist() == [0]
    assert fragments["other"].observations[0, :, 2].tolist() == [1, 2, 3]
    assert (fragments["other"].actions >= 50).all()
    assert fragments["other"].rewards[0].tolist() == [50, 50, 50]
    assert (fragments["even"].versions == -1).all()
    assert {each.slot for each in fragments["other"].episodes} == {0, 1, 2}
    assert fragments["even"].policy == "even"
    again = actor.sample()
    assert isinstance(again, dict)
    for name, fragment in fragments.items():
        assert np.array_equal(fragment.observations[-1], again[name].observations[0])


def test_an_agent_without_a_policy_is_named_with_the_patterns() -> None:
    environment = CountingEnvironment(2, ["car_0", "bus_0"])
    with pytest.raises(ConfigError, match=r"(?s)'bus_0' matches no policy.*'car_\.\*'"):
        Actor([environment], {"policy": AffinePolicy()}, 4, routes={"car_.*": "policy"})


def test_an_empty_ring_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 environments in its ring"):
        Actor([], {"policy": AffinePolicy()}, 4)
