"""A training service with the Tinker API: many clients train LoRA adapters on one base model.

    client ─ HTTP ─> application: sessions, order, futures ─> engine thread: adapters, passes, sampling

The package imports nothing at its top level; ``rillflow serve MODEL --train`` starts it.
"""
