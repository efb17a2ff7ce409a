"""Simulator: run the traced graph under a plan, event by event, without devices.

problem, costs, plan ─ layout ─> tasks, pools, decoder ─┬─ in order ──> rounds of rows, stages in turn ─┐
seed ─ draws ─> lengths of rows ────────────────────────┴─ streaming ─> rows that flow, bounded in age ─┤
                                                                        result: step time, idle, ages <─┘

Pure and deterministic: a row's lengths depend only on (seed, prompt, sample).
"""
