"""Pipeline: repeats an algorithm's step, records it, judges it, keeps it resumable.

phases ─ loop ─> data ─> step ─> record ─> evaluate ─> checkpoint ─> next step
"""
