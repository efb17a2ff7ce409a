"""Runner: runs the passes of a step on the module and its cache.

    Step ─┬─ bands, copies ────────────────────> Cache ─┐
          ├─ prefills ─> Prefixes, Continued ─┐         │
    Slots ┴─ Feed ────────────────────────────┴─> pass <┘ ─> logits [n, V]

With ``fixed_rows`` shapes do not depend on the running rows: a pass feeds all slots and reads the cache in
whole blocks, and each prefix gets its own pass, padded to a whole block. See docs/design/rollout.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

from torch import Tensor, nn

from rillflow.rollout.native.cache import Cache
from rillflow.rollout.native.passes import Continued, Feed, Prefixes, Segment
from rillflow.rollout.native.recording import RecordedModule
from rillflow.rollout.native.scheduler import Prefill, Step

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
        self.cache.arrange(step.bands, step.copies)
        names = [band.name for band in step.bands]
        grain = CACHE_BLOCK if fixed else 1
        reaches = [-(-reach // grain) * grain for reach in step.reaches]
        ends = [*accumulate(len(band.members) for band in step.bands)]
        shares = feed.positions.tensor_split(ends[:-1])  # idle slots belong to the last band
        if fixed:
            none = [feed.positions[:0]] * len(names)
            for prefill in step.prefills:
                fill = -len(prefill.tokens) % BLOCK
                self._read(names, reaches, none, None, [prefill], fill)
            return self._read(names, reaches, shares, feed.tokens, [])
        return self._read(names, reaches, shares, feed.tokens, step.prefills)

    def _read(
        self,
        names: Sequence[int],
        reaches: Sequence[int],
        shares: Sequence[Tensor],
        tokens: Tensor | None,
        prefills: Sequence[Prefill],
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

    def release(self) -> None:
        """Free the cache's memory; after that, the module's weights may be replaced."""
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
