"""Replay: re-run recorded steps, or a skipped update, and check the files of a run directory."""
