"""The command line: arguments in, exit codes out; the other packages do the work.

rillflow run | check | ask | report | doctor ─ main: arguments ─ commands: one function each
                                                     └─ failure: errors as what, why, fix
"""
