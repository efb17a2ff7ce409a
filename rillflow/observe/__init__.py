"""Observe: a run told in files, and its progress told on a terminal.

    metrics, spans, rollouts, evaluations ──> RunDirectory ──> JSON files ──> reader ──> view
                                     └──> Progress ──> one terminal or one line a step

Nothing here knows a model: the standard library writes the files, and `rich` draws the progress.
"""
