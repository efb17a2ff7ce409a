"""Workload: how many rows a step has, how long they are, and how often it trains on them.

mean and limit, or lengths of a run ──> Lengths ─┬─ mean, mean_square ─> what training computes
                                                 └─ spread ────────────> how a batch drains
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rillflow.errors import PlanError

MOST_TOKENS = 100_000_000
"""No row is longer."""
_MOST_ROWS = 1_000_000_000
_NORMAL = NormalDist()


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """How many tokens a prompt or a response has.

    Example:
        Lengths(kind="lognormal", median=800, sigma=0.6, limit=8192)
    """

    kind: Literal["fixed", "lognormal", "measured"]
    """One length; log-normal, clipped at the limit: what would be longer has just that; or those of a run."""
    limit: int
    """The longest there is; of ``fixed`` the length itself."""
    median: float = 0.0
    """Of ``lognormal``, before clipping."""
    sigma: float = 0.0
    """Of ``lognormal``: the standard deviation of the logarithm."""
    values: tuple[int, ...] = ()
    """Of ``measured``: lengths that were seen, ascending."""
    in_order: tuple[int, ...] = ()
    """Of ``measured``: those of rows one after another, again and again; they are drawn where it is empty."""

    def __post_init__(self) -> None:
        require_within("the longest length", self.limit, 1, MOST_TOKENS)
        if self.kind == "lognormal":
            if not 0.0 < self.median < math.inf:
                raise PlanError(
                    f"a median length of {self.median:g}", why="log-normal lengths have one above 0"
                )
            told = ": at 1 the longest of 1,000 rows is 25 times the median"
            require_within("sigma of log-normal lengths", self.sigma, 0, 5, told)
        if self.kind == "measured":
            values = self.values
            if not values or tuple(sorted(values)) != values or values[0] < 0 or values[-1] > self.limit:
                raise PlanError(
                    f"{len(values)} measured lengths up to {max(values, default=0)}, limit {self.limit}",
                    why="they are ascending, at least one, none below 0 and none above the limit",
                )

    @property
    def known(self) -> tuple[int, ...]:
        """The lengths that there are, ascending, where they are not log-normal."""
        return (self.limit,) if self.kind == "fixed" else self.values

    def quantile(self, share: float) -> float:
        """The length that this share of rows does not exceed, in tokens, 0 < share < 1."""
        if self.kind != "lognormal":
            return float(self.known[min(int(share * len(self.known)), len(self.known) - 1)])
        return min(max(self.median * math.exp(self.sigma * _NORMAL.inv_cdf(share)), 1.0), float(self.limit))

    @cached_property
    def mean(self) -> float:
        """Tokens of a row on average, clipped mass counted at the limit."""
        return self._moment(1)

    @cached_property
    def mean_square(self) -> float:
        """The mean of a length's square, tokens^2: what attention and the live context are made of."""
        return self._moment(2)

    def _moment(self, power: int) -> float:
        """The mean of a length to a power p.

        Of a clipped log-normal: m^p exp((p s)^2 / 2) N(z - p s) + limit^p (1 - N(z)), z = ln(limit / m) / s.
        """
        if self.kind != "lognormal":
            return math.fsum(math.pow(value, power) for value in self.known) / len(self.known)
        if self.sigma == 0.0:
            return math.pow(min(self.median, self.limit), power)
        z, spread = math.log(self.limit / self.median) / self.sigma, power * self.sigma
        below = math.pow(self.median, power) * math.exp(spread**2 / 2) * _NORMAL.cdf(z - spread)
        return below + math.pow(self.limit, power) * (1.0 - _NORMAL.cdf(z))

    def spread(self, rows: int) -> NDArray[np.float64]:
        """So many lengths, ascending, that stand for the distribution: the middles of as many equal parts."""
        return _quantiles(self, rows, 1)

    def longest(self, rows: int, parts: int = 64) -> NDArray[np.float64]:
        """[parts] Lengths of the longest of so many rows, ascending: their mean is its expectation."""
        return _quantiles(self, parts, rows)


def lengths_of_mean(mean: float, limit: int, sigma: float = 0.6) -> Lengths:
    """The log-normal of this spread whose mean, clipped at the limit, is ``mean`` tokens.

    Raises:
        PlanError: a mean that is not between 1 and the limit.
    """
    if not 1.0 <= mean <= limit:
        raise PlanError(f"a mean length of {mean:g}", why=f"it lies between 1 and the limit, {limit}")
    low, high = 0.0, 12.0 * max(sigma, 0.1) + math.log(limit)
    for _ in range(60):
        middle = (low + high) / 2
        found = Lengths(kind="lognormal", limit=limit, median=math.exp(middle), sigma=sigma)
        low, high = (middle, high) if found.mean < mean else (low, middle)
    return Lengths(kind="lognormal", limit=limit, median=math.exp(high), sigma=sigma)


def require_within(what: str, value: float, least: float, most: float, told: str = "") -> None:
    """Refuse a number that does not lie between two others, or is none."""
    if not least <= value <= most:
        raise PlanError(f"{what} is {value:.12g}", why=f"it lies between {least} and {most:,}{told}")


@lru_cache(maxsize=1024)
def _quantiles(lengths: Lengths, parts: int, rows: int) -> NDArray[np.float64]:
    """[parts] lengths of the longest of so many rows, by equal chances, ascending."""
    return np.array([lengths.quantile(((place + 0.5) / parts) ** (1.0 / rows)) for place in range(parts)])


@dataclass(frozen=True, kw_only=True)
class Packing:
    """What is computed of a step's tokens, each a share of all of them."""

    trained: float = 1.0
    """In training: rows of an optimiser step that begin alike may share their beginning."""
    scored: float = 1.0
    """In scoring, all rows of a step at once."""

    def __post_init__(self) -> None:
        require_within("packing.trained", self.trained, 0, 1)
        require_within("packing.scored", self.scored, 0, 1)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One step's rows.

    Example:
        Workload(prompts=64, samples=16, prompt=Lengths(kind="fixed", limit=256), response=response)
    """

    prompts: int
    """Prompts of a step."""
    samples: int
    """Rows sampled for each prompt."""
    prompt: Lengths
    """Tokens of a prompt."""
    response: Lengths
    """Tokens of a response."""
    epochs: int = 1
    """Passes over a step's rows."""
    minibatches: int = 1
    """Optimiser steps of a pass."""
    tokens_per_micro_batch: int = 16384
    """Most tokens of one forward and backward pass on a device."""
    function_s: float = 0.0
    """Seconds a programmed reward takes for one row on one device's host."""
    dtype: Literal["float8", "bfloat16", "float32"] = "bfloat16"
    """Of weights while they compute; the optimiser keeps float32."""
    rows_at_once: int = 1024
    """Rows a replica that generates runs side by side at most."""
    shares_prompts: bool = True
    """Whether a replica reads the prompt of rows that share one only once."""
    packing: Packing = Packing()
    """What training and scoring compute of rows that begin alike."""
    gradient_share: float = 1.0
    """Of a step's rows, those with a gradient: training passes the others forward only."""

    def __post_init__(self) -> None:
        for name in ("prompts", "samples", "epochs", "minibatches", "tokens_per_micro_batch", "rows_at_once"):
            require_within(name, vars(self)[name], 1, _MOST_ROWS)
        if self.minibatches > self.rows:
            raise PlanError(
                f"minibatches is {self.minibatches} and a step has {self.rows} rows",
                why="every optimiser step needs a row",
                fix=f"at most {self.rows}",
            )
        require_within("gradient_share", self.gradient_share, 0, 1)
        require_within("function_s", self.function_s, 0, 86_400)

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return self.prompts * self.samples

    @property
    def row_tokens(self) -> float:
        """Tokens of a row on average, prompt and response."""
        return self.prompt.mean + self.response.mean

    @property
    def longest_tokens(self) -> float:
        """Tokens of the longest row that a step is likely to have."""
        return self.prompt.mean + self.response.quantile(1.0 - 0.5 / self.rows)

    @property
    def row_square(self) -> float:
        """The mean square of a row's tokens; prompt and response taken as independent."""
        cross = 2.0 * self.prompt.mean * self.response.mean
        return self.prompt.mean_square + cross + self.response.mean_square

    @property
    def running_tokens(self) -> float:
        """Of a running row met at random: half of a length met by its tokens, ``p + E[L^2] / (2 E[L])``."""
        return self.prompt.mean + self.response.mean_square / (2 * max(self.response.mean, 1e-9))
