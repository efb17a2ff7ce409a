"""The command line: words in, exit codes out; everything else is the work of the rooms below.

rillflow run | check | ask | report | doctor ─ main: arguments ─ commands: one function each
                                                     └─ failure: errors as what, why, fix
"""
