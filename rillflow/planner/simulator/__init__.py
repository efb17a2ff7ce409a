"""Simulator: a plan run event by event, in step or streamed."""
