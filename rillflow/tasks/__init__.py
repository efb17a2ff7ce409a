"""Tasks: the source of prompts, and the prompts held out for evaluation.

    arithmetic | reasoning-gym:NAME | file.jsonl | file.parquet ─ open_task ─> Task ─ PromptStream ─> batches
    arithmetic |                      file.jsonl | file.parquet ─ open_preferences ─> Task of pairs ──^

Only ``prompts`` imports torch; opening a task does not.
"""
