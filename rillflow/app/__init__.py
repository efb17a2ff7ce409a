"""Assembly: build a run from a recipe.

    recipe.toml ─ recipe ─> Recipe ─ check ─> everything knowable before a process starts
                                   └ launch ─> model, roles, flow, phases ─ loop ─> run directory

The command line uses it, and so does Python code that starts runs.
"""
