"""Repeat an algorithm's step: record it, evaluate it and checkpoint it.

phases ─ loop ─> data ─> step ─> record ─> evaluate ─> checkpoint ─> next step
"""
