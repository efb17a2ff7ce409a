"""Workload: how many rows a step has, how long they are, and how often it trains on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of weights while they compute; the optimiser keeps float32."""

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return self.prompts * self.samples
