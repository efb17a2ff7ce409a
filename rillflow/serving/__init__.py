"""Serving: servers on this machine, their tokens and bounded bodies."""
