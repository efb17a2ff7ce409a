"""Sampling: from logits to one token per row, by the inverse of the cumulative distribution.

    logits [n, V] ─ / temperature ─ log_softmax ─┬─> weights ─ cuts ─ search u ─────> token [n]
         │                                       └──────── at the token ──────────────> logprob [n]
         └ penalties ─ / temperature ─ softmax ────> weights, of rows with penalties

    cuts   min-p, then top-k, then top-p of the remaining tokens

A row's token depends only on its own logits, settings and uniform number: no operation mixes rows, and top-k
and top-p keep tokens by value, never by the order in which a sort leaves ties.

On a CPU the threshold of top-k and top-p is found without sorting a large vocabulary:

    weights [V] ── every 64th, sorted ──> estimate of the threshold
        └── partition around the estimate ──> some thousands of candidates, sorted ──> exact threshold

A partition takes numpy 0.3 ms where a full sort takes torch 11 ms.

Legend: n rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from rillflow.records.row import RowId
from rillflow.rollout.config import SamplingConfig

_BLOCK = 512
"""Block length of the search; vocabularies of up to two blocks are searched in one go."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DrawSettings:
    """Sampling settings of n rows; settings that no row uses are None or empty and cost nothing."""

    divisor: Tensor | None
    """[n, 1] float32 temperature, 1 for greedy rows; None when all are 1."""
    greedy: Tensor | None
    """[n] bool, true for rows of temperature 0; None when there are none."""
    filtered: Tensor
    """[f] int64 indices of the rows with top-k or top-p."""
    top_k: Tensor
    """[f] int64 their top-k; the vocabulary's size or more keeps all."""
    top_p: Tensor
    """[f] float64 their top-p."""
    most: int
    """Largest top-k of the filtered rows; 0 when one of them has none."""
    min_p: Tensor | None
    """[n, 1] float32 share of the largest probability that a token needs; None when no row has a min-p."""
    penalised: list[int]
    """Indices of the g rows with a penalty."""
    penalties: Tensor
    """[3, g, 1] float32 their repetition, presence and frequency penalties; 1, 0 and 0 for none."""

    @staticmethod
    def of(rows: Sequence[SamplingConfig], device: torch.device) -> DrawSettings:
        """Return the settings of n rows, in order."""
        divisors = [row.temperature or 1.0 for row in rows]
        greedy = [row.temperature == 0 for row in rows]
        asking = [index for index, row in enumerate(rows) if row.temperature and (row.top_k or row.top_p < 1)]
        least = [row.min_p for row in rows]
        bent = [index for index, row in enumerate(rows) if row.is_penalised]
        penalties = [
            [rows[index].repetition_penalty for index in bent],
            [rows[index].presence_penalty for index in bent],
            [rows[index].frequency_penalty for index in bent],
        ]
        unlimited = any(rows[index].top_k == 0 for index in asking)
        top_k = [rows[index].top_k or torch.iinfo(torch.int64).max for index in asking]
        return DrawSettings(
            divisor=torch.tensor(divisors, device=device)[:, None] if set(divisors) - {1.0} else None,
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            filtered=torch.tensor(asking, dtype=torch.int64, device=device),
            top_k=torch.tensor(top_k, dtype=torch.int64, device=device),
            top_p=torch.tensor([rows[i].top_p for i in asking], dtype=torch.float64, device=device),
            most=0 if unlimited else max((rows[index].top_k for index in asking), default=0),
            min_p=torch.tensor(least, device=device)[:, None] if any(least) else None,
            penalised=bent,
            penalties=torch.tensor(penalties, device=device)[:, :, None],
        )


class Seen:
    """Counts of every vocabulary token in the rows with a penalty.

    Args:
        vocabulary: size of the vocabulary.
        device: device of the logits.
    """

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self._vocabulary, self._device = vocabulary, device
        self._counts: dict[RowId, Tensor] = {}

    def begin(self, row: RowId, tokens: Sequence[int], sampled: Sequence[int]) -> None:
        """Start counting for a row: ``tokens`` are all of its tokens, ``sampled`` its sampled ones."""
        ids = [torch.tensor(each, dtype=torch.int64, device=self._device) for each in (tokens, sampled)]
        self._counts[row] = torch.stack([each.bincount(minlength=self._vocabulary) for each in ids]).float()

    def add(self, row: RowId, token: int) -> None:
        """Count one more sampled token of a row."""
        self._counts[row][:, token] += 1

    def drop(self, row: RowId) -> None:
        """Forget a row."""
        self._counts.pop(row, None)

    def of(self, rows: Sequence[RowId]) -> Tensor:
        """Return [2, g, V]: how often each token occurs in these rows, and how often it was sampled."""
        return torch.stack([self._counts[row] for row in rows], dim=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Drawn:
    """One token per row."""

    tokens: Tensor
    """[n] int64."""
    logprobs: Tensor
    """[n] float32 log probability in the whole vocabulary, after temperature; NaN for non-finite logits."""


def draw(logits: Tensor, settings: DrawSettings, uniforms: Tensor, seen: Tensor | None = None) -> Drawn:
    """Draw one token per row.

    Args:
        logits: [n, V] float32; -inf forbids a token.
        settings: settings of the n rows.
        uniforms: [n] float64 in [0, 1).
        seen: [2, g, V] token counts of the rows with a penalty (see ``Seen``).
    """
    scaled = logits if settings.divisor is None else logits / settings.divisor
    logprobs = torch.log_softmax(scaled, dim=-1)
    weights = logprobs.exp()
    if seen is not None:
        scaled = scaled.index_copy(0, *_penalised(logits, settings, seen))
        weights[settings.penalised] = scaled[settings.penalised].softmax(-1)
    if settings.min_p is not None:
        is_out = weights < settings.min_p * weights.amax(-1, keepdim=True)
        scaled, weights = scaled.masked_fill(is_out, -torch.inf), weights.masked_fill_(is_out, 0.0)
    tokens = _inverse(_filtered(scaled, weights, settings), uniforms)
    if settings.greedy is not None:
        tokens = torch.where(settings.greedy, scaled.argmax(-1), tokens)
    return Drawn(tokens=tokens, logprobs=logprobs.gather(1, tokens[:, None])[:, 0])


def _penalised(logits: Tensor, settings: DrawSettings, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return [g] indices of the rows with a penalty, and [g, V] their logits after penalty and temperature.

    The repetition penalty follows Keskar et al., "CTRL", 2019, section 4.1, with division or multiplication
    by the logit's sign. Presence and frequency penalties follow the public completion APIs, which count
    sampled tokens.
    """
    rows = torch.tensor(settings.penalised, device=logits.device)
    repetition, presence, frequency = settings.penalties
    own, (had, sampled) = logits[rows], seen
    own = torch.where(had > 0, torch.where(own > 0, own / repetition, own * repetition), own)
    own = own - presence * (sampled > 0) - frequency * sampled
    return rows, own if settings.divisor is None else own / settings.divisor[rows]


def _filtered(scaled: Tensor, weights: Tensor, settings: DrawSettings) -> Tensor:
    """Return [n, V] weights, with 0 where top-k or top-p excludes a token."""
    if not len(settings.filtered):
        return weights
    if weights.device.type == "cpu" and weights.shape[1] > FEW:
        space = np.empty(weights.shape[1], np.float32)
        parts = (settings.filtered, settings.top_k, settings.top_p)
        for row, top_k, top_p in zip(*(part.tolist() for part in parts), strict=True):
            lowest = least_kept(weights[row].numpy(), top_k, top_p, space)
            torch.threshold_(weights[row], float(np.nextafter(np.float32(lowest), np.float32(-1))), 0.0)
        return weights
    asked = scaled[settings.filtered]
    least = _threshold(asked, settings.top_k, settings.top_p, settings.most)
    weights[settings.filtered] = weights[settings.filtered].masked_fill_(asked < least, 0.0)
    return weights


def _threshold(scaled: Tensor, top_k: Tensor, top_p: Tensor, most: int) -> Tensor:
    """Return [n, 1] smallest score kept: of the k likeliest tokens, the fewest with p of their mass."""
    vocabulary = scaled.shape[1]
    count = min(most or vocabulary, vocabulary)
    best = (
        scaled.topk(count, dim=-1).values if count < vocabulary else scaled.sort(-1, descending=True).values
    )
    mass = (best - best[:, :1]).to(torch.float64).exp()
    running = mass.cumsum(-1)
    total = running.gather(1, (top_k.clamp(max=count) - 1)[:, None])
    wanted = top_p[:, None] * total
    ranks = torch.arange(count, device=scaled.device)
    # A token stays while those before it have less than p; with p = 1 rounding must not drop the last ones.
    stays = ((running - mass < wanted) | (top_p[:, None] == 1)) & (ranks < top_k[:, None])
    return best.gather(1, stays.sum(-1, keepdim=True) - 1)


def _inverse(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return [n] the token under which each uniform number falls; never a token of weight 0."""
    rows, vocabulary = weights.shape
    if vocabulary <= 2 * _BLOCK:
        return _fall(weights.cumsum(-1, dtype=torch.float64), uniforms)[:, 0]
    blocks = torch.nn.functional.pad(weights, (0, -vocabulary % _BLOCK)).view(rows, -1, _BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64)
    running = sums.cumsum(-1)
    block = _fall(running, uniforms)
    left = (running.gather(1, block)[:, 0] - uniforms * running[:, -1]) / sums.gather(1, block)[:, 0]
    inside = blocks[torch.arange(rows, device=weights.device), block[:, 0]]
    token = _fall(inside.cumsum(-1, dtype=torch.float64), 1 - left.clamp(2**-53, 1))
    return (block * _BLOCK + token)[:, 0].clamp_(max=vocabulary - 1)  # arbitrary for NaN


def _fall(running: Tensor, uniforms: Tensor) -> Tensor:
    """Return [n, 1] the first index where the running sums [n, W] exceed ``uniforms`` [n] times the last."""
    wanted = uniforms[:, None] * running[:, -1:]
    return torch.searchsorted(running, wanted, right=True).clamp_(max=running.shape[1] - 1)


RowWeights: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float32]]
"""[V] non-negative weights of one row."""

FEW = 8192
"""Up to this many weights are sorted directly."""
_STRIDE = 64
_MARGIN = 2
"""Half width of the search around the estimate, in square roots of the sample's size."""
_RUN = 512


def least_kept(weights: RowWeights, top_k: int, top_p: float, space: RowWeights) -> float:
    """Return the smallest weight kept: of the k largest weights, the fewest that hold a share p of their sum.

    Sums are in float64, except for runs of 512 in float32: two thresholds whose sums differ by less than
    about 1e-7 of the total may be confused.

    Args:
        weights: weights of one row; at least one is above 0.
        top_k: the vocabulary's size or more keeps all.
        top_p: above 0, at most 1.
        space: working memory as long as the weights: allocating it for every row would cost as much as the
            work.
    """
    rest = space
    np.copyto(rest, weights)
    if top_k < len(rest):
        rest.partition(len(rest) - top_k)
        rest = rest[len(rest) - top_k :]
    if top_p == 1:
        return float(rest.min())
    total = _sum(rest)
    wanted = top_p * total
    if len(rest) > FEW:
        rest, wanted = _narrowed(rest, wanted, total - wanted)
    rest.sort()
    best = rest[::-1]
    index = int(np.searchsorted(best.cumsum(dtype=np.float64), wanted))
    return float(best[min(index, len(best) - 1)])


def _narrowed(rest: RowWeights, wanted: float, unwanted: float) -> tuple[RowWeights, float]:
    """Return a part of the sorted weights that contains the threshold, and the sum wanted from this part.

    Args:
        rest: all weights; they are reordered.
        wanted: the sum to be reached by the weights from the threshold upwards.
        unwanted: approximate sum of the weights below the threshold.
    """
    sample = np.sort(rest[::_STRIDE])
    below = int(np.searchsorted(sample.cumsum(dtype=np.float64), unwanted / _STRIDE))
    margin = _MARGIN * isqrt(len(sample))
    cuts = [(below - margin) * _STRIDE, (below + margin) * _STRIDE]
    dropped = 0
    for cut in cuts if below > len(sample) // 2 else reversed(cuts):
        index = cut - dropped
        if 0 < index < len(rest):
            rest.partition(index)
            held = _sum(rest[index:])
            if held < wanted:
                rest, wanted = rest[:index], wanted - held
            else:
                rest, dropped = rest[index:], cut
    return rest, wanted


def _sum(weights: RowWeights) -> float:
    whole = len(weights) // _RUN * _RUN
    runs = weights[:whole].reshape(-1, _RUN).sum(1)
    return float(runs.sum(dtype=np.float64) + weights[whole:].sum(dtype=np.float64))
