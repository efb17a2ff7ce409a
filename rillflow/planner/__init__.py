"""Planner: which model goes on which devices, in which grid, and what a step will then cost.

graph, shapes, workload ─> problem ─┬─ cost_model ─> options: seconds and bytes of every way to lie
hardware, factors ──────────────────┘                    │
                                      mapping <──────────┤ the best plan, and why the others lose
                                      simulator <────────┘ a plan run event by event: time, idle, staleness

Pure: no process, no clock, no randomness that is not passed in.
"""
