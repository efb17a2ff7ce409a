"""Replay buffers hold exactly the transitions of the fragments, and draw them as their priorities say."""

from __future__ import annotations

import copy
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plugins.classic.tests.values.written_fragments import part, random_stream
from rillflow.errors import ConfigError, RecordError
from rillflow_classic.fragment import Fragment
from rillflow_classic.replay import ReplayBuffer, ReplayConfig, Transitions

SPACES = (gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32), gymnasium.spaces.Discrete(5))
DISCOUNT = 0.9


def made(capacity: int, *, num_steps: int = 1, alpha: float = 0.0, seed: int = 0) -> ReplayBuffer:
    config = ReplayConfig(capacity=capacity, priority_exponent=alpha, weight_exponent=0.5)
    return ReplayBuffer(config, *SPACES, discount=DISCOUNT, num_steps=num_steps, seed=seed)


def expected(stream: Fragment, t: int, n: int, num_steps: int) -> tuple[float, float, int]:
    """Return, discount and successor of a transition, one step at a time in float64."""
    total, discount = 0.0, 1.0
    for k in range(t, min(t + num_steps, len(stream.rewards))):
        total += discount * float(stream.rewards[k, n])
        discount *= DISCOUNT
        if stream.terminated[k, n]:
            return total, 0.0, k + 1
        if stream.truncated[k, n]:
            return total, discount, k + 1
    return total, discount, min(t + num_steps, len(stream.rewards))


def check(drawn: Transitions, stream: Fragment, num_steps: int) -> None:
    for row in range(len(drawn.returns)):
        t, n = drawn.observations[row].astype(int)
        assert stream.valid[t, n]
        total, discount, successor = expected(stream, t, n, num_steps)
        assert drawn.returns[row] == pytest.approx(total, abs=1e-5)
        assert drawn.discounts[row] == pytest.approx(discount, abs=1e-6)
        assert drawn.next_observations[row].tolist() == [successor, n]
        assert drawn.actions[row] == stream.actions[t, n]


@given(st.integers(1, 12), st.integers(1, 3), st.integers(1, 6), st.floats(0, 1), st.integers(0, 999))
def test_steps_agree_with_a_loop_over_random_endings(
    length: int, slots: int, num_steps: int, ending: float, seed: int
) -> None:
    stream, buffer = random_stream(length, slots, seed, ending), made(100, num_steps=num_steps)
    buffer.add(stream)
    drawn = buffer.sample(buffer.num_transitions)
    assert buffer.num_transitions == stream.num_steps
    check(drawn, stream, num_steps)


@pytest.mark.parametrize("alpha", [0.0, 0.6])
@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(1, 4), st.integers(0, 999))
def test_any_cut_of_a_stream_gives_its_transitions(
    alpha: float, cuts: list[int], num_steps: int, seed: int
) -> None:
    """A stream in pieces gives the same transitions as in one piece, also after rows were overwritten."""
    stream, buffer = random_stream(sum(cuts), 2, seed), made(24, num_steps=num_steps, alpha=alpha)
    begin = 0
    for cut in cuts:
        buffer.add(part(stream, begin, begin + cut))
        begin += cut
        if buffer.num_transitions:
            check(buffer.sample(buffer.num_transitions), part(stream, 0, begin), num_steps)
    if 2 * (begin + 1) <= 24:
        assert buffer.num_transitions == stream.num_steps


def test_fragments_of_several_actors_do_not_run_into_each_other() -> None:
    stream, buffer = random_stream(40, 2, seed=1), made(1000, num_steps=3)
    other = replace(stream, observations=stream.observations + 100)
    for begin in range(0, 40, 4):
        buffer.add(part(stream, begin, begin + 4))
        buffer.add(part(other, begin, begin + 4, actor=1))
    drawn = buffer.sample(100)
    assert np.array_equal(drawn.observations[:, 1] >= 100, drawn.next_observations[:, 1] >= 100)
    assert (drawn.next_observations[:, 0] // 4 * 4 <= drawn.observations[:, 0] // 4 * 4 + 4).all()


def test_draws_follow_the_priorities_and_weights_undo_them() -> None:
    stream = random_stream(50, 2, seed=0, ending=0.0)
    buffer = made(200, alpha=0.6, seed=3)
    buffer.add(stream)
    drawn = buffer.sample(100)
    errors = np.where(drawn.observations[:, 0] < 25, 4.0, 0.5)
    buffer.set_priorities(drawn.serials, errors)
    seen = np.unique(drawn.serials)
    batches = [buffer.sample(100) for _ in range(300)]
    serials = np.concatenate([each.serials for each in batches])
    high, low = (np.isin(serials, drawn.serials[chosen]) for chosen in (errors == 4.0, errors == 0.5))
    counts = [len(np.unique(drawn.serials[chosen])) for chosen in (errors == 4.0, errors == 0.5)]
    ratio = (high.sum() / counts[0]) / (low.sum() / counts[1])
    assert ratio == pytest.approx(8**0.6, rel=0.1)
    weights = {s: w for each in batches for s, w in zip(each.serials, each.weights, strict=True)}
    of_high = next(weights[s] for s in seen if s in serials[high])
    of_low = next(weights[s] for s in seen if s in serials[low])
    assert of_low / of_high == pytest.approx(8 ** (0.6 * 0.5), rel=1e-4)


def test_uniform_draws_are_prioritised_draws_of_equal_priorities() -> None:
    stream = random_stream(50, 2, seed=0)
    for buffer in (made(200), made(200, alpha=0.6)):
        buffer.add(stream)
        drawn = np.concatenate([buffer.sample(50).serials for _ in range(400)])
        counts = np.unique(drawn, return_counts=True)[1]
        assert len(counts) == stream.num_steps
        mean = 20_000 / stream.num_steps
        assert counts.min() > mean * 0.6 and counts.max() < mean * 1.4


def test_priorities_begin_from_the_values_that_actors_saw() -> None:
    stream = random_stream(30, 2, seed=5)
    best, chosen = (np.random.default_rng(s).normal(size=(30, 2)).astype(np.float32) for s in (1, 2))
    stream = replace(stream, outputs={"best": best, "chosen": chosen})
    buffer = made(100, num_steps=2, alpha=1.0)
    buffer.add(stream)
    priorities = buffer.state()["priorities"].numpy()[:60].reshape(30, 2)
    for t, n in np.argwhere(stream.valid):
        total, discount, successor = expected(stream, t, n, 2)
        if successor < 30:
            error = total + discount * best[successor, n] - chosen[t, n]
            assert priorities[t, n] == pytest.approx(abs(error), abs=1e-4)
        else:
            assert priorities[t, n] == 1.0
    assert (priorities[~stream.valid] == 0).all()


def test_priorities_of_overwritten_transitions_are_left_out() -> None:
    stream, buffer = random_stream(60, 2, seed=0, ending=0.0), made(24, alpha=0.6)
    buffer.add(part(stream, 0, 10))
    old = buffer.sample(8)
    buffer.add(part(stream, 20, 31))
    before = buffer.state()["priorities"].clone()
    buffer.set_priorities(old.serials, np.full(8, 100.0))
    assert torch.equal(buffer.state()["priorities"], before)


@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_a_restored_buffer_draws_the_same_batches(alpha: float) -> None:
    stream, buffer = random_stream(60, 2, seed=0), made(50, num_steps=3, alpha=alpha)
    buffer.add(part(stream, 0, 20))
    buffer.add(part(stream, 20, 40))
    buffer.set_priorities(buffer.sample(8).serials, np.arange(8.0))
    restored = made(50, num_steps=3, alpha=alpha, seed=9)
    restored.restore(copy.deepcopy(buffer.state()))
    for each in (buffer, restored):
        each.add(part(stream, 40, 50))
    one, other = buffer.sample(20), restored.sample(20)
    for name, values in vars(one).items():
        assert np.array_equal(values, vars(other)[name]), name


def test_a_batch_larger_than_the_buffer_is_an_error() -> None:
    buffer = made(100)
    buffer.add(random_stream(3, 1, seed=0, ending=0.0))
    with pytest.raises(RecordError, match="a batch of 4 is larger than the 3 transitions kept"):
        buffer.sample(4)


def test_learning_starts_at_the_latest_when_the_buffer_is_full() -> None:
    """After short episodes it holds fewer transitions than rows, so a count near its capacity never comes."""
    buffer = made(40)
    for step in range(3):
        assert not buffer.is_ready(39), step
        buffer.add(random_stream(6, 2, seed=step, ending=0.9))
    assert buffer.is_ready(39) and buffer.num_transitions < 39
    few = buffer.num_transitions
    assert buffer.is_ready(few) and len(buffer.sample(few).returns) == few


def test_a_fragment_larger_than_the_buffer_is_an_error() -> None:
    with pytest.raises(RecordError, match="a fragment of 22 rows does not fit"):
        made(20).add(random_stream(10, 2, seed=0))


def test_a_buffer_larger_than_the_memory_is_an_error_before_it_is_made() -> None:
    config = ReplayConfig(capacity=10**9)
    space = gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    with pytest.raises(ConfigError, match=r"1000000000, which takes 25\.7 TiB"):
        ReplayBuffer(config, space, SPACES[1], discount=0.9)
