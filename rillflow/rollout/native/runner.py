"""Runner: runs the passes of a step on the module and its cache, and records them after some use.

    Step ─┬─ buckets, copies ─────────────────> Cache ──┐
          ├─ prefills ─> Prefixes, Continued ─┐         │
    Slots ┴─ Feed ────────────────────────────┴─> pass <┘ ─> logits [n, V]

With ``fixed_rows`` shapes do not depend on the running rows: a pass feeds all slots and reads the cache in
whole blocks, and each prefix gets its own pass, padded to a whole block. See docs/design/rollout.md.

    passes so far < record_after ──> the module itself
    passes so far = record_after ──> record one, compare with the module at other shapes, bit by bit
                                      ├ equal ─> the recording from now on
                                      └ else ──> the module itself from now on

A pass of few rows spends as much time between operations as in them. A recording (``torch.jit.trace``)
runs the same operations on the same parameters: it gives the same bits, and it sees weights that change in
place. Recording is optional: if the module's Python code depends on a tensor's value, which a recording
would freeze, the tracer warns and the recording is dropped. On CUDA, passes that only feed rows run as CUDA
graphs instead (``cuda_graphs``).
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from itertools import accumulate
from math import inf

import torch
from torch import Tensor, nn
from torch.jit import TracerWarning  # type: ignore[attr-defined]

from rillflow.models.language_model import quiet
from rillflow.rollout.native.cache import Cache, Layer, LayerShape
from rillflow.rollout.native.cache_layout import CacheRow, LengthBucket
from rillflow.rollout.native.cuda_graphs import GraphedPasses
from rillflow.rollout.native.passes import ROUTES, Continued, Feed, Prefixes, Segment, forward
from rillflow.rollout.native.scheduler import Prefill, Sequence, Step

BLOCK = 32
"""Fixed shapes are multiples of this, so that no matrix kernel handles a partial block."""
CACHE_BLOCK = 64
"""With fixed shapes, the length of cache read is a multiple of this."""


class Runner:
    """The module and its cache.

    Args:
        module: a transformers causal language model with Rillflow's attention.
        cache: the cache for this module.
        fixed_rows: number of slots that every pass feeds; None feeds the running rows only.
    """

    def __init__(self, module: RecordedModule, cache: Cache, fixed_rows: int | None = None) -> None:
        self._module = module
        self.cache = cache
        """Keys and values of the running rows."""
        self._fixed_rows = fixed_rows
        self._idle = True

    def run(self, step: Step, feed: Feed) -> Tensor:
        """Run the passes of a step.

        Args:
            step: the scheduler's instructions.
            feed: tokens and positions of n slots; with ``fixed_rows``, of all slots.

        Returns:
            [n, V] float32 logits of the token after the fed one.
        """
        fixed = self._fixed_rows is not None
        if self._idle:
            self._module.check_weights()
            self._idle = False
        self.cache.arrange(step.buckets, step.copies)
        for row, states in step.loads:
            self.cache.write(row, states)
        for bucket, reach in zip(step.buckets, step.reaches, strict=True):
            assert len(bucket.members) <= bucket.rows and reach <= bucket.length, "see own-positions"
        names = [bucket.name for bucket in step.buckets]
        grain = CACHE_BLOCK if fixed else 1
        reaches = [-(-reach // grain) * grain for reach in step.reaches]
        ends = [*accumulate(len(bucket.members) for bucket in step.buckets)]
        shares = feed.positions.tensor_split(ends[:-1])  # idle slots belong to the last bucket
        if fixed:
            none = [feed.positions[:0]] * len(names)
            for prefill in step.prefills:
                fill = -len(prefill.tokens) % BLOCK
                self._read(names, reaches, none, None, [prefill], fill)
            return self._read(names, reaches, shares, feed.tokens, [])
        return self._read(names, reaches, shares, feed.tokens, step.prefills)

    def _read(
        self,
        names: Rows[int],
        reaches: Rows[int],
        shares: Rows[Tensor],
        tokens: Tensor | None,
        prefills: Rows[Prefill],
        fill: int = 0,
    ) -> Tensor:
        """Run one pass."""
        device = shares[0].device
        fresh = [prefill for prefill in prefills if not prefill.begin]
        later = [prefill for prefill in prefills if prefill.begin]
        return self._module.forward(
            self.cache.layers,
            Segment.of(names, reaches, shares, [*fresh, *later]),
            tokens,
            Prefixes.of(fresh, device, fill) if fresh else None,
            Continued.of(later, device, fill) if later else None,
        )

    def follow_weights(self) -> None:
        """Use the module's new weights while rows run."""
        self._module.check_weights()
        self._module.release()

    def release(self) -> None:
        """Free the cache's memory; after that, the module's weights may be replaced."""
        self._module.release()
        self.cache.release()
        self._idle = True


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Turn off training mode (dropout, recomputation) inside the context; restore it afterwards."""
    training = [part for part in module.modules() if part.training] if module.training else []
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


_log = logging.getLogger(__name__)
_TRIALS = ((3, (2, 1)), (1, (2,)), (5, (1, 3, 2, 3)), (4, (3,)))
"""Rows, and lengths of their prefixes: the first trial is recorded, all are compared."""
_AT = 2
"""The position fed by a trial's rows without a prefix."""
_REPEATS = 3
"""Comparisons per trial: the compiler rewrites a recording at its second call, and not afterwards."""
_RECORDER = threading.Lock()
"""Lock for one recording at a time, because the tracer's warnings are global to the process."""


_Kind = tuple[bool, bool, int]
"""Kind of a pass, recorded separately: whether it feeds rows and reads prefixes, number of buckets."""


_Layers = Mapping[int, Mapping[int, Layer]]
"""Keys and values by layer and bucket."""


class RecordedModule:
    """A module that records its passes after some use.

    Args:
        module: a transformers causal language model with Rillflow's attention.
        shapes: shapes of its layers' keys and values.
        record_after: passes of the same kind before that kind is recorded.
        has_fixed_rows: whether every pass feeds the same number of rows, so that none may be added.
    """

    def __init__(
        self,
        module: nn.Module,
        shapes: Mapping[int, LayerShape],
        record_after: float,
        *,
        has_fixed_rows: bool = False,
    ) -> None:
        self._module = module
        self._shapes = shapes
        self._record_after = record_after
        self._weights = _weights(module)
        self._passes: Counter[_Kind] = Counter()
        self._recordings: dict[_Kind, nn.Module | None] = {}
        self._graphed: GraphedPasses | None = None
        if self._weights[0].device.type == "cuda":
            self._record_after = inf  # graphs take the place of traces
            if ROUTES not in shapes:
                self._graphed = GraphedPasses(
                    module, captures=record_after < inf, rounds_rows=not has_fixed_rows
                )

    def release(self) -> None:
        """Discard what depends on the cache's memory."""
        if self._graphed is not None:
            self._graphed.release()

    def check_weights(self) -> None:
        """Drop all recordings if the module has other parameter or buffer tensors than before."""
        weights = _weights(self._module)
        if list(map(id, weights)) != list(map(id, self._weights)):
            self._weights = weights
            self._recordings.clear()
            self.release()

    def forward(
        self,
        layers: _Layers,
        segments: Mapping[int, Segment],
        tokens: Tensor | None,
        prefixes: Prefixes | None = None,
        continued: Continued | None = None,
    ) -> Tensor:
        """See ``passes.forward``; a pass with ``continued`` loops over its parts, so it is not recorded."""
        if continued is not None:
            return forward(self._module, layers, segments, tokens, prefixes, continued)
        if self._graphed is not None and tokens is not None and prefixes is None:
            return self._graphed.forward(layers, segments, tokens)
        kind = (tokens is not None, prefixes is not None, len(segments))
        if kind not in self._recordings and self._passes[kind] >= self._record_after:
            self._recordings[kind] = self._record(kind)
        recording = self._recordings.get(kind)
        if recording is None:
            self._passes[kind] += 1
            return forward(self._module, layers, segments, tokens, prefixes)
        logits: Tensor = recording(*_flat(layers, segments, tokens, prefixes))
        return logits

    def _record(self, kind: _Kind) -> nn.Module | None:
        """Return the module's recording; None if it is not equivalent to the module."""
        embedding: Tensor = self._module.get_input_embeddings().weight  # type: ignore[operator]
        trials = [_Trial(self._shapes, embedding, kind, rows, lengths) for rows, lengths in _TRIALS]
        recorded = _Traced(self._module, tuple(self._shapes), kind)
        try:
            with _RECORDER, quiet(), warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                recording: nn.Module = torch.jit.trace(  # type: ignore[no-untyped-call]
                    recorded, trials[0].inputs(), check_trace=False
                )
            doubts = [str(warning.message) for warning in said if issubclass(warning.category, TracerWarning)]
            if not doubts and not all(trial.agree(recorded, recording) for trial in trials * _REPEATS):
                doubts = ["the recording's results differ from the module's"]
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            doubts = [f"recording failed with {type(error).__name__}: {error}"]
        if doubts:
            _log.info(
                "%s runs without recording: %s",
                type(self._module).__name__,
                doubts[0].strip().splitlines()[0],
            )
            return None
        return recording


class _Traced(nn.Module):
    """A pass as a function of tensors only."""

    def __init__(self, module: nn.Module, indices: tuple[int, ...], kind: _Kind) -> None:
        super().__init__()
        self.module = module
        self._indices = indices
        self._kind = kind

    def forward(self, *tensors: Tensor) -> Tensor:
        """Return [n, V] from the flat list of tensors that ``_flat`` made."""
        line = list(tensors)
        reads_rows, reads_prefixes, buckets = self._kind
        layers = {
            index: {name: Layer(line.pop(0), line.pop(0)) for name in range(buckets)}
            for index in self._indices
        }
        segments = {
            name: Segment(read=line.pop(0), positions=line.pop(0), filled=line.pop(0))
            for name in range(buckets)
        }
        tokens = line.pop(0) if reads_rows else None
        prefixes = Prefixes.of_tensors(line) if reads_prefixes else None
        return forward(self.module, layers, segments, tokens, prefixes)


class _Trial:
    """A small pass over an empty cache."""

    def __init__(
        self,
        shapes: Mapping[int, LayerShape],
        embedding: Tensor,
        kind: _Kind,
        rows: int,
        lengths: tuple[int, ...],
    ) -> None:
        device, vocabulary = embedding.device, embedding.shape[0]
        reads_rows, reads_prefixes, buckets = kind
        positions = torch.full((buckets, rows if reads_rows else 0), _AT, device=device)
        prefills = [
            Prefill(tokens=tuple(range(size)), cache_rows=[CacheRow(buckets - 1, at)])
            for at, size in enumerate(lengths if reads_prefixes else ())
        ]
        if reads_rows and prefills:
            positions[-1, : len(lengths)] = torch.tensor(lengths, device=device)
        reach = max(_AT, *lengths) + 1
        names = range(buckets)
        self._segments = Segment.of(names, [reach] * buckets, positions.unbind(), prefills)
        self._prefixes = Prefixes.of(prefills, device) if prefills else None
        self._tokens = torch.arange(buckets * rows, device=device) % vocabulary if reads_rows else None
        self._buckets: list[LengthBucket[Sequence]] = [
            LengthBucket(name=name, length=reach, rows=rows) for name in names
        ]
        self._cache = Cache(shapes, device, embedding.dtype)

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the pass's tensors, with a new empty cache."""
        self._cache.release()
        self._cache.arrange(self._buckets)
        return _flat(self._cache.layers, self._segments, self._tokens, self._prefixes)

    def agree(self, one: nn.Module, other: nn.Module) -> bool:
        """Return whether both modules return the same bits and leave the same bits in the cache."""
        seen, left = self.inputs(), self.inputs()
        return torch.equal(one(*seen), other(*left)) and all(map(torch.equal, seen, left))


def _flat(
    layers: _Layers, segments: Mapping[int, Segment], tokens: Tensor | None, prefixes: Prefixes | None
) -> tuple[Tensor, ...]:
    states = [part for layer in layers.values() for name in segments for part in layer[name]]
    shares = [part for each in segments.values() for part in (each.read, each.positions, each.filled)]
    fed = () if tokens is None else (tokens,)
    return (*states, *shares, *fed, *(() if prefixes is None else prefixes.tensors))


def _weights(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
