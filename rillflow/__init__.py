"""RL post-training of language models written as one dataflow.

    recipe.toml -> config -> algorithm -> flow -> run directory -> view, resume

Importing this package imports neither torch nor any engine: each room is imported by its own name.
"""

__version__ = "0.1.0"
