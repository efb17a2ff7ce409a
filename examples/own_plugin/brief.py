"""A scorer by name: reward.function = "brief" needs no file in the recipe."""

from pathlib import Path

from rillflow.app.plugins import Plugin
from rillflow.rewards.function import FunctionPath


def brief(text, reward):  # the setting, and the section [reward]
    return FunctionPath(file=Path(__file__).with_name("brief_scores.py"), name="brief")


PLUGIN = Plugin(scorers={"brief": brief})
