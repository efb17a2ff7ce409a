"""Parts of Rillflow that a training run does not need: commands, pages, comparisons.

    rillflow_parts/NAME/plugin.py ─ entry point NAME of "rillflow.plugins" ─> Plugin ─> the command line

Parts come in Rillflow's own distribution and attach as plugins do. A part imports the core; the core never
imports a part (``tests/architecture/test_layers.py``). ``plugin.py`` imports nothing heavy.
"""
