"""Config machinery: TOML and ``--set`` in, checked frozen records out, errors with line of reason.

    recipe.toml ─ read ─> plain data ─┐
    --set a.b=c ─ overrides ──────────┴─ load ─> a Section (each stands beside what it configures)
                                           └───> problems: all of them, each with key, value, why, fix

Nothing here imports torch, so every config error is found before anything heavy starts.
"""
