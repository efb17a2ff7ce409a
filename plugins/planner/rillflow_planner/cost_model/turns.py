"""Turns: drawn rows on their replicas, each of which begins in the first free slot.

drawn lengths ─ batches x replicas ─> begins, ends ─ between two ends: running rows, context ─> seconds

All running rows of a replica gain tokens at the same pace, so decoded tokens tell which row ends next.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rillflow_planner.workload import BLOCK, Workload, drawn

if TYPE_CHECKING:
    from rillflow_planner.cost_model.generation import Decoder

Floats = NDArray[np.float64]
MOST_ROWS = 256
"""Most rows of a batch that is drawn; the lengths of larger ones are quantiles."""
DRAWN_ROWS = 4096
"""Least number of rows that are drawn for the mean of small batches."""


def begins_in_turn(lengths: Sequence[float], slots: int) -> list[float]:
    """Return when each row begins, in decoded tokens."""
    running = [*lengths[:slots]]
    begins = [0.0] * len(running)
    heapq.heapify(running)
    for length in lengths[slots:]:
        begins.append(running[0])
        heapq.heapreplace(running, running[0] + length)
    return begins


def turns_s(workload: Workload, decoder: Decoder, rows: int, slots: int) -> Floats:
    """Return the seconds until each replica's last row has ended, ``[batches, replicas]``.

    Args:
        workload: the rows of a step.
        decoder: a replica.
        rows: rows of a batch; each replica gets a contiguous block.
        slots: most running rows of a replica.
    """
    running, tokens, sampled = _turns(workload, rows, decoder.replicas, slots)
    decoded_s = tokens * decoder.token_s(running, running * workload.prompt.mean + sampled)
    alike = workload.samples if workload.shares_prompts and rows >= workload.rows else 1
    bounds = _bounds(rows, decoder.replicas)
    prompts = -(-bounds[1:] // alike) - bounds[:-1] // alike
    entry_s = decoder.begin_s + np.diff(bounds) * decoder.row_begin_s
    seconds: Floats = decoded_s.sum(axis=-1) + prompts * decoder.prefill_s(workload.prompt.mean) + entry_s
    return seconds


def _bounds(rows: int, replicas: int) -> NDArray[np.int64]:
    """Return the first row of each replica, and the number of rows."""
    return -(-np.arange(replicas + 1) * rows // replicas)


@lru_cache(maxsize=256)
def _turns(workload: Workload, rows: int, replicas: int, slots: int) -> tuple[Floats, Floats, Floats]:
    """Return the running rows, the gained tokens and the sampled context between ends of rows.

    Each is ``[batches, replicas, rows of a replica]``, or ``[rows of a replica]`` for the running rows.
    """
    size, samples = BLOCK * workload.prompts, workload.samples
    blocks = [
        drawn(workload.response, block, seed=0, size=size, count=samples, kept=samples)
        for block in range(max(DRAWN_ROWS // (size * samples), 1))
    ]
    batches = np.resize(np.swapaxes(blocks, 1, 2), (max(np.size(blocks) // rows, 1), rows))
    parts = np.split(batches, _bounds(rows, replicas)[1:-1], axis=1)
    most = max(part.shape[1] for part in parts)
    lengths = np.stack([np.pad(part, ((0, 0), (0, most - part.shape[1]))) for part in parts], axis=1)
    begins = np.array([begins_in_turn(lane, slots) for lane in lengths.reshape(-1, most).tolist()])
    begins = begins.reshape(lengths.shape)
    order = np.argsort(begins + lengths, axis=-1, kind="stable")
    ends = np.take_along_axis(begins + lengths, order, axis=-1)
    tokens, places = np.diff(ends, axis=-1, prepend=0.0), np.arange(most)
    running = np.minimum(slots, most - places).astype(np.float64)
    left = np.cumsum(np.take_along_axis(begins, order, axis=-1), axis=-1)
    entered = np.cumsum(begins, axis=-1)[..., np.minimum(places + slots, most) - 1]
    begun = entered - np.pad(left, ((0, 0), (0, 0), (1, 0)))[..., :-1]
    return running, tokens, running * (ends - tokens / 2) - begun
