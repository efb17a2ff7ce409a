"""Assembly: a recipe made into a run.

    recipe.toml ─ recipe ─> Recipe ─ check ─> everything knowable before a process starts
                                   └ launch ─> model, roles, flow, phases ─ loop ─> run directory

Used by the command line, and by anyone who wants a run from Python.
"""
