"""Top-k of hidden states at the cuts of a pipeline, with one mask for both directions (DCT, FusionLLM).

    stage s    [1, U, D] ─ k largest of each token ─> values, places [1, U, k] ─> stage s + 1: others are 0
    stage s    gradients of the kept values <──────── values [1, U, k] <───────── stage s + 1

With one ratio for all cuts this is DCT's model parallelism (arXiv 2010.08899) with an exact k. AdaTopK of
FusionLLM (arXiv 2410.12707) compresses a cut in proportion to its time: the slowest by the full ratio.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MOST_SHORT = 2**15
"""Largest hidden size whose places fit 16 bits."""


class CutTopK:
    """Sends the k largest values of each token; see ``CutCodec``.

    Args:
        ratios: hidden size over k, for every cut; the last one also holds for later cuts.
    """

    def __init__(self, ratios: Sequence[float]) -> None:
        self._ratios = tuple(ratios)

    def kept(self, width: int, cut: int) -> int:
        """Return k for a hidden size."""
        return max(1, round(width / self._ratios[min(cut, len(self._ratios) - 1)]))

    def compress(self, state: Tensor, cut: int) -> tuple[Tensor, ...]:
        """See CutCodec."""
        width = state.shape[-1]
        places = state.detach().abs().topk(self.kept(width, cut), dim=-1, sorted=False).indices
        kind = torch.int16 if width <= MOST_SHORT else torch.int32
        return state.gather(-1, places), places.to(kind)

    def expand(self, sent: tuple[Tensor, ...], width: int, cut: int) -> Tensor:
        """See CutCodec."""
        del cut
        values, places = sent
        return values.new_zeros(*values.shape[:-1], width).scatter(-1, places.long(), values)


def adapted(ratio: float, link_seconds: Sequence[float]) -> list[float]:
    """Return AdaTopK's ratio of every cut: ``max(1, ratio R_e / max R)`` for the seconds R_e of its link."""
    slowest = max(link_seconds)
    return [max(1.0, ratio * each / slowest) for each in link_seconds]
