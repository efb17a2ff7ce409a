"""Counter-based random numbers: computed from (seed, row, position), never drawn in sequence.

    seed (64 bits) ─ key ──┐
    (position, sample, prompt, epoch) ─ counter ──> Philox 4x32-10 ──> two uniform numbers

A row's randomness depends on no completion order, batch neighbour or worker (contract order-blind).
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; a test checks the
published known answers.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(counter: Tensor, key: tuple[int, int]) -> Tensor:
    """Return random words from Philox 4x32-10.

    Args:
        counter: [..., 4] int64, each entry one unsigned 32-bit word.
        key: two unsigned 32-bit words.

    Returns:
        [..., 4] int64, each entry one random unsigned 32-bit word.
    """
    c0, c1, c2, c3 = (word & _MASK for word in counter.unbind(-1))
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # wrap modulo 2^64, as they should
        c0, c1, c2, c3 = (
            ((second >> 32) & _MASK) ^ c1 ^ k0,
            second & _MASK,
            ((first >> 32) & _MASK) ^ c3 ^ k1,
            first & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return torch.stack((c0, c1, c2, c3), dim=-1)


def uniform(seed: int, ids: Tensor, positions: Tensor) -> Tensor:
    """Return one uniform number in [0, 1) for every row and position.

    Args:
        seed: the run's seed; its low 64 bits count.
        ids: [..., 3] int64 row ids (epoch, prompt, sample).
        positions: [...] int64, broadcast against the ids' leading shape.

    Returns:
        [...] float64 with 53 random bits each.
    """
    epoch, prompt, sample = ids.unbind(-1)
    words = torch.broadcast_tensors(positions, sample, prompt, epoch)  # type: ignore[no-untyped-call]
    bits = philox(torch.stack(words, dim=-1), (seed & _MASK, (seed >> 32) & _MASK))
    high, low = bits[..., 0] >> 5, bits[..., 1] >> 6
    return (high.double() * 2.0**26 + low) * 2.0**-53


def permutation(seed: int, size: int, stream: int = 0) -> Tensor:
    """Return [size] int64, a permutation of 0 .. size-1 that depends only on (seed, stream)."""
    ids = torch.tensor([stream, 0, 0], dtype=torch.int64).expand(size, 3)
    keys = uniform(seed ^ 0x5851F42D4C957F2D, ids, torch.arange(size))
    return torch.argsort(keys, stable=True)
