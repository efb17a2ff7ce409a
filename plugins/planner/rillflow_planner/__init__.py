"""Planner: choose devices and a grid for every model, and predict the cost of a step.

graph, shapes, workload ─> problem ─┬─ cost_model ─> options: seconds and bytes of every placement
hardware, factors ──────────────────┘                    │
                                      search    <────────┤ the best plan, and why the others lose
                                      simulator <────────┘ a plan run event by event: time, idle, staleness

Pure: no process, no clock, no randomness that is not passed in.
"""
