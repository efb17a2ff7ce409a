"""Fused stages: two independent pieces of work on the same devices, each in the other's idle time.

two pipelines ── problem ─> lower bound ─┐
                    │                    ├─> solve ─> Schedule, front ─> check
list_schedule ──────┴── orders (moves) ──┘
lengths of rows ── tail ─> when to gather the last rows on few replicas, and on how many
"""
