"""Generation: replicas that decode token by token, and how their rows drain.

rows ─ replicas ─> rows of one replica, including the longest of all rows
                      │  as many running rows as the cache holds; a row that ends makes room for the next
                      v
  running rows j: tau(j) = max(bytes read / bandwidth, FLOPs / peak) + launches + collectives
                      │
                      v
  T = prefill + sum over ends of tau(j) x tokens until the next row ends
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from operator import add
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rillflow.placement.grid import Numbers
from rillflow_planner.cost_model.compute import Setting, touched_s
from rillflow_planner.cost_model.links import all_reduce_s
from rillflow_planner.cost_model.turns import begins_in_turn
from rillflow_planner.workload import Lengths, Workload

SEGMENTS = 96
"""Number of row ends that a drain resolves: half for the last rows, half for groups of earlier rows."""
_RUNGS = tuple(sorted({int(2 ** (step / 4)) for step in range(80)}))
PREFILL_TOKENS = 8192
"""Number of tokens of one prefill pass."""


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Constants of one replica; they give the seconds for any number of rows.

    Batching is continuous: a row that ends makes room for a waiting row.
    """

    replicas: int
    """Number of equal replicas on the pool's devices."""
    capacity_tokens: int
    """Number of context tokens that fit into the KV cache."""
    most_rows: int
    """Largest number of running rows."""
    trunk_s: float
    """Seconds to read the weights that every token needs: trunk and head."""
    experts_s: float
    """Seconds to read all routed experts."""
    missed_share: float
    """Share of experts that one row does not use; 1 for a dense model."""
    cache_s: float
    """Seconds to read one token's keys and values."""
    row_s: float
    """Compute seconds of one row's matrix products."""
    pair_s: float
    """Compute seconds of one row's attention to one token."""
    launch_s: float
    """Seconds of one token's kernel launches and collective latencies."""
    link_s: float
    """Additional seconds per row: bytes in collectives, activations, scheduling, sampling."""
    prefill_token_s: float
    """Seconds of one prompt token's products, and of its attention in a prompt of mean length."""
    hidden: float
    """Share of memory reads that overlaps with products."""
    row_begin_s: float
    """Seconds per row independent of its tokens."""
    begin_s: float
    """Seconds per stage independent of its tokens: the call to several devices, and a pass's launches."""
    tokens_per_pass: float = 1.0
    """Tokens that a row gains per pass."""

    def advance_s(self, rows: float, context_tokens: float, tokens: float) -> float:
        """Return the seconds in which ``rows`` rows with ``context_tokens`` in total gain ``tokens`` each."""
        if rows <= 0 or tokens <= 0:
            return 0.0
        context = context_tokens + rows * tokens / 2
        return float(tokens * self.token_s(rows, context))

    def token_s(self, rows: Numbers, context_tokens: Numbers) -> Numbers:
        """Return the seconds of one token of every running row: the larger of reads and computation.

        Arguments may be arrays.

        ``max(weights + cache, products + attention) + launches + collectives``, plus reads that do not
        overlap. A mixture reads the experts that at least one of the rows chose.
        """
        chosen = 1.0 - self.missed_share**rows
        read_s = self.trunk_s + chosen * self.experts_s + context_tokens * self.cache_s
        compute_s = rows * self.row_s + context_tokens * self.pair_s
        waited_s = (1.0 - self.hidden) * read_s
        longer_s = (self.hidden * read_s + compute_s + abs(self.hidden * read_s - compute_s)) / 2
        return (longer_s + waited_s + self.launch_s + rows * self.link_s) / self.tokens_per_pass

    def prefill_s(self, tokens: float) -> float:
        """Return the seconds to prefill prompts of ``tokens`` in total."""
        return tokens * self.prefill_token_s


def cached_bytes(setting: Setting, generate_tp: Numbers) -> Any:
    """Return the bytes of one token's keys and values per device of a copy; latents are not sharded."""
    ways = 1 if setting.shape.latent else np.minimum(generate_tp, setting.shape.kv_heads)
    return setting.shape.cache_numbers(setting.workload.running_tokens) * setting.item_bytes / ways


def decoder_of(setting: Setting, generate_tp: int, devices: int, room_bytes: float) -> Decoder | None:
    """Return a replica with this room for its cache on each device; None if its longest row does not fit."""
    shape, factors, workload = setting.shape, setting.factors, setting.workload
    device, tp, item = setting.fleet.device, generate_tp, setting.item_bytes
    cached = float(cached_bytes(setting, tp))
    capacity = int(max(room_bytes, 0.0) // cached) if math.isfinite(room_bytes) else 0
    if capacity < workload.longest_tokens:
        return None
    bandwidth = device.memory_bandwidth * factors.decode_bandwidth
    decoding, reading = setting.peak * factors.decode_flops, setting.peak * factors.score_flops
    rounds = 2 * shape.layers if tp > 1 else 0
    latency = float(all_reduce_s(setting.links, 0.0, tp)) * rounds
    touched = float(touched_s(setting, tp)) * shape.layers
    one_row = float(all_reduce_s(setting.links, shape.hidden * item, tp)) * rounds
    trunk = shape.trunk_parameters + shape.head_parameters
    return Decoder(
        replicas=max(devices // tp, 1),
        capacity_tokens=capacity,
        most_rows=workload.rows_at_once,
        trunk_s=trunk * item / tp / bandwidth,
        experts_s=shape.routed_parameters * item / tp / bandwidth,
        missed_share=1.0 - shape.experts_per_token / shape.experts if shape.is_mixture else 1.0,
        cache_s=cached / bandwidth,
        row_s=setting.token_flops / tp / decoding,
        pair_s=shape.attention_flops(1.0, workload.running_tokens) / tp / decoding,
        launch_s=factors.decode_token_s + shape.layers * factors.decode_launch_s + latency,
        link_s=one_row - latency + factors.decode_row_s + touched,
        prefill_token_s=setting.token_flops / tp / reading
        + touched
        + (shape.layers * factors.launch_s + latency) / PREFILL_TOKENS
        + (one_row - latency)
        + shape.attention_flops(workload.prompt.mean / 2, workload.prompt.mean / 2) / tp / reading,
        hidden=factors.hidden,
        row_begin_s=factors.row_s,
        begin_s=(factors.call_s if devices > 1 else 0.0) + factors.pass_s + shape.layers * factors.launch_s,
        tokens_per_pass=workload.tokens_per_pass,
    )


def running_rows(workload: Workload, decoder: Decoder) -> int:
    """Return the rows that run at once while others wait: the capacity of the cache for rows of all ages.

    A running row at a random time has the prompt and, on average, half of a response weighted by length:
    ``p + E[L^2] / (2 E[L])``. Rows of equal length grow together, and all need room for their last token.
    """
    response = workload.response
    held = workload.prompt.mean + response.limit if response.kind == "fixed" else workload.running_tokens
    return max(min(decoder.most_rows, int(decoder.capacity_tokens / max(held, 1.0))), 1)


@lru_cache(maxsize=1024)
def replica_lengths(response: Lengths, count: int, longest_of: int) -> NDArray[np.float64]:
    """Return ascending response lengths of a replica's rows.

    The last is the longest of ``longest_of`` rows.
    """
    *others, last = response.spread(count)
    longest = float(response.longest(longest_of).mean())
    return np.array([*others, max(longest, last) if longest_of > count else longest])


def busiest_lengths(response: Lengths, lengths: NDArray[np.float64], replicas: int) -> NDArray[np.float64]:
    """Return a replica's lengths, longer as in the one of many replicas that has the most tokens.

    A sum of n lengths has the deviation ``sqrt(n) s``; the largest of R sums lies z deviations above the
    mean, where ``N(z) = 0.5^(1 / R)``.
    """
    deviation = math.sqrt(max(response.mean_square - response.mean**2, 0.0))
    more = NormalDist().inv_cdf(0.5 ** (1.0 / replicas)) * deviation / math.sqrt(len(lengths))
    return np.minimum(lengths * (1 + max(more, 0.0) / response.mean), max(lengths[-1], 1.0))


def prompt_tokens(workload: Workload, rows: int, replicas: int) -> float:
    """Return the prompt tokens that one replica prefills; a shared prompt can count once."""
    count = max(rows / replicas, 1.0)
    alike = workload.samples if workload.shares_prompts else 1
    return max(count / alike, 1.0) * workload.prompt.mean


def at_once(workload: Workload, decoder: Decoder, lengths: NDArray[np.float64]) -> int:
    """Return the concurrent rows of a drain: all if their contexts fit, else the next lower rung of a ladder.

    Rungs are a fourth root of 2 apart, so that drains with nearly the same room are computed once.
    """
    count = len(lengths)
    growing = np.arange(count, 0, -1) * (workload.prompt.mean + lengths)
    if count <= decoder.most_rows and float(np.max(growing)) <= decoder.capacity_tokens:
        return count
    slots = min(running_rows(workload, decoder), count)
    if workload.response.kind == "fixed":
        return slots
    return _RUNGS[max(bisect_right(_RUNGS, min(slots, count - 1)) - 1, 0)]


def drain_s(
    workload: Workload, decoder: Decoder, lengths: NDArray[np.float64], slots: int | None = None
) -> float:
    """Return the seconds until the last row has its length, with as many running rows as fit or ``slots``.

    If all rows run at once, rows sorted by length give ``T = sum_j tau(j) (L_j - L_{j+1})``. Otherwise a row
    that ends passes its slot to the next, and the last running rows drain; fewer slots never take less time.
    Rows of equal length begin and end together, in equal waves.
    """
    places = slots or at_once(workload, decoder, lengths)
    count = len(lengths)
    seconds = _drain_all_s(workload, decoder, lengths, 0.0)
    if places >= count:
        return seconds
    if workload.response.kind == "fixed":
        waves = math.ceil(count / places)
        rows = count / waves
        return waves * decoder.advance_s(rows, rows * workload.prompt.mean, float(lengths[-1]))
    more = [rung for rung in _RUNGS if places < rung < count]
    return max(seconds, *(_waves_s(workload, decoder, lengths, one) for one in (places, *more)))


def _waves_s(workload: Workload, decoder: Decoder, lengths: NDArray[np.float64], slots: int) -> float:
    """Return the seconds of rows that use ``slots`` slots one after the other."""
    full, *ends = _ends_in_turn(lengths.tobytes(), slots)
    mean = workload.running_tokens
    filled_s = decoder.advance_s(slots, slots * (mean - full / 2), full)
    return filled_s + _drain_all_s(workload, decoder, np.array(ends) - full, mean - workload.prompt.mean)


@lru_cache(maxsize=1024)
def _ends_in_turn(lengths: bytes, slots: int) -> tuple[float, ...]:
    """Return the ends of the last rows, ascending, in decoded tokens; each row begins in the first free slot.

    The result has the end of the row that freed a slot for the last waiting row, then the ends of all rows
    that run after that. Rows begin in an order that mixes long and short ones: strides of the golden section.
    """
    known = np.frombuffer(lengths)
    mixed = known[np.argsort((np.arange(len(known)) * 0.6180339887498949) % 1.0, kind="stable")].tolist()
    begins = begins_in_turn(mixed, slots)
    return (begins[-1], *sorted(map(add, begins, mixed))[-slots:])


def _drain_all_s(workload: Workload, decoder: Decoder, ends: NDArray[Any], begun: float) -> float:
    """Return the seconds until running rows have ended after ``ends`` tokens, ascending, without new rows."""
    count = len(ends)
    apart = range(max(count - SEGMENTS // 2, 0), count)
    grouped = np.linspace(0, count - 1, SEGMENTS // 2).round().astype(int).tolist()
    seconds, before, done = 0.0, 0.0, 0
    for place in sorted({*grouped, *apart}):
        end = float(ends[place])
        running = count - (done + place) / 2
        context = running * (workload.prompt.mean + begun + before)
        seconds += decoder.advance_s(max(round(running), 1), context, end - before)
        before, done = end, place + 1
    return seconds
