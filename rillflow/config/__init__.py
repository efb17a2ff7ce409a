"""Config machinery: read TOML and ``--set``, and return checked frozen records or errors with reasons.

    recipe.toml ─ read ─> plain data ─┐
    --set a.b=c ─ overrides ──────────┴─ load ─> a Section (defined next to what it configures)
                                           └───> problems: all of them, each with key, value, why, fix

Nothing here imports torch, so every config error is found before anything heavy starts.
"""
