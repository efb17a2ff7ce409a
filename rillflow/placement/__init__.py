"""Placement: how a value is distributed over a grid of ranks, and the moves to another distribution.

    mesh ── named axes of ranks ──┐
    sbp ─── Split, Broadcast or ──┼──> placement ── slices ──> the part that each rank holds
            Partial, per axis     │        │
                                  │        └─ cells ── boxing ──> moves, stage by stage; bytes
    another mesh, another sbp ────┘

Integers only: no tensor, no process. See docs/design/internals.md#placements.
"""
