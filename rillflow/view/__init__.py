"""View: render a run directory for people. Reads run files and writes only report.html and summary.json.

run directory ─ reader ─> RunData ─┬─ curves, stages, samples ─> report.html, one file without a network
                                   └─ summary ─> a dozen lines of text, summary.json
"""
