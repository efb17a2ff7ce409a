"""Schedules: the orders of a phase's steps, one file for each."""
