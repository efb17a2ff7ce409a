"""Methods: what is made of the same piece of several models.

    layer ── first look: angles, thresholds ──┐
    piece of parent 0, 1, ... and of the base ┴─ combine ─> the piece of the merged model

    linear  sum_i w_i x_i                                                       arXiv 2203.05482
    slerp   b + sin((1-l) W)/sin W d_0 + sin(l W)/sin W d_1, a layer at a time   arXiv 2406.16768
    ties    b + s times the mean of the trimmed d_i that have the elected sign   arXiv 2306.01708
    dare    b + s sum_i w_i d_i m_i / p, m_i 1 with probability p                arXiv 2311.03099

b is the base that all parents were trained from, d_i = x_i - b a task vector, w_i weights that sum to 1.
Spans are float64 while they are combined: equal parents are given back bit for bit.
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
"""Radians from 0 or from half a turn within which slerp is a straight line."""
WHOLE = ""
"""The name of the threshold that all weights of a model share."""
_WORD = 2**32


@dataclass(frozen=True, kw_only=True)
class Span:
    """The same elements of every model."""

    name: str
    """The weight that they are of."""
    first: int
    """The place of the first of them in the weight."""
    parents: Sequence[Tensor]
    """[n] float64 each."""
    base: Tensor | None = None
    """[n] float64 of the base, where a method has one."""

    @property
    def changes(self) -> list[Tensor]:
        """[n] each: what training changed, the parents' task vectors."""
        assert self.base is not None, "a method of task vectors is given a base"
        return [parent - self.base for parent in self.parents]


Spans = Callable[[], Iterator[Span]]
"""Every piece of a layer, read anew at each call."""
Combine = Callable[[Span], Tensor]
Method = Callable[[Spans], Combine]
"""Looks at a layer, and says how its pieces are combined."""


def normalised(weights: Sequence[float] | None, count: int) -> list[float]:
    """The weights of so many parents, made to sum to 1; equal ones where none are given.

    Raises:
        ConfigError: other than one a parent, not finite, or summing to 0 or less.
    """
    given = [1.0] * count if weights is None else list(weights)
    total = math.fsum(given)
    if len(given) != count:
        raise ConfigError(
            f"--weights has {len(given)} numbers for {count} parents",
            why="each parent has a weight of its own",
            fix=f"give {count}, such as {','.join(['1'] * count)}",
        )
    if not all(map(math.isfinite, given)) or total <= 0:
        raise ConfigError(
            f"--weights {','.join(f'{each:g}' for each in given)} cannot be used",
            why="they are divided by their sum, which has to be a positive number",
            fix=f"give {count} numbers such as {','.join(['1'] * count)}",
        )
    return [each / total for each in given]


def linear(weights: Sequence[float]) -> Method:
    """The weighted average (model soups, arXiv 2203.05482)."""

    def combine(piece: Span) -> Tensor:
        return _sum(weights, piece.parents)

    return lambda _: combine


def slerp(weights: Sequence[float]) -> Method:
    """Task vectors turned towards each other, a layer at a time (WARP, arXiv 2406.16768, section 3.2).

    More than two are taken in turn: the k-th at l = w_k / (w_0 + ... + w_k). Since what is made of the ones
    before is a sum of their task vectors, all angles follow from the products of each two of them.
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
    """What each task vector is multiplied with.

    Args:
        gram: [M, M] float64, the products of each two task vectors.
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
    """Trimmed task vectors, averaged where they have the elected sign (arXiv 2306.01708).

    Each parent keeps its largest changes, a share of ``density``. The sign of their weighted sum is elected
    for each element.

    Args:
        weights: one a parent, summing to 1.
        density: the share of changes that a parent keeps.
        scale: what the merged change is multiplied with.
        model: every piece of the model, to keep this share of the whole task vector, as the paper does; it
            is read twice. None: this share of every weight tensor.
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
    """[M] float32 by weight: the least change that is among the largest, a share of ``density`` of them.

    ``together`` counts the changes of all weights as one vector, named ``WHOLE``.

    Exact, and without a sort: the bits of a positive float32 are in the order of its size, so that the place
    is found by counting their upper halves, then the lower halves under one upper half.
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
    """[2] the bin in which the ``wanted``-th largest lies, and which one it is there, from the largest."""
    above = counts.flip(0).cumsum(0)
    back = int(torch.searchsorted(above, wanted))
    before = int(above[back - 1]) if back else 0
    return torch.tensor([len(counts) - 1 - back, wanted - before])


def _bits(piece: Span) -> Tensor:
    """[M, n] int64: sizes of changes as the bits of float32."""
    return torch.stack(piece.changes).float().abs().view(torch.int32).long()


def dare(weights: Sequence[float], density: float, scale: float, seed: int) -> Method:
    """Task vectors of which elements are dropped at random, the others made larger (arXiv 2311.03099).

    Which ones follows from (seed, weight's name, parent, place) alone, whatever is read at a time.
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
    """[n] bool: which elements of a parent's piece stay; each with probability ``density``."""
    count = len(piece.parents[parent])
    assert piece.first % 4 == 0, "four elements have one counter"
    index = piece.first // 4 + torch.arange(-(-count // 4))
    key = int.from_bytes(sha256(f"{seed} {parent} {piece.name}".encode()).digest()[:8])
    zero = torch.zeros_like(index)
    counter = torch.stack((index & (_WORD - 1), index >> 32, zero, zero), dim=-1)
    words = philox(counter, (key & (_WORD - 1), key >> 32)).reshape(-1)[:count]
    return words < density * _WORD


def _sum(weights: Sequence[float], values: Sequence[Tensor]) -> Tensor:
    """The weighted sum; what has weight 0 adds nothing."""
    found = torch.zeros_like(values[0])
    for weight, value in zip(weights, values, strict=True):
        if weight:
            found.add_(value, alpha=weight)
    return found
