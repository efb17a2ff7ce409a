"""Remote: reward functions that ask an HTTP server, made from a recipe's settings.

    reward.url ──────────> RemoteScores ─┐
    reward.judge.url ────> RemoteJudge ──┴─ source text ─> a child, like a function given in Python

The text holds the name of the environment variable with the key. The child reads the key; nothing records it.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

from rillflow.rewards.config import JudgeConfig, RewardConfig
from rillflow.rewards.function import FunctionPath
from rillflow.rewards.judge_prompt import RATING
from rillflow_parts.scorers.remote_judge import RemoteJudge
from rillflow_parts.scorers.remote_scores import RemoteScores

_MARGIN_S = 0.5


def remote_scores(url: str, config: RewardConfig) -> FunctionPath:
    """Return the function that asks a server for the scores of rows."""
    last = re.sub(r"\W", "_", urlsplit(url).path.rstrip("/").rpartition("/")[2])
    name, rows = last if last.isidentifier() else "url", config.http.rows_per_request
    return _asking(name, RemoteScores, url, config, config.key_variable, rows_per_request=rows)


def remote_judge(config: RewardConfig, judge: JudgeConfig) -> FunctionPath:
    """Return the function that asks a chat endpoint to rate or compare answers."""
    assert judge.url is not None, "a judge with a model is a role"
    frame, path = judge.frame or RATING, "/chat/completions"
    return _asking(
        "judge",
        RemoteJudge,
        judge.url.rstrip("/").removesuffix(path) + path,
        config,
        judge.key_variable,
        pieces=frame.split(frame.template),
        labels=list(frame.labels),
        compares=frame.compares,
        abstain=judge.abstain,
        asked={"model": judge.model_name, "temperature": 0, "max_tokens": judge.max_tokens},
    )


def _asking(
    name: str, kind: type, url: str, config: RewardConfig, key_variable: str | None, **own: object
) -> FunctionPath:
    """Return a function as text that makes an object which asks an address."""
    # The answers must be there before the child's own limit ends all of its rows.
    limit_s = max(config.timeout_s - _MARGIN_S, config.timeout_s / 2)
    called = {"concurrency": config.http.concurrency, "retries": config.http.retries, "limit_s": limit_s}
    arguments = {"url": url, **called, "key_variable": key_variable, **own}
    made = f"{kind.__name__}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
    text = f"from {kind.__module__} import {kind.__name__}\n{name} = {made}\n"
    return FunctionPath(file=Path.cwd() / f"<{name}>", name=name, text=text, address=url)
