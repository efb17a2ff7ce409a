"""Frames: requests, pieces and weights on their way to a server, as JSON and arrays, never as code.

    START settings | ADD row | ABORT row | STEP most | SLEEP | WAKE          one frame each
    RELOAD, ADAPT ─ WEIGHT ─ WEIGHT ─ ... ─ END                              a weight is cut into buckets

ADD and ABORT get no answer; every other request is answered with OK or ERROR once it is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum, auto
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rillflow.records.row import RowId
from rillflow.rollout.config import SamplingConfig
from rillflow.rollout.vllm.requests import Ask, Piece
from rillflow.workers.wire import Arrays, Channel, Message

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
            bucket = flat[at : at + step].cpu().view(torch.uint8).numpy()
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
