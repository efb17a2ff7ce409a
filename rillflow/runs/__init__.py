"""Observe: record a run in files, and show its progress on a terminal.

    metrics, spans, rollouts, evaluations ──> RunDirectory ──> JSON files ──> reader ──> view
                                     └──> Progress ──> one terminal or one line per step

This package does not depend on models: it writes files with the standard library and draws progress with
`rich`.
"""
