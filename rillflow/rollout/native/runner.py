"""Runner: the module and its cache, doing what a step says.

    Step ─┬─ bands, copies ────────────────────> Cache ─┐
          ├─ prefills ─> Prefixes, Continued ─┐         │
    Slots ┴─ Feed ────────────────────────────┴─> pass <┘ ─> logits [n, V]

With ``fixed_rows`` every shape is fixed, whatever runs: a pass feeds all slots, reads the cache in
whole blocks, and each prefix is read alone, filled up to a whole block. See docs/design/rollout.md.
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
"""Fixed shapes are whole multiples of this: no matrix kernel meets a ragged edge."""
CACHE_BLOCK = 64
"""Cache positions read are a multiple of this when shapes are fixed."""


class Runner:
    """The module and its cache.

    Args:
        module: a transformers causal language model whose attention is Rillflow's.
        cache: made for it.
        fixed_rows: how many slots every pass feeds; None feeds those that run.
    """

    def __init__(self, module: RecordedModule, cache: Cache, fixed_rows: int | None = None) -> None:
        self._module = module
        self.cache = cache
        """Keys and values of the running rows."""
        self._fixed_rows = fixed_rows
        self._idle = True

    def run(self, step: Step, feed: Feed) -> Tensor:
        """Do what a step says.

        Args:
            step: the instructions.
            feed: what each of n slots feeds; with ``fixed_rows`` all slots do.

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
        shares = feed.positions.tensor_split(ends[:-1])  # idle slots are the last band's
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
        """One pass."""
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
        """Give the cache's memory back; weights may be exchanged after that."""
        self.cache.release()
        self._idle = True


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Without dropout and recomputation inside; afterwards every part is as it was."""
    training = [part for part in module.modules() if part.training] if module.training else []
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True
