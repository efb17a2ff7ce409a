"""Dataset: the rows of an environment that has its own, listed by a child process.

verifiers:NAME ─ rows of the adapter's file, in a child ─> rows: prompt, verifiers_task
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rillflow.errors import DataError
from rillflow.isolation.sandbox import Level
from rillflow.rewards.child import Child, State, next_answers
from rillflow.rewards.function import FunctionPath
from rillflow.rewards.outcome import Score
from rillflow_parts.environments.config import EnvironmentConfig
from rillflow_parts.environments.source import EnvironmentSource

LIST_LIMIT_S = 3600.0
"""Longest time in seconds to list the rows: a data set may be downloaded."""


def environment_rows(config: EnvironmentConfig, source: EnvironmentSource) -> list[dict[str, Any]]:
    """Return the rows of an environment's own data set.

    Raises:
        DataError: it has none, or it cannot be listed.
        RewardError: the child process cannot load the library.
    """
    if source.adapter is None or not source.adapter.has_rows:
        raise DataError(
            f"task.source is {config.source!r}",
            why="only verifiers environments have rows of their own",
            fix="set task.source to a file of prompts",
        )
    rows = FunctionPath(file=source.path.file, name="rows")
    child = Child(rows, memory_bytes=config.memory_bytes, level=Level.NONE)
    try:
        while child.state is State.STARTING:
            next_answers([child])
        with TemporaryDirectory() as folder:
            file = Path(folder) / "rows.jsonl"
            given = {"name": source.rest, "arguments": config.arguments, "file": str(file)}
            child.send({"type": "run", "rows": 1, "columns": given}, limit_s=LIST_LIMIT_S)
            answers: list[Any] = []
            while not answers:
                answers = next_answers([child])
            if isinstance(answers[0][1], Score):
                raise DataError(
                    f"the rows of {config.source} cannot be listed",
                    why=answers[0][1].message,
                    fix="name an environment that verifiers can load; rollout.environment.arguments is its "
                    "config",
                )
            return [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    finally:
        child.stop()
