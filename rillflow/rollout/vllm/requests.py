"""Asks: the requests and results between VllmEngine and vLLM's core, in the same process or in a server.

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
"""vLLM settings: one process, the model runner that accepts custom logits processors, no usage statistics."""
LOUDNESS = "VLLM_LOGGING_LEVEL"
"""Environment variable that sets vLLM's log level; the log is silenced unless it is set."""


@dataclass(frozen=True, kw_only=True)
class CoreSettings:
    """Start settings of vLLM; plain values, because they may be sent to a server."""

    directory: str
    """Directory with the model's config; ``reload`` passes the weights."""
    device: str
    """Type of the device that vLLM runs on."""
    dtype: str
    """Dtype of the weights, as a name."""
    context: int
    """Maximum tokens of a row."""
    max_rows: int
    """Maximum running rows."""
    keep_cache: bool
    """Whether keys and values computed with earlier weights stay in use."""
    rank: int = 0
    """Rank of the adapter that comes with every version; 0 for none."""
    cache_gib: float | None = None
    """Maximum GiB of keys and values; None for as much as the rows need."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request to continue one row."""

    row: RowId
    """The row's id, on which its random numbers depend."""
    sampling: SamplingConfig
    """Sampling settings of the row."""
    seed: int
    """Seed of the run."""
    begin: int
    """Position of the row's first new token."""
    most: int
    """Maximum new tokens."""
    stop: tuple[int, ...] = ()
    """Tokens that end the row."""
    sampled: tuple[int, ...] = ()
    """The row's sampled tokens, for penalties."""
    tokens: tuple[int, ...] = ()
    """All of the row's tokens, for penalties; set by the core."""
    given: tuple[int, ...] = ()
    """Tokens to emit in place of drawn ones, to obtain their log probabilities."""

    def __deepcopy__(self, memo: object) -> Ask:
        """Return the object itself: vLLM copies a request's parameters, and these never change."""
        return self


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The part that steps added to a row."""

    row: RowId
    """Id of the row."""
    tokens: Sequence[int]
    """The new tokens."""
    logprobs: Sequence[float]
    """Log probabilities of the new tokens in the whole vocabulary, after temperature."""
    has_ended: bool
    """Whether the row has ended."""


class AnyCore(Protocol):
    """vLLM's interface for VllmEngine."""

    cache_bytes: int
    """Bytes reserved for keys and values."""

    def add(self, tokens: Sequence[int], ask: Ask) -> None:
        """Add a row with these tokens."""

    def step(self, most: int) -> list[Piece]:
        """Generate up to ``most`` tokens per row, or until no row runs; return the new parts of rows."""

    def abort(self, row: RowId) -> None:
        """Remove a row."""

    def reload(self, version: int, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load other weights, by their names in files; drop older keys and values unless they are kept."""

    def adapt(self, version: int, scale: float, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Replace the adapter, by PEFT's names; keys and values as in ``reload``.

        Args:
            version: the policy version.
            scale: factor of the adapter's output.
            weights: all weights of the adapter.
        """

    def sleep(self) -> None:
        """Free device memory; the weights move to host memory."""

    def wake(self) -> None:
        """Allocate again the memory that ``sleep`` freed."""


def told(error: Exception) -> str:
    """Return an error of vLLM as one line."""
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}"
