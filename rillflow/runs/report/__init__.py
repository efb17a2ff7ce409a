"""View: render a run directory for people. It reads run files and changes only its own files.

run directory ─ reader ─> RunData ─┬─ curves, stages, samples ─> report.html, one file without a network
                                   └─ summary ─> a dozen lines of text, summary.json
"""
