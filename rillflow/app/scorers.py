"""Scorers: find the reward function that a recipe names.

reward.function, reward.functions ─┬─ a name, or SCHEME:... , of a plugin ──> its scorer
                                   ├─ http://... ──────────────────────────> a server that scores
                                   └─ file.py:name, or a built-in name ────> a function
"""

from __future__ import annotations

from pathlib import Path

from rillflow.app.plugins import brought
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import BUILT_IN, FunctionPath, parse_function
from rillflow.rewards.remote import SCHEMES, is_url, remote_scores

_TAKEN = (*BUILT_IN, *(f"{scheme}:" for scheme in SCHEMES))


def scorer(text: str, base: Path, reward: RewardConfig) -> FunctionPath:
    """Return the function that a recipe names; nothing of it runs.

    Args:
        text: the setting.
        base: the recipe's folder.
        reward: the section ``reward``.

    Raises:
        RewardError: there is no such function.
        ConfigError: two plugins bring its name.
    """
    if is_url(text):
        return remote_scores(text, reward)
    return shipped_scorer(text, base, reward) or parse_function(text, base)


def shipped_scorer(text: str, base: Path, reward: RewardConfig) -> FunctionPath | None:
    """Return the function of a name or scheme that the core or a plugin brings; None for the user's own."""
    if text in BUILT_IN:
        return parse_function(text, base)
    known = brought(lambda plugin: plugin.scorers, "scorer", _TAKEN)
    scheme = f"{text.partition(':')[0]}:"
    make = known.get(text) or known.get(scheme)
    return None if make is None else make(text, reward)
