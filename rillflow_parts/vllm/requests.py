"""Requests: the calls and results between VllmEngine and vLLM's core, in the same process or in a server.

    VllmEngine ── Ask ──> AnyCore = Core, in this process | ServedCore ── frames ──> Core, in a server
               <─ Piece ─┘

Frames carry JSON and arrays, never code:

    START settings | ADD row | ABORT row | STEP most | SLEEP | WAKE          one frame each
    RELOAD, ADAPT ─ WEIGHT ─ WEIGHT ─ ... ─ END                              a weight is cut into chunks

ADD and ABORT get no answer; every other request is answered with OK or ERROR once it is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rillflow.records.row import RowId
from rillflow.rollout.config import SamplingConfig
from rillflow.workers.wire import Arrays, Channel, Message

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
    tp: int = 1
    """Ranks that share one copy of the weights; each has an engine in a server, with the same requests."""
    tp_rank: int = 0
    """Index of this rank among them."""
    port: int = 0
    """Port of this node where their engines meet; 0 for one rank."""
    scratch: str | None = None
    """Folder for files of a moment; None for the system's."""


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


def unname_memory(port: int) -> None:
    """Remove the names of vLLM's shared memory once all ranks are attached: a killed server cannot."""
    for memory in Path("/dev/shm").glob(f"{port}-*cpushm_*"):
        memory.unlink(missing_ok=True)


BUCKET_BYTES = 2**26
"""Maximum bytes of a weight in one frame."""
_SAMPLING = set(SamplingConfig.model_fields) - {"stop"}
"""Sampling settings sent to the server; ``VllmEngine`` itself checks for stop texts."""


class Word(IntEnum):
    """Kind of a frame."""

    START = auto()
    ADD = auto()
    ABORT = auto()
    STEP = auto()
    RELOAD = auto()
    ADAPT = auto()
    WEIGHT = auto()
    END = auto()
    SLEEP = auto()
    WAKE = auto()
    OK = auto()
    ERROR = auto()


def said_of(ask: Ask) -> dict[str, Any]:
    """Return a row's request as JSON values, without its given tokens."""
    return {
        "row": list(ask.row),
        "sampling": ask.sampling.model_dump(mode="json", include=_SAMPLING),
        "seed": ask.seed,
        "begin": ask.begin,
        "most": ask.most,
        "stop": list(ask.stop),
        "sampled": list(ask.sampled),
    }


def ask_of(message: Message) -> Ask:
    """Return the request of a message: the inverse of ``said_of``."""
    says = message.says
    return Ask(
        row=RowId(*says["row"]),
        sampling=SamplingConfig.model_validate(says["sampling"]),
        seed=says["seed"],
        begin=says["begin"],
        most=says["most"],
        stop=tuple(says["stop"]),
        sampled=tuple(says["sampled"]),
        given=tuple(message.arrays["given"].tolist()),
    )


def arrays_of(pieces: Sequence[Piece]) -> Arrays:
    """Return pieces as arrays, rows concatenated."""
    return {
        "rows": np.array([each.row for each in pieces], np.int64).reshape(-1, 3),
        "counts": np.array([len(each.tokens) for each in pieces], np.int64),
        "tokens": np.array([token for each in pieces for token in each.tokens], np.int64),
        "logprobs": np.array([logprob for each in pieces for logprob in each.logprobs], np.float64),
        "ended": np.array([each.has_ended for each in pieces], np.bool_),
    }


def pieces_of(arrays: Arrays) -> list[Piece]:
    """Return the pieces of these arrays: the inverse of ``arrays_of``."""
    rows, counts, tokens, logprobs, ended = (
        arrays[name].tolist() for name in ("rows", "counts", "tokens", "logprobs", "ended")
    )
    found, at = [], 0
    for row, count, has_ended in zip(rows, counts, ended, strict=True):
        own = slice(at, at + count)
        piece = Piece(row=RowId(*row), tokens=tokens[own], logprobs=logprobs[own], has_ended=has_ended)
        found.append(piece)
        at += count
    return found


def send_weights(channel: Channel, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Send weights one by one, each in buckets; from a device, one bucket is copied at a time."""
    for name, tensor in weights:
        flat = tensor.detach().contiguous().reshape(-1)
        step = max(1, BUCKET_BYTES // flat.itemsize)
        says = {"name": name, "dtype": str(flat.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        for at in range(0, max(1, len(flat)), step):
            part = flat[at : at + step].to("cpu", copy=True)  # torch cannot resize what numpy looks at
            bucket = part.view(torch.uint8).numpy()
            channel.send(Word.WEIGHT, {**says, "at": at * flat.itemsize}, {"bytes": bucket})
    channel.send(Word.END, {})


def received_weights(channel: Channel) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights from ``send_weights``, each once it is complete."""
    whole = torch.empty(0)
    while (message := channel.receive()).kind == Word.WEIGHT:
        says, part = message.says, message.arrays["bytes"]
        if says["at"] == 0:
            whole = torch.empty(says["shape"], dtype=getattr(torch, says["dtype"]))
        raw = whole.reshape(-1).view(torch.uint8).numpy()
        raw[says["at"] : says["at"] + len(part)] = part
        if says["at"] + len(part) == len(raw):
            yield says["name"], whole
