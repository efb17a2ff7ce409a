"""Records: the frozen values that travel between stages.

    row ids [B, 3] ──┐
    dense [B, ...] ──┼── Batch ── select, split, concatenate, join ──> the next stage
    ragged values ───┘              never padded on the way

``row`` and ``metrics`` import nothing heavy; ``ragged``, ``batch`` and ``rollout`` import torch.
"""
