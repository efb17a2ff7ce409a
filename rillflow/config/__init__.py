"""Config machinery: TOML and ``--set`` in, checked frozen records out, errors with line of reason.

    recipe.toml ──┐
    --set a.b=c ──┴─> plain data ─> Section subclasses (each stands beside what it configures)

Nothing here imports torch, so every config error is found before anything heavy starts.
"""
