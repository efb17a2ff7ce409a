"""Remote: reward functions that ask an HTTP server, made from a recipe's settings.

    reward.url ──────────> RemoteScores ─┐
    reward.judge.url ────> RemoteJudge ──┴─ source text ─> a child, like a function given in Python

The text holds the name of the environment variable with the key. The child reads the key; nothing records it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rillflow.errors import ConfigError
from rillflow.rewards.config import JudgeConfig, RewardConfig
from rillflow.rewards.function import FunctionPath
from rillflow.rewards.judge_prompt import RATING

_MARGIN_S = 0.5
SCHEMES = ("http", "https")
"""Schemes of addresses of servers that score."""


def is_url(text: str) -> bool:
    """Return whether a text names a server, and not a function."""
    return text.partition("://")[0] in SCHEMES


def url_problem(setting: str, url: str) -> ConfigError | None:
    """Return what is wrong with a setting that is an address; None if nothing is."""
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_whole = False
    if not is_whole:
        why = "it must be an address like http://localhost:8000/score"
        return ConfigError(f"{setting} is {url!r}", why=why, fix="write scheme and host")
    if "@" in parts.netloc:
        return ConfigError(
            f"{setting} has a password for {parts.hostname}",
            why="the run directory records the address",
            fix='name an environment variable with the key: key_variable = "MY_KEY"',
        )
    return None


def remote_scores(url: str, config: RewardConfig, weight: float = 1.0) -> FunctionPath:
    """Return the function that asks a server for the scores of rows."""
    last = re.sub(r"\W", "_", urlsplit(url).path.rstrip("/").rpartition("/")[2])
    name = last if last.isidentifier() else "url"
    given = _address(url, config, config.key_variable) | {"rows_per_request": config.http.rows_per_request}
    return _made(name, "remote_scores", "RemoteScores", given, weight)


def remote_judge(config: RewardConfig, judge: JudgeConfig) -> FunctionPath:
    """Return the function that asks a chat endpoint to rate or compare answers."""
    assert judge.url is not None, "a judge with a model is a role"
    frame = judge.frame or RATING
    url = judge.url.rstrip("/")
    if not url.endswith("/chat/completions"):
        url += "/chat/completions"
    given = _address(url, config, judge.key_variable) | {
        "pieces": frame.split(frame.template),
        "labels": list(frame.labels),
        "compares": frame.compares,
        "abstain": judge.abstain,
        "asked": {"model": judge.model_name, "temperature": 0, "max_tokens": judge.max_tokens},
    }
    return _made("judge", "remote_judge", "RemoteJudge", given)


def _address(url: str, config: RewardConfig, key_variable: str | None) -> dict[str, Any]:
    http = config.http
    # The answers must be there before the child's own limit ends all of its rows.
    limit_s = max(config.timeout_s - _MARGIN_S, config.timeout_s / 2)
    return {
        "url": url,
        "concurrency": http.concurrency,
        "retries": http.retries,
        "limit_s": limit_s,
        "key_variable": key_variable,
    }


def _made(name: str, module: str, kind: str, given: Mapping[str, Any], weight: float = 1.0) -> FunctionPath:
    text = "\n".join(
        [
            f"from rillflow.rewards.built_in.{module} import {kind}",
            f"{name} = {kind}({', '.join(f'{key}={value!r}' for key, value in given.items())})",
            "",
        ]
    )
    file = Path.cwd() / f"<{name}>"
    return FunctionPath(file=file, name=name, text=text, weight=weight, address=given["url"])
