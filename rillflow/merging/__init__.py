"""Merging: several models of one kind into one, weight by weight, never two of them in memory.

directories ─ parents: opened, compared ─┬─ methods: linear, slerp, ties, dare ─┐
                                         ├─ decoder, activations: aligned (ot) ─┴─ stream ─> a directory
                                         └─ soup: added one by one while a score does not fall
"""
