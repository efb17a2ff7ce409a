"""Simulator: the traced graph run under a plan, event by event, without a device.

problem, costs, plan ─ layout ─> tasks, pools, decoder ─┬─ in_step ───> rounds of rows, stages in turn ─┐
seed ─ draws ─> lengths of rows ────────────────────────┴─ streaming ─> rows that flow, bounded in age ─┤
                                                                        result: step time, idle, ages <─┘

Pure and deterministic: a row's lengths follow from (seed, prompt, sample) and from nothing else.
"""
