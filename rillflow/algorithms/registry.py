"""Registry: the only list of the algorithms by name."""

from __future__ import annotations

from importlib import import_module

from rillflow.algorithms import sft
from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.config import AlgorithmConfig, WarmStartConfig

_SHIPPED = (
    "grpo",
    "dr_grpo",
    "dapo",
    "rloo",
    "remax",
    "reinforce_pp",
    "gspo",
    "cispo",
    "ppo",
    "safe_rlhf",
    "best_of_n",
    "online_dpo",
    "dpo",
    "kto",
    "preference",
    "pairwise",
    "sft",
)
ALGORITHMS: dict[str, Algorithm] = {
    name: import_module(f"rillflow.algorithms.{name}").ALGORITHM for name in _SHIPPED
}
"""Algorithms by name, which is the name of their file."""


def warm_start(config: WarmStartConfig) -> tuple[Algorithm, AlgorithmConfig]:
    """Return the algorithm and settings for a recipe's ``[warm_start]`` section."""
    settings = sft.SFTConfig(name="sft", steps=config.steps, prompts_per_step=config.prompts_per_step)
    return sft.ALGORITHM, settings
