"""Draws: compute the length of each row from (seed, prompt, sample), independent of drawing order.

(seed, stream), block of prompts ─ Philox ─> orders ─> shares between 0 and 1 ─ quantiles ─> lengths

A row thus has the same length in any order of rows and for any number of rows. The rows of a block lie at the
midpoints of equal parts of the distribution (stratified sampling). The longest rows determine the time of a
step; with independent draws of a few rows, their number would vary too much.

Source of the generator: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rillflow_planner.workload import Lengths, Workload

_ROWS, _PROMPT_TOKENS = range(1, 3)
BLOCK = 16
"""Number of steps whose rows are drawn together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row to sample."""

    prompt: int
    """Number of its prompt, counted from the first of the run."""
    sample: int
    """Index among the rows of its prompt."""
    prompt_tokens: int
    """Number of prompt tokens."""
    response_tokens: int
    """Number of response tokens at its end."""


def rows_of(workload: Workload, prompt: int, *, seed: int, samples: int) -> list[Row]:
    """Return the rows of a prompt, for the given number of samples."""
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
    """Return ``count`` lengths of a prompt, at least 1 each; ``kept`` per prompt cover the distribution."""
    if known := lengths.in_order:
        first = prompt * count
        return [max(known[place % len(known)], 1) for place in range(first, first + count)]
    block, place = divmod(prompt, size)
    orders = enumerate(_orders(seed, stream, block, size, count))
    shares = [(order[place] * kept + sample % kept + 0.5) / (size * kept) for sample, order in orders]
    return [max(round(lengths.quantile(share)), 1) for share in shares]


@lru_cache(maxsize=64)
def _orders(seed: int, stream: int, block: int, size: int, count: int) -> list[list[int]]:
    """Return an order of a block's prompts for each sample; the orders do not depend on ``count``."""
    key, counter = (np.array(part, dtype=np.uint64) for part in ([seed % 2**64, stream], [0, block, 0, 0]))
    generator = np.random.Generator(np.random.Philox(key=key, counter=counter))
    return [generator.permutation(size).tolist() for _ in range(count)]
