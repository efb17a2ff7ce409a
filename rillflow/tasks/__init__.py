"""Tasks: where prompts come from, and which are held out to judge by.

    arithmetic | reasoning-gym:NAME | file.jsonl | file.parquet ─ open_task ─> Task ─ PromptStream ─> batches
    arithmetic |                      file.jsonl | file.parquet ─ open_preferences ─> Task of pairs ──^

Only ``prompts`` imports torch; opening a task does not.
"""
