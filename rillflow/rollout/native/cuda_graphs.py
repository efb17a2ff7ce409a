"""CUDA graphs: replay the kernels of a pass that only feeds rows, without the CPU's work between them.

    tokens, positions [n] ── copied into buffers [N] ─> graph of this shape ─> logits [N, V] ── the first n
                             n rows rounded up to N      captured at its second pass
                             L positions read, up to a multiple too

On an H200 a pass of 128 rows of a 0.5B model takes 22 ms from Python and 6 ms as a graph. A graph has fixed
shapes and addresses. So rows and positions are rounded up, and a change of the cache's memory discards the
graphs. Additional rows write to places of the cache that no row uses, at position 0.

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
"""Graphs that are kept; more discard all."""

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

    @staticmethod
    def of(shape: _Shape, device: torch.device) -> _Buffers:
        segments, begins, total = dict[int, Segment](), dict[int, int](), 0
        for name, rows, reach, *_ in shape:
            segments[name] = Segment(
                read=torch.arange(reach, device=device),
                positions=torch.zeros(rows, dtype=torch.int64, device=device),
                filled=torch.zeros(3, 0, dtype=torch.int64, device=device),
            )
            begins[name] = total
            total += rows
        return _Buffers(
            tokens=torch.zeros(total, dtype=torch.int64, device=device), segments=segments, begins=begins
        )

    def fill(self, segments: Mapping[int, Segment], tokens: Tensor) -> None:
        """Copy a pass into the first rows of every bucket."""
        taken = 0
        for name, segment in segments.items():
            rows, begin = segment.positions.shape[0], self.begins[name]
            self.segments[name].positions[:rows].copy_(segment.positions)
            self.tokens[begin : begin + rows].copy_(tokens[taken : taken + rows])
            taken += rows

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
    """

    def __init__(self, module: nn.Module, *, captures: bool) -> None:
        self._module = module
        self._buffers: dict[_Shape, _Buffers] = {}
        self._graphs: dict[_Shape, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._logits: dict[int, Tensor] = {}
        self._can_capture = captures
        self._pool: Any = None

    def forward(self, layers: _Layers, segments: Mapping[int, Segment], tokens: Tensor) -> Tensor:
        """Return [n, V] logits of a pass; see ``passes.forward``."""
        shape = rounded(layers, segments)
        buffers = self._buffers.get(shape)
        is_first = buffers is None
        if buffers is None:
            if len(self._buffers) >= MOST_GRAPHS:
                self.release()
            buffers = self._buffers[shape] = _Buffers.of(shape, tokens.device)
        buffers.fill(segments, tokens)
        graph = self._graphs.get(shape)
        if graph is not None:
            graph[0].replay()
            return buffers.taken(segments, graph[1])
        logits = forward(self._module, layers, buffers.segments, buffers.tokens)
        if not is_first and self._can_capture:
            self._capture(shape, layers, buffers, logits)
        return buffers.taken(segments, logits)

    def release(self) -> None:
        """Discard all graphs and buffers, before the memory of the cache or of the weights changes."""
        self._graphs.clear()
        self._buffers.clear()
        self._logits.clear()
        self._pool = None

    def _capture(self, shape: _Shape, layers: _Layers, buffers: _Buffers, expected: Tensor) -> None:
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
            self._graphs[shape] = graph, logits


def rounded_rows(rows: int) -> int:
    """Return the next of 16, 24, 32, 48, 64, 96, ...: few shapes, and at most half more rows than needed."""
    size = LEAST_ROWS
    while size < rows:
        size *= 2
    return 3 * size // 4 if LEAST_ROWS < rows <= 3 * size // 4 else size


def rounded(layers: _Layers, segments: Mapping[int, Segment]) -> _Shape:
    """Return the shape of a pass, with rows and positions rounded up within the cache's memory."""
    found = list[tuple[int, ...]]()
    for name, segment in segments.items():
        parts = [states for layer in layers.values() for states in layer[name]]
        rows, _, length, _ = parts[0].shape
        most_rows = rounded_rows(segment.positions.shape[0])
        reach = -(-segment.read.shape[0] // POSITIONS) * POSITIONS
        addresses = (states.data_ptr() for states in parts)
        found.append((name, min(rows, most_rows), min(length, reach), *addresses))
    return tuple(found)
