"""Sharding: a decoder over a mesh of ranks (dp, fsdp, tp, cp, pp, ep), and its weights moved between meshes.

module ─ tensor plan ─ stages ─ shards ─> this rank's part ─ micro-batches ─> outputs on the last stage
"""
