"""Runs: record a run in its directory, read run directories, and show the progress of a run.

    metrics, spans, rollouts, evaluations ──> RunDirectory ──> files ──> reader ──> report, summary, trackers
                                     └──> Progress ──> one terminal or one line per step

The package does not depend on models.
"""
