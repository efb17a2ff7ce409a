"""Draws: the lengths of rows, each computed from (seed, prompt, sample), never drawn in turn.

(seed, stream) ─ key ──────┐
number of a prompt or row ─┴ Philox ─> two uniform numbers ─ Box-Muller ─> normal ─> length

So a row is as long in whatever order rows begin, and however many begin beside it.
Source of the generator: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from rillflow.planner.workload import Lengths, Workload

_BLOCK = 2048
_ROWS, _PROMPT_TOKENS, _DEVICES = range(1, 4)
_GRID = np.linspace(-8.0, 8.0, 4097)
_CUMULATED = np.array([NormalDist().cdf(float(place)) for place in _GRID])


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


class Draws:
    """The lengths of a run's rows.

    Args:
        workload: the distributions.
        seed: of the run.
        samples: rows begun for each prompt, at most.
    """

    def __init__(self, workload: Workload, *, seed: int, samples: int) -> None:
        self._workload = workload
        self._seed = seed
        self._samples = samples
        self._known: dict[tuple[int, int], list[int]] = {}

    def rows(self, prompt: int) -> list[Row]:
        """The rows of a prompt."""
        prompt_tokens = self._tokens(_PROMPT_TOKENS, self._workload.prompt, prompt, 1)[0]
        responses = self._tokens(_ROWS, self._workload.response, prompt * self._samples, self._samples)
        return [
            Row(prompt=prompt, sample=sample, prompt_tokens=prompt_tokens, response_tokens=response)
            for sample, response in enumerate(responses)
        ]

    def _tokens(self, stream: int, lengths: Lengths, first: int, count: int) -> list[int]:
        """So many lengths of a stream from place ``first`` on; whole blocks of them are made at once."""
        if lengths.in_order:
            return [
                max(lengths.in_order[place % len(lengths.in_order)], 1)
                for place in range(first, first + count)
            ]
        found: list[int] = []
        while len(found) < count:
            block, place = divmod(first + len(found), _BLOCK)
            if (stream, block) not in self._known:
                normals = _block(self._seed, stream, block)
                self._known[stream, block] = tokens_of(lengths, normals).tolist()
            found += self._known[stream, block][place : place + count - len(found)]
        return found


def tokens_of(lengths: Lengths, normals: NDArray[np.float64]) -> NDArray[np.int64]:
    """The lengths in tokens, at least 1, that standard normal numbers stand for; clipped at the limit."""
    if lengths.kind == "lognormal":
        drawn = np.rint(lengths.median * np.exp(lengths.sigma * normals))
        return np.clip(drawn, 1, lengths.limit).astype(np.int64)
    shares = np.interp(normals, _GRID, _CUMULATED)
    places = np.minimum((shares * len(lengths.known)).astype(np.int64), len(lengths.known) - 1)
    known = np.maximum(np.asarray(lengths.known, dtype=np.int64), 1)
    return np.asarray(known[places])


def slow_devices(seed: int, devices: int, share: float) -> NDArray[np.bool_]:
    """[devices] which of a cluster's devices are slow, each with this probability."""
    blocks = range(-(-devices // _BLOCK))
    normals = np.concatenate([_block(seed, _DEVICES, block) for block in blocks])[:devices]
    return np.asarray(np.interp(normals, _GRID, _CUMULATED) < share)


@lru_cache(maxsize=256)
def _block(seed: int, stream: int, block: int) -> NDArray[np.float64]:
    """So many of them are computed at once."""
    key = np.array([seed % 2**64, stream], dtype=np.uint64)
    counter = np.array([0, block, 0, 0], dtype=np.uint64)
    raw = np.random.Philox(key=key, counter=counter).random_raw(2 * _BLOCK)
    uniform = ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    radius = np.sqrt(-2.0 * np.log(uniform[:_BLOCK]))
    return radius * np.cos(2.0 * math.pi * uniform[_BLOCK:])
