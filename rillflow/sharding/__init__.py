"""Parallel: a decoder over a mesh of ranks: data (dp), pipeline (pp) and tensor (tp) parallel.

module ─ tensor plan ─ stages ─ shards ─> this rank's part ─ micro-batches ─> outputs on the last stage
"""
