"""Merging: merge several models of one architecture, weight by weight, without holding two models in memory.

directories ─ parents: opened, compared ─┬─ methods: linear, slerp, ties, dare ─┐
                                         ├─ decoder, activations: aligned (ot) ─┴─ stream ─> a directory
                                         └─ soup: added one by one while a score does not drop
"""
