"""Asks: what VllmEngine and vLLM's core say to each other, wherever the core is.

VllmEngine ── Ask ──> AnyCore = Core, in this process | ServedCore ── frames ──> Core, in a server
           <─ Piece ─┘
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rillflow.records.row import RowId
from rillflow.rollout.config import SamplingConfig

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
"""In one process; by the runner that takes a way of drawing from elsewhere; without word to anybody."""
LOUDNESS = "VLLM_LOGGING_LEVEL"
"""The variable by which vLLM's log is silenced, unless it is set."""


@dataclass(frozen=True, kw_only=True)
class CoreSettings:
    """What vLLM is started with; plain values, as they cross to a server."""

    directory: str
    """Has the model's config; weights come by ``reload``."""
    device: str
    """The type of device that it runs on."""
    dtype: str
    """Of its weights, as a config says it."""
    context: int
    """Tokens of a row at most."""
    max_rows: int
    """Rows that run at once."""
    keep_cache: bool
    """Whether keys and values of other weights are read on."""
    rank: int = 0
    """Of the adapter that goes with every version; 0 for none."""
    cache_gib: float | None = None
    """What keys and values may take; None for as much as the rows need."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """How one row is continued."""

    row: RowId
    """The row's id, from which its random numbers follow."""
    sampling: SamplingConfig
    """How its tokens are drawn."""
    seed: int
    """Of the run."""
    begin: int
    """The place of its first new token."""
    most: int
    """New tokens at most."""
    stop: tuple[int, ...] = ()
    """Tokens that end it."""
    sampled: tuple[int, ...] = ()
    """Those of its tokens that were sampled, where a penalty counts them."""
    tokens: tuple[int, ...] = ()
    """All of its tokens, which the core writes down, where a penalty counts them."""
    given: tuple[int, ...] = ()
    """Tokens that follow whatever would be drawn, where their log probabilities are asked for."""

    def __deepcopy__(self, memo: object) -> Ask:
        """Itself: vLLM copies what goes with a request, of which nothing changes."""
        return self


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What steps added to a row."""

    row: RowId
    """Which."""
    tokens: Sequence[int]
    """The new tokens."""
    logprobs: Sequence[float]
    """Theirs, in the whole vocabulary, after temperature."""
    has_ended: bool
    """Whether no more follow."""


class AnyCore(Protocol):
    """vLLM, as VllmEngine knows it."""

    cache_bytes: int
    """Room for keys and values."""

    def add(self, tokens: Sequence[int], ask: Ask) -> None:
        """Let a row that has these tokens run."""

    def step(self, most: int) -> list[Piece]:
        """Go on by ``most`` tokens a row, or until no row runs; what came of it."""

    def abort(self, row: RowId) -> None:
        """Take a row out."""

    def reload(self, version: int, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Take other weights, by the names of files; keys and values of older ones are void, unless kept."""

    def adapt(self, version: int, scale: float, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Take another adapter in the place of the last, by PEFT's names; keys and values as in ``reload``.

        Args:
            version: what it is called.
            scale: of what it adds to its layers.
            weights: all of it.
        """

    def sleep(self) -> None:
        """Give a device's room back; weights wait in host memory."""

    def wake(self) -> None:
        """Take what ``sleep`` gave back."""


def told(error: Exception) -> str:
    """An error of vLLM's in one line."""
    return f"{type(error).__name__}: {str(error).strip() or 'it does not say why'}"
