"""Weights: which rank holds which slice of which tensor, and how slices move between ranks.

layout(train mesh) ─┬─ boxing ─> plan ─ resharding ─> weights on the other mesh, digests compared
layout(generation) ─┘
"""
