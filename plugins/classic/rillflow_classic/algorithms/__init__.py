"""Algorithms: one file and one screen each."""
