"""CUDA graphs: replay the kernels of a pass that only feeds rows, without work of the CPU between kernels.

    tokens, positions [n] ── copied into buffers [N] ─> graph of this shape ─> logits [N, V] ── the first n
                             n rows rounded up to N      captured at its second pass
                             L positions read, up to a multiple too

On an H200 a pass of 128 rows of a 0.5B model takes 22 ms from Python and 6 ms as a graph. A graph has fixed
shapes and addresses. So rows and positions are rounded up, and a change of the cache's memory discards the
graphs.

Padding rows keep the invariant own-positions (see ``cache_layout``): they write where the bucket's first row
writes in the next step, and it overwrites them before it reads that position.

    bucket's first row   k k k k F . . .      k kept, F fed in this pass, P padding
    padding              . . . . . P . .      all of it at one position, which no row reads
    rows that have left  k k k k k k . .      unchanged: the prefix index offers them

If the longest row of a bucket fills its last position, no position is free, and its rows are not rounded.

A pass is rounded in the same way before its graph exists, and the first replay is compared with the module,
bit by bit. If capturing fails, or bits differ, the module runs by itself from then on. So a graph changes no
bit.

Legend: n rows of a bucket, N rounded; L cache positions read; V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rillflow.rollout.native.cache import Layer
from rillflow.rollout.native.passes import Segment, forward

LEAST_ROWS, POSITIONS = 16, 128
"""Smallest number of rows; positions are rounded up to a multiple."""
MOST_GRAPHS = 32
"""Most graphs that are kept; beyond this number all are discarded."""

_log = logging.getLogger(__name__)

_Layers = Mapping[int, Mapping[int, Layer]]
_Shape = tuple[tuple[int, ...], ...]
"""For every bucket: its name, N, L, and the addresses of its keys and values."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Buffers:
    """Inputs of a rounded pass, at fixed addresses."""

    tokens: Tensor
    """[sum of N] int64."""
    segments: dict[int, Segment]
    """Reads and writes of every bucket."""
    begins: dict[int, int]
    """Index of every bucket's first row."""
    fed: dict[int, int]
    """Rows of every bucket without padding in the last pass."""

    @staticmethod
    def of(shape: _Shape, device: torch.device) -> _Buffers:
        segments, begins, total = dict[int, Segment](), dict[int, int](), 0
        for name, rows, reach, *_ in shape:
            segments[name] = Segment(
                read=torch.arange(reach, device=device),
                positions=torch.zeros(rows, dtype=torch.int64, device=device),
                filled=torch.zeros(3, 0, dtype=torch.int64, device=device),
                rows=torch.arange(rows, device=device),
            )
            begins[name] = total
            total += rows
        tokens = torch.zeros(total, dtype=torch.int64, device=device)
        fed = {name: rows for name, rows, *_ in shape}
        return _Buffers(tokens=tokens, segments=segments, begins=begins, fed=fed)

    def fill(self, segments: Mapping[int, Segment], tokens: Tensor) -> None:
        """Copy a pass into the first rows of every bucket, and aim the padding at its first row."""
        taken = 0
        for name, segment in segments.items():
            count, begin, own = segment.positions.shape[0], self.begins[name], self.segments[name]
            own.positions[:count].copy_(segment.positions)
            self.tokens[begin : begin + count].copy_(tokens[taken : taken + count])
            taken += count
            if count < len(own.positions):
                own.positions[count:].copy_(segment.positions[0] + 1)
            if count != self.fed[name]:
                assert own.rows is not None
                torch.arange(len(own.rows), out=own.rows)
                own.rows[count:].zero_()
                self.fed[name] = count

    def taken(self, segments: Mapping[int, Segment], logits: Tensor) -> Tensor:
        """Return a copy of the rows' logits."""
        parts = [
            logits[self.begins[name] : self.begins[name] + segment.positions.shape[0]]
            for name, segment in segments.items()
        ]
        return torch.cat(parts) if len(parts) > 1 else parts[0].clone()


class GraphedPasses:
    """Passes that only feed rows, in rounded shapes, as CUDA graphs.

    Args:
        module: a transformers causal language model with Rillflow's attention.
        captures: whether to capture graphs; otherwise every pass is rounded and runs by itself.
        rounds_rows: whether to round up rows; positions are always rounded.
    """

    def __init__(self, module: nn.Module, *, captures: bool, rounds_rows: bool = True) -> None:
        self._module = module
        self._rounds_rows = rounds_rows
        self._buffers: dict[_Shape, _Buffers] = {}
        self._graphs: dict[_Shape, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._logits: dict[int, Tensor] = {}
        self._can_capture = captures
        self._pool: Any = None

    def forward(self, layers: _Layers, segments: Mapping[int, Segment], tokens: Tensor) -> Tensor:
        """Return [n, V] logits of a pass; see ``passes.forward``."""
        shape = rounded(layers, segments, rounds_rows=self._rounds_rows)
        key = (*shape, _lengths(layers, segments))
        buffers = self._buffers.get(key)
        is_first = buffers is None
        if buffers is None:
            if len(self._buffers) >= MOST_GRAPHS:
                self.release()
            buffers = self._buffers[key] = _Buffers.of(shape, tokens.device)
        buffers.fill(segments, tokens)
        graph = self._graphs.get(key)
        if graph is not None:
            graph[0].replay()
            return buffers.taken(segments, graph[1])
        logits = forward(self._module, layers, buffers.segments, buffers.tokens)
        if not is_first and self._can_capture:
            self._capture(key, layers, buffers, logits)
        return buffers.taken(segments, logits)

    def release(self) -> None:
        """Discard all graphs and buffers, before the memory of the cache or of the weights changes."""
        self._graphs.clear()
        self._buffers.clear()
        self._logits.clear()
        self._pool = None

    def _capture(self, key: _Shape, layers: _Layers, buffers: _Buffers, expected: Tensor) -> None:
        """Capture the pass that has just run, and keep the graph if it gives the same bits."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()  # one: only one graph runs at a time
        graph, logits = torch.cuda.CUDAGraph(), self._logits.setdefault(len(expected), expected.clone())
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    logits.copy_(forward(self._module, layers, buffers.segments, buffers.tokens))
                finally:
                    graph.capture_end()
            logits.zero_()
            graph.replay()
            doubt = "" if torch.equal(logits, expected) else "its logits differ from the module's"
        except RuntimeError as error:
            doubt = f"{type(error).__name__}: {error}".splitlines()[0]
        if doubt:
            self._can_capture = False
            _log.info("%s runs without CUDA graphs: %s", type(self._module).__name__, doubt)
        else:
            self._graphs[key] = graph, logits


def rounded_rows(rows: int) -> int:
    """Return the next of 16, 24, 32, 48, 64, 96, ...: few shapes, and at most half more rows than needed."""
    size = LEAST_ROWS
    while size < rows:
        size *= 2
    return 3 * size // 4 if LEAST_ROWS < rows <= 3 * size // 4 else size


def rounded(layers: _Layers, segments: Mapping[int, Segment], *, rounds_rows: bool = True) -> _Shape:
    """Return the shape of a pass, with rows and positions rounded up within the cache's memory.

    Rows are rounded only in buckets with a free position behind every row, where the padding writes.
    """
    shapes = list[tuple[int, ...]]()
    for name, segment in segments.items():
        parts = [states for layer in layers.values() for states in layer[name]]
        most_rows, _, length, _ = parts[0].shape
        rows, reach = segment.positions.shape[0], segment.read.shape[0]
        if rounds_rows and rows and reach < length:
            rows = min(most_rows, rounded_rows(rows))
        read = min(length, -(-reach // POSITIONS) * POSITIONS)
        shapes.append((name, rows, read, *(states.data_ptr() for states in parts)))
    return tuple(shapes)


def _lengths(layers: _Layers, segments: Mapping[int, Segment]) -> tuple[int, ...]:
    """Return the positions of a row in each bucket; new memory at the same address may have others."""
    buckets = next(iter(layers.values()))
    return tuple(buckets[name].keys.shape[2] for name in segments)
