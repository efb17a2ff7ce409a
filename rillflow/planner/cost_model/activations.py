"""Activations: the numbers that one token leaves in one layer; what memory holds and what passes over it."""

from __future__ import annotations

import numpy as np

from rillflow.planner.cost_model.numbers import Numbers
from rillflow.planner.model_shape import ModelShape


def layer_numbers(shape: ModelShape, tp: Numbers) -> Numbers:
    """Numbers that one token leaves in one layer for the backward pass, attention not kept as a matrix.

    6 h for norms and residuals; queries, keys, values, output and the feed-forward block over tp
    (Korthikanti et al., arXiv 2205.05198, 4, without the squares that FlashAttention spares).
    """
    kept = shape.heads * (shape.head_dim + shape.value_width) + 2 * shape.kv_heads * shape.head_dim
    if shape.is_mixture:
        chosen = shape.experts_per_token + shape.shared_experts
        inner = chosen * (shape.matrices * shape.expert_inner + 2 * shape.hidden)
    else:
        inner = shape.matrices * shape.inner
    return 6 * shape.hidden + (kept + inner) / np.asarray(tp)
