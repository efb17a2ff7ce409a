"""Activations: numbers that a backward pass keeps for a token, as counted on fake tensors.

``rillflow check`` and the planner estimate memory with these constants, which
``benchmarks/training/activations.py`` compares with counts.
"""

from __future__ import annotations

from rillflow.placement.grid import Numbers

HIDDEN_STATES, INNER_STATES, OUTSIDE_STATES = 8.5, 4, 7
"""Hidden and inner states per token that training keeps in a layer, and hidden states outside the layers."""
MOST_LOGITS = 1 << 26
"""Logits of one pass that are kept whole, as ``formulas.config`` has it without its settings."""
NARROW = 0.65
"""Bytes of these states in bfloat16, as a share of float32; some stay float32."""


def kept_numbers(
    *, hidden: int, inner: Numbers, kv_width: Numbers, layers: Numbers, recomputes: bool
) -> Numbers:
    """Return the numbers kept per token: whole layers, or hidden states and one layer if it is recomputed.

    ``inner`` and ``kv_width`` are a rank's parts under tensor parallelism.
    """
    layer = HIDDEN_STATES * hidden + INNER_STATES * inner + 2 * kv_width
    return OUTSIDE_STATES * hidden + (layer + layers * hidden if recomputes else layer * layers)
