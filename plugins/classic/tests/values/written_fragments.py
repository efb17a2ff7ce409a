"""Fragments of random episodes, as an actor would send them."""

from __future__ import annotations

import numpy as np

from rillflow_classic.fragment import Fragment


def random_stream(num_steps: int, num_slots: int, seed: int, ending: float = 0.2) -> Fragment:
    """Return one long fragment whose episodes end at random; observation [t, n] is the pair (t, n)."""
    random, shape = np.random.default_rng(seed), (num_steps, num_slots)
    terminated, truncated = random.random(shape) < ending / 2, random.random(shape) < ending / 2
    valid = np.ones(shape, bool)
    for t in range(1, num_steps):
        valid[t] = ~((terminated[t - 1] | truncated[t - 1]) & valid[t - 1])
        terminated[t] &= valid[t]
        truncated[t] &= valid[t]
    rows, slots = np.meshgrid(np.arange(num_steps + 1), np.arange(num_slots), indexing="ij")
    return Fragment(
        observations=np.stack((rows, slots), axis=-1).astype(np.float32),
        actions=random.integers(0, 5, shape),
        rewards=np.where(valid, random.normal(size=shape), 0).astype(np.float32),
        terminated=terminated,
        truncated=truncated,
        valid=valid,
        versions=np.zeros(num_steps, np.int64),
    )


def part(stream: Fragment, begin: int, end: int, actor: int = 0) -> Fragment:
    """Return steps begin to end of a long fragment."""
    return Fragment(
        observations=stream.observations[begin : end + 1],
        actions=stream.actions[begin:end],
        rewards=stream.rewards[begin:end],
        terminated=stream.terminated[begin:end],
        truncated=stream.truncated[begin:end],
        valid=stream.valid[begin:end],
        versions=stream.versions[begin:end],
        outputs={name: values[begin:end] for name, values in stream.outputs.items()},
        actor=actor,
    )
