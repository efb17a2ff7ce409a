"""Fused stages: two pipelines on the same devices, each one in the other's idle time.

two pipelines ── problem ─> lower bound ─┬─> solve ─> FusedSchedule ─> step: does it pay?
list_schedule ─────── orders (moves) ────┘
"""
