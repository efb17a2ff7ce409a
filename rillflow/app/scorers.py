"""Scorers: find the reward function that a recipe names.

reward.function, reward.functions, reward.url ─┬─ a name, or SCHEME:... , of a plugin ──> its scorer
                                               └─ file.py:name ─────────────────────────> a function
"""

from __future__ import annotations

from pathlib import Path

from rillflow.app.plugins import PROVIDERS, absent, brought
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import FunctionPath, parse_function

_NAMES = [name for name in PROVIDERS["scorers"] if not name.endswith(":")]


def scorer(text: str, base: Path, reward: RewardConfig) -> FunctionPath:
    """Return the function that a recipe names; nothing of it runs.

    Args:
        text: the setting.
        base: the recipe's folder.
        reward: the section ``reward``.

    Raises:
        RewardError: there is no such function.
        ConfigError: the part that brings it is not installed, or two plugins bring its name.
    """
    return shipped_scorer(text, reward) or parse_function(text, base, names=_NAMES)


def shipped_scorer(text: str, reward: RewardConfig) -> FunctionPath | None:
    """Return the function of a name or scheme that a plugin brings; None for the user's own."""
    known = brought(lambda plugin: plugin.scorers, "scorer")
    for name in (text, f"{text.partition(':')[0]}:"):
        if name in known:
            return known[name](text, reward)
        if name in PROVIDERS["scorers"]:
            error = absent("scorers", name, f"the reward {text!r}")
            assert error is not None, "its part is known"
            raise error
    return None
