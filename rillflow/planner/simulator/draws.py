"""Draws: lengths of rows, each computed from (seed, prompt, sample), never drawn in turn.

(seed, stream), number of a prompt ─ Philox ─> shares between 0 and 1 ─ quantiles ─> lengths

So a row is as long in whatever order rows begin, and however many begin beside it.
Source of the generator: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rillflow.planner.workload import Lengths, Workload

_ROWS, _PROMPT_TOKENS, _DEVICES = range(1, 4)


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
    (prompt_tokens,) = _tokens(workload.prompt, seed, _PROMPT_TOKENS, prompt, 1)
    responses = _tokens(workload.response, seed, _ROWS, prompt, samples)
    return [
        Row(prompt=prompt, sample=sample, prompt_tokens=prompt_tokens, response_tokens=response)
        for sample, response in enumerate(responses)
    ]


def _tokens(lengths: Lengths, seed: int, stream: int, prompt: int, count: int) -> list[int]:
    """So many lengths of a prompt, at least 1 each."""
    if known := lengths.in_order:
        first = prompt * count
        return [max(known[place % len(known)], 1) for place in range(first, first + count)]
    return [max(round(lengths.quantile(share)), 1) for share in _shares(seed, stream, prompt, count)]


def slow_devices(seed: int, devices: int, share: float) -> list[bool]:
    """Which of a cluster's devices are slow, each with this probability."""
    return [drawn < share for drawn in _shares(seed, _DEVICES, 0, devices)]


def _shares(seed: int, stream: int, number: int, count: int) -> list[float]:
    """So many numbers between 0 and 1, the same whatever else is drawn."""
    key = np.array([seed % 2**64, stream], dtype=np.uint64)
    philox = np.random.Philox(key=key, counter=np.array([0, number, 0, 0], dtype=np.uint64))
    return [max(share, 1e-9) for share in np.random.Generator(philox).random(count).tolist()]
