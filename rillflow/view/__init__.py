"""View: a run directory made readable; it reads files and changes nothing but its own.

run directory ─ reader ─> RunData ─┬─ curves, stages, samples ─> report.html, one file without a network
                                   └─ summary ─> a dozen lines of text, summary.json
"""
