"""Draws: lengths of rows, each computed from (seed, prompt, sample), never drawn in turn.

(seed, stream), block of prompts ─ Philox ─> orders ─> shares between 0 and 1 ─ quantiles ─> lengths

So a row is as long in whatever order rows begin, and however many begin beside it. The rows of a block lie
at the middles of as many equal parts of the distribution (stratified sampling): the longest decide what a
step takes, and of few rows drawn one by one they would be too many or too few.
Source of the generator: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rillflow.planner.workload import Lengths, Workload

_ROWS, _PROMPT_TOKENS, _DEVICES = range(1, 4)
BLOCK = 16
"""Steps whose rows are drawn together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row that is to be sampled."""

    prompt: int
    """The number of its prompt, counted from the first of the run."""
    sample: int
    """Its place among the rows of its prompt."""
    prompt_tokens: int
    """Tokens of its prompt."""
    response_tokens: int
    """Tokens it will have sampled when it ends."""


def rows_of(workload: Workload, prompt: int, *, seed: int, samples: int) -> list[Row]:
    """The rows of a prompt, of which so many begin at most."""
    size = BLOCK * workload.prompts
    (prompt_tokens,) = _tokens(workload.prompt, seed, _PROMPT_TOKENS, prompt, size, 1, 1)
    responses = _tokens(workload.response, seed, _ROWS, prompt, size, samples, workload.samples)
    return [
        Row(prompt=prompt, sample=sample, prompt_tokens=prompt_tokens, response_tokens=response)
        for sample, response in enumerate(responses)
    ]


def _tokens(
    lengths: Lengths, seed: int, stream: int, prompt: int, size: int, count: int, kept: int
) -> list[int]:
    """So many lengths of a prompt, at least 1 each; ``kept`` of every prompt make up the distribution."""
    if known := lengths.in_order:
        first = prompt * count
        return [max(known[place % len(known)], 1) for place in range(first, first + count)]
    block, place = divmod(prompt, size)
    orders = enumerate(_orders(seed, stream, block, size, count))
    shares = [(order[place] * kept + sample % kept + 0.5) / (size * kept) for sample, order in orders]
    return [max(round(lengths.quantile(share)), 1) for share in shares]


def slow_devices(seed: int, devices: int, share: float) -> list[bool]:
    """Which of a cluster's devices are slow, each with this probability."""
    return [drawn < share for drawn in _generator(seed, _DEVICES, 0).random(devices).tolist()]


@lru_cache(maxsize=64)
def _orders(seed: int, stream: int, block: int, size: int, count: int) -> list[list[int]]:
    """Orders of the prompts of a block, one for each of so many samples, the same however many there are."""
    generator = _generator(seed, stream, block)
    return [generator.permutation(size).tolist() for _ in range(count)]


def _generator(seed: int, stream: int, number: int) -> np.random.Generator:
    key = np.array([seed % 2**64, stream], dtype=np.uint64)
    return np.random.Generator(
        np.random.Philox(key=key, counter=np.array([0, number, 0, 0], dtype=np.uint64))
    )
