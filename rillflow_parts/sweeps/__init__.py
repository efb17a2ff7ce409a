"""Sweeps: run a recipe over seeds and a small grid of settings, and compare the held-out results."""
