"""Methods: combine the same piece of several models.

    layer ── first pass: angles, thresholds ──┐
    piece of parent 0, 1, ... and of the base ┴─ combine ─> the piece of the merged model

    linear  sum_i w_i x_i                                                       arXiv 2203.05482
    slerp   b + sin((1-l) W)/sin W d_0 + sin(l W)/sin W d_1, a layer at a time   arXiv 2406.16768
    ties    b + s times the mean of the trimmed d_i that have the elected sign   arXiv 2306.01708
    dare    b + s sum_i w_i d_i m_i / p, m_i 1 with probability p                arXiv 2311.03099

b is the base from which all parents were trained, d_i = x_i - b a task vector, w_i weights that sum to 1.
Spans are float64 while they are combined, so the merge of equal parents equals them bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch
from torch import Tensor

from rillflow.errors import ConfigError
from rillflow.formulas.counter import philox

SMALL_ANGLE = 1e-4
"""Angle in radians to 0 or pi below which slerp interpolates linearly."""
WHOLE = ""
"""Name of the threshold that all weights of a model share."""
_WORD = 2**32


@dataclass(frozen=True, kw_only=True)
class Span:
    """The same elements of every model."""

    name: str
    """Name of their weight."""
    first: int
    """Index of the first element in the weight."""
    parents: Sequence[Tensor]
    """[n] float64 each."""
    base: Tensor | None = None
    """[n] float64 of the base, if the method uses one."""

    @property
    def changes(self) -> list[Tensor]:
        """[n] each: the parents' task vectors."""
        assert self.base is not None, "a method of task vectors is given a base"
        return [parent - self.base for parent in self.parents]


Spans = Callable[[], Iterator[Span]]
"""Iterates over every piece of a layer, read again at each call."""
Combine = Callable[[Span], Tensor]
Method = Callable[[Spans], Combine]
"""Reads a layer, and returns the function that combines its pieces."""


def normalised(weights: Sequence[float] | None, count: int) -> list[float]:
    """Return the weights of ``count`` parents, divided by their sum; equal ones if None.

    Raises:
        ConfigError: their number is not that of the parents, or they are not finite, or their sum is 0 or
            less.
    """
    given = [1.0] * count if weights is None else list(weights)
    total = math.fsum(given)
    if len(given) != count:
        raise ConfigError(
            f"--weights has {len(given)} numbers for {count} parents",
            why="each parent needs one weight",
            fix=f"give {count}, such as {','.join(['1'] * count)}",
        )
    if not all(map(math.isfinite, given)) or total <= 0:
        raise ConfigError(
            f"--weights {','.join(f'{each:g}' for each in given)} cannot be used",
            why="weights are divided by their sum, which must be finite and above 0",
            fix=f"give {count} numbers such as {','.join(['1'] * count)}",
        )
    return [each / total for each in given]


def linear(weights: Sequence[float]) -> Method:
    """Return the method that takes the weighted average (model soups, arXiv 2203.05482)."""

    def combine(piece: Span) -> Tensor:
        return _sum(weights, piece.parents)

    return lambda _: combine


def slerp(weights: Sequence[float]) -> Method:
    """Return the method of spherical interpolation per layer (WARP, arXiv 2406.16768, section 3.2).

    More than two parents are merged in turn: the k-th at l = w_k / (w_0 + ... + w_k). Each intermediate
    result is a sum of task vectors, so all angles follow from their pairwise products.
    """

    def of_layer(pieces: Spans) -> Combine:
        gram = torch.zeros(len(weights), len(weights), dtype=torch.float64)
        for piece in pieces():
            changes = torch.stack(piece.changes)
            gram += changes @ changes.T
        shares = slerp_shares(gram, weights)

        def combine(piece: Span) -> Tensor:
            assert piece.base is not None
            return piece.base + _sum(shares, piece.changes)

        return combine

    return of_layer


def slerp_shares(gram: Tensor, weights: Sequence[float]) -> list[float]:
    """Return the factor of each task vector.

    Args:
        gram: [M, M] float64, pairwise products of the task vectors.
        weights: [M] summing to 1.
    """
    shares = torch.zeros(len(weights), dtype=torch.float64)
    shares[0], held = 1.0, weights[0]
    for index in range(1, len(weights)):
        held += weights[index]
        part = weights[index] / held if held else 0.0
        lengths = float(shares @ gram @ shares) * float(gram[index, index])
        cosine = float(shares @ gram[index]) / math.sqrt(lengths) if lengths > 0 else 1.0
        angle = math.acos(max(-1.0, min(1.0, cosine)))
        if SMALL_ANGLE < angle < math.pi - SMALL_ANGLE:
            before = math.sin((1 - part) * angle) / math.sin(angle)
            own = math.sin(part * angle) / math.sin(angle)
        else:
            before, own = 1 - part, part
        shares *= before
        shares[index] = own
    return [float(share) for share in shares]


def ties(weights: Sequence[float], density: float, scale: float, model: Spans | None = None) -> Method:
    """Return the method that averages trimmed changes with the elected sign (arXiv 2306.01708).

    Each parent keeps its largest changes, a share of ``density``. The elected sign of each element is the
    sign of the weighted sum of the kept changes.

    Args:
        weights: one per parent, summing to 1.
        density: the share of changes that a parent keeps.
        scale: factor of the merged change.
        model: every piece of the model, to trim the whole task vector as in the paper; it is read twice.
            None: trim every weight tensor.
    """
    of_model = None if model is None else thresholds(model, density, together=True)

    def of_layer(pieces: Spans) -> Combine:
        least = thresholds(pieces, density) if of_model is None else of_model

        def combine(piece: Span) -> Tensor:
            assert piece.base is not None
            changes = torch.stack(piece.changes)
            small = changes.float().abs() < least[piece.name if of_model is None else WHOLE][:, None]
            changes[small] = 0.0
            share = torch.tensor(weights, dtype=torch.float64)[:, None]
            elected = (share * changes).sum(0).sign()
            agrees = share * ((changes.sign() == elected) & (elected != 0))
            mean = (agrees * changes).sum(0) / agrees.sum(0).clamp_min(1e-300)
            return piece.base + scale * mean

        return combine

    return of_layer


def thresholds(pieces: Spans, density: float, *, together: bool = False) -> dict[str, Tensor]:
    """Return [M] float32 by weight: the smallest change among the largest, which are a share of ``density``.

    ``together`` counts the changes of all weights as one vector, named ``WHOLE``.

    Exact, without a sort: the bits of positive float32 numbers have the order of their values. The position
    is found by counting the upper halves, then the lower halves under one upper half.
    """
    high, sizes = dict[str, Tensor](), dict[str, int]()
    for piece in pieces():
        bits, name = _bits(piece), WHOLE if together else piece.name
        counted = torch.stack([torch.bincount(row >> 16, minlength=2**15) for row in bits])
        high[name] = high.get(name, 0) + counted
        sizes[name] = sizes.get(name, 0) + bits.shape[1]
    wanted = {name: math.ceil(density * size) for name, size in sizes.items()}
    upper = {name: torch.stack([_place(row, wanted[name]) for row in high[name]]) for name in high}
    low = {name: torch.zeros(len(rows), 2**16, dtype=torch.int64) for name, rows in upper.items()}
    for piece in pieces():
        name = WHOLE if together else piece.name
        for index, row in enumerate(_bits(piece)):
            within = row[row >> 16 == upper[name][index, 0]] & 0xFFFF
            low[name][index] += torch.bincount(within, minlength=2**16)
    found = {}
    for name, rows in upper.items():
        places = [_place(low[name][index], int(row[1]))[0] for index, row in enumerate(rows)]
        bits = (rows[:, 0] << 16) | torch.stack(places)
        found[name] = bits.to(torch.int32).view(torch.float32)
    return found


def _place(counts: Tensor, wanted: int) -> Tensor:
    """Return [2] the bin with the ``wanted``-th largest value, and its rank in the bin, from the largest."""
    above = counts.flip(0).cumsum(0)
    back = int(torch.searchsorted(above, wanted))
    before = int(above[back - 1]) if back else 0
    return torch.tensor([len(counts) - 1 - back, wanted - before])


def _bits(piece: Span) -> Tensor:
    """Return [M, n] int64: absolute changes as the bits of float32."""
    return torch.stack(piece.changes).float().abs().view(torch.int32).long()


def dare(weights: Sequence[float], density: float, scale: float, seed: int) -> Method:
    """Return the method that drops random changes and rescales the others (arXiv 2311.03099).

    The dropped elements depend only on (seed, weight's name, parent, index), not on the piece size.
    """

    def combine(piece: Span) -> Tensor:
        assert piece.base is not None
        kept = [
            change * (kept_elements(seed, piece, index, density) / density)
            for index, change in enumerate(piece.changes)
        ]
        return piece.base + scale * _sum(weights, kept)

    return lambda _: combine


def kept_elements(seed: int, piece: Span, parent: int, density: float) -> Tensor:
    """Return [n] bool: the elements of a parent's piece to keep, each with probability ``density``."""
    count = len(piece.parents[parent])
    assert piece.first % 4 == 0, "four elements have one counter"
    index = piece.first // 4 + torch.arange(-(-count // 4))
    key = int.from_bytes(sha256(f"{seed} {parent} {piece.name}".encode()).digest()[:8])
    zero = torch.zeros_like(index)
    counter = torch.stack((index & (_WORD - 1), index >> 32, zero, zero), dim=-1)
    words = philox(counter, (key & (_WORD - 1), key >> 32)).reshape(-1)[:count]
    return words < density * _WORD


def _sum(weights: Sequence[float], values: Sequence[Tensor]) -> Tensor:
    """Return the weighted sum; values with weight 0 are skipped."""
    found = torch.zeros_like(values[0])
    for weight, value in zip(weights, values, strict=True):
        if weight:
            found.add_(value, alpha=weight)
    return found
