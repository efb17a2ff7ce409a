"""Placement: how a value lies on a grid of ranks, and the moves that lay it another way.

    mesh ── named axes of ranks ──┐
    sbp ─── Split, Broadcast or ──┼──> placement ── slices ──> what each rank holds
            Partial, per axis     │        │
                                  │        └─ cells ── boxing ──> moves, stage by stage; bytes
    another mesh, another sbp ────┘

Integers only: no tensor, no process. See docs/design/placement.md.
"""
