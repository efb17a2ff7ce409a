"""Workload: the rows of a step, their lengths, and the training passes over them.

mean and limit, or lengths of a run ──> Lengths ─┬─ mean, mean_square ─> cost of training
                                                 └─ spread ────────────> how a batch drains
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rillflow.errors import PlanError

MOST_TOKENS = 100_000_000
"""Largest accepted length."""
_MOST_ROWS = 1_000_000_000
MOST_ROWS = 2**18
"""Largest number of rows of a step."""
BLOCK = 16
"""Number of steps whose rows are drawn together."""
RESPONSES, PROMPTS = range(1, 3)
"""Streams of random numbers."""
_NORMAL = NormalDist()
_BOUNDS = {
    "prompts": ("--prompts (algorithm.prompts_per_step)", 1, _MOST_ROWS),
    "samples": ("--samples (algorithm.samples_per_prompt)", 1, _MOST_ROWS),
    "epochs": ("algorithm.epochs", 1, _MOST_ROWS),
    "minibatches": ("--minibatches (algorithm.minibatches)", 1, _MOST_ROWS),
    "tokens_per_micro_batch": ("policy.tokens_per_micro_batch", 1, _MOST_ROWS),
    "rows_at_once": ("rollout.max_rows", 1, _MOST_ROWS),
    "scoring_tokens": ("--scoring-tokens", 0, _MOST_ROWS),
    "tokens_per_pass": ("--tokens-per-pass", 1, 100),
    "gradient_share": ("the share of rows with a gradient", 0, 1),
    "function_s": ("--reward-seconds", 0, 86_400),
    "rows": ("the rows of a step, prompts x samples,", 1, MOST_ROWS),
}
"""Option or setting, least and most of every number of a workload."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Distribution of the number of tokens of a prompt or a response.

    Example:
        Lengths(kind="lognormal", median=800, sigma=0.6, limit=8192)
    """

    kind: Literal["fixed", "lognormal", "measured"]
    """``fixed`` is one length; ``lognormal`` is clipped at the limit; ``measured`` uses the lengths of a run.
    """
    limit: int
    """Largest length; for ``fixed``, the length itself."""
    median: float = 0.0
    """Median of ``lognormal`` before clipping."""
    sigma: float = 0.0
    """Standard deviation of the logarithm of ``lognormal``."""
    values: tuple[int, ...] = ()
    """Observed lengths of ``measured``, ascending."""
    in_order: tuple[int, ...] = ()
    """Observed lengths of ``measured`` in row order, repeated cyclically; if empty, lengths are drawn."""

    def __post_init__(self) -> None:
        require_within("the longest length", self.limit, 1, MOST_TOKENS)
        if self.kind == "lognormal":
            if not 0.0 < self.median < math.inf:
                raise PlanError(
                    f"the median length is {self.median:g}", why="a log-normal has a median above 0"
                )
            told = "; at sigma 1, the longest of 1,000 rows is 25 times the median"
            require_within("sigma of log-normal lengths", self.sigma, 0, 5, told)
        if self.kind == "measured":
            values = self.values
            if not values or tuple(sorted(values)) != values or values[0] < 0 or values[-1] > self.limit:
                raise PlanError(
                    f"{len(values)} measured lengths up to {max(values, default=0)}, limit {self.limit}",
                    why="there must be at least one, in ascending order, from 0 to the limit",
                )

    @property
    def known(self) -> tuple[int, ...]:
        """Ascending known lengths of ``fixed`` and ``measured``."""
        return (self.limit,) if self.kind == "fixed" else self.values

    def quantile(self, share: float) -> float:
        """Return the length that this share of rows does not exceed, in tokens, 0 < share < 1."""
        if self.kind != "lognormal":
            return float(self.known[min(int(share * len(self.known)), len(self.known) - 1)])
        return min(max(self.median * math.exp(self.sigma * _NORMAL.inv_cdf(share)), 1.0), float(self.limit))

    @cached_property
    def mean(self) -> float:
        """Mean tokens of a row; clipped rows count with the limit."""
        return self._moment(1)

    @cached_property
    def mean_square(self) -> float:
        """Mean square of a length, in tokens^2, for attention cost and live context."""
        return self._moment(2)

    def _moment(self, power: int) -> float:
        """Return the mean of a length to a power p.

        For a clipped log-normal: m^p exp((p s)^2 / 2) N(z - p s) + limit^p (1 - N(z)), z = ln(limit / m) / s.
        """
        if self.kind != "lognormal":
            return math.fsum(math.pow(value, power) for value in self.known) / len(self.known)
        if self.sigma == 0.0:
            return math.pow(min(self.median, self.limit), power)
        z, spread = math.log(self.limit / self.median) / self.sigma, power * self.sigma
        below = math.pow(self.median, power) * math.exp(spread**2 / 2) * _NORMAL.cdf(z - spread)
        return below + math.pow(self.limit, power) * (1.0 - _NORMAL.cdf(z))

    def spread(self, rows: int) -> NDArray[np.float64]:
        """Return ``rows`` ascending lengths that represent the distribution: the midpoints of equal parts."""
        return _quantiles(self, rows, 1)

    def longest(self, rows: int, parts: int = 64) -> NDArray[np.float64]:
        """Return [parts] ascending lengths of the longest of ``rows`` rows; their mean is its expectation."""
        return _quantiles(self, parts, rows)


def lengths_of_mean(mean: float, limit: int, sigma: float = 0.6) -> Lengths:
    """Return the log-normal with this sigma whose mean, clipped at the limit, is ``mean`` tokens.

    Raises:
        PlanError: the mean is not between 1 and the limit.
    """
    if not 1.0 <= mean <= limit:
        raise PlanError(f"the mean length is {mean:g}", why=f"it must lie between 1 and the limit, {limit}")
    low, high = 0.0, 12.0 * max(sigma, 0.1) + math.log(limit)
    for _ in range(60):
        middle = (low + high) / 2
        found = Lengths(kind="lognormal", limit=limit, median=math.exp(middle), sigma=sigma)
        low, high = (middle, high) if found.mean < mean else (low, middle)
    return Lengths(kind="lognormal", limit=limit, median=math.exp(high), sigma=sigma)


def require_within(what: str, value: float, least: float, most: float, told: str = "") -> None:
    """Raise an error for a number outside of bounds, or NaN."""
    if not least <= value <= most:
        raise PlanError(f"{what} is {value:.12g}", why=f"it must lie between {least} and {most:,}{told}")


@lru_cache(maxsize=1024)
def _quantiles(lengths: Lengths, parts: int, rows: int) -> NDArray[np.float64]:
    """Return [parts] equally likely lengths of the longest of ``rows`` rows, ascending."""
    return np.array([lengths.quantile(((place + 0.5) / parts) ** (1.0 / rows)) for place in range(parts)])


@lru_cache(maxsize=64)
def drawn(
    lengths: Lengths, block: int, *, seed: int, size: int, count: int, kept: int, stream: int = RESPONSES
) -> list[list[int]]:
    """Return the lengths of a block of ``size`` prompts, ``[count][size]``, at least 1 each.

    (seed, stream), block ─ Philox ─> orders ─> shares between 0 and 1 ─ quantiles ─> lengths

    A row has the same length for any ``count``. The first ``kept`` rows of a block's prompts lie at the
    midpoints of equal parts of the distribution (stratified sampling). The longest rows determine the time of
    a step; with independent draws of a few rows, their number would vary too much.

    Source of the generator: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    if known := lengths.in_order:
        first = block * size * count
        rows = [max(known[place % len(known)], 1) for place in range(first, first + size * count)]
        return [rows[sample::count] for sample in range(count)]
    key, counter = (np.array(part, dtype=np.uint64) for part in ([seed % 2**64, stream], [0, block, 0, 0]))
    generator = np.random.Generator(np.random.Philox(key=key, counter=counter))
    quantiles = np.maximum(_quantiles(lengths, size * kept, 1).round(), 1).astype(int)
    orders = (generator.permutation(size) * kept + sample % kept for sample in range(count))
    return [quantiles[order].tolist() for order in orders]


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Computed tokens of a step, as a share of all its tokens."""

    trained: float = 1.0
    """Share in training, where rows of an optimiser step can share a common prefix."""
    scored: float = 1.0
    """Share in scoring, where all rows of a step can share prefixes."""

    def __post_init__(self) -> None:
        require_within("packing.trained", self.trained, 0, 1)
        require_within("packing.scored", self.scored, 0, 1)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Rows of one step.

    Example:
        Workload(prompts=64, samples=16, prompt=Lengths(kind="fixed", limit=256), response=response)
    """

    prompts: int
    """Number of prompts per step."""
    samples: int
    """Number of rows sampled per prompt."""
    prompt: Lengths
    """Tokens of a prompt."""
    response: Lengths
    """Tokens of a response."""
    epochs: int = 1
    """Number of passes over a step's rows."""
    minibatches: int = 1
    """Number of optimiser steps per pass."""
    tokens_per_micro_batch: int = 16384
    """Largest number of tokens of a micro-batch in training, on the devices that share a row (cp)."""
    scoring_tokens: int = 0
    """The same in scoring; 0: as in training."""
    function_s: float = 0.0
    """Seconds of a programmed reward per row on one device's host."""
    dtype: Literal["float8", "bfloat16", "float32"] = "bfloat16"
    """Dtype of weights during computation; the optimiser keeps float32."""
    rows_at_once: int = 1024
    """Largest number of rows that a replica generates at the same time."""
    shares_prompts: bool = True
    """Whether a replica prefills the common prompt of several rows only once."""
    tokens_per_pass: float = 1.0
    """Tokens that a row gains per decoding pass; above 1 with speculative decoding."""
    packing: Packing = Packing()
    """Computed shares of training and scoring with shared prefixes."""
    gradient_share: float = 1.0
    """Share of a step's rows with a gradient; training only runs the forward pass on the others."""

    def __post_init__(self) -> None:
        for name, (told, least, most) in _BOUNDS.items():
            require_within(told, self.rows if name == "rows" else vars(self)[name], least, most)
        if self.minibatches > self.rows:
            raise PlanError(
                f"--minibatches is {self.minibatches} and a step has {self.rows} rows",
                why="every optimiser step needs a row",
                fix=f"set at most {self.rows} minibatches",
            )

    @property
    def rows(self) -> int:
        """Number of rows per step."""
        return self.prompts * self.samples

    @property
    def row_tokens(self) -> float:
        """Mean tokens of a row, prompt and response."""
        return self.prompt.mean + self.response.mean

    @property
    def longest_tokens(self) -> float:
        """Tokens of the longest row that a step is likely to have."""
        return self.prompt.mean + self.response.quantile(1.0 - 0.5 / self.rows)

    @property
    def row_square(self) -> float:
        """Mean square of a row's tokens, with independent prompt and response."""
        cross = 2.0 * self.prompt.mean * self.response.mean
        return self.prompt.mean_square + cross + self.response.mean_square

    @property
    def running_tokens(self) -> float:
        """Mean context of a running row at a random time, ``p + E[L^2] / (2 E[L])``, weighted by row
        length.
        """
        return self.prompt.mean + self.response.mean_square / (2 * max(self.response.mean, 1e-9))


def sharing(workload: Workload) -> Workload:
    """Return the workload of sampled rows that share nothing but their prompts."""
    response, prompt = workload.response.mean, workload.prompt.mean
    trained, scored = (
        (response + prompt * distinct_prompts(workload.samples, parts)) / (response + prompt)
        for parts in (workload.minibatches, 1)
    )
    return replace(workload, packing=Packing(trained=trained, scored=scored))


def distinct_prompts(samples: int, parts: int) -> float:
    """Return the share of a prompt's rows that are its first in their part, with rows drawn to equal parts.

    With s rows in p parts it is ``p (1 - (1 - 1/p)^s) / s``: a part is empty with probability (1 - 1/p)^s.
    """
    return parts * (1.0 - (1.0 - 1.0 / parts) ** samples) / samples
