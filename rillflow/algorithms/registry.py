"""The one place that lists the algorithms by name."""

from __future__ import annotations

from rillflow.algorithms import (
    cispo,
    dapo,
    dr_grpo,
    grpo,
    gspo,
    ppo,
    preference,
    reinforce_pp,
    remax,
    rloo,
    safe_rlhf,
    sft,
)
from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.config import AlgorithmConfig, WarmStartConfig

ALGORITHMS: dict[str, Algorithm] = {
    "grpo": grpo.ALGORITHM,
    "dr_grpo": dr_grpo.ALGORITHM,
    "dapo": dapo.ALGORITHM,
    "rloo": rloo.ALGORITHM,
    "remax": remax.ALGORITHM,
    "reinforce_pp": reinforce_pp.ALGORITHM,
    "gspo": gspo.ALGORITHM,
    "cispo": cispo.ALGORITHM,
    "ppo": ppo.ALGORITHM,
    "safe_rlhf": safe_rlhf.ALGORITHM,
    "preference": preference.ALGORITHM,
    "sft": sft.ALGORITHM,
}


def warm_start(config: WarmStartConfig) -> tuple[Algorithm, AlgorithmConfig]:
    """The algorithm and settings that a recipe's ``[warm_start]`` section stands for."""
    settings = sft.SFTConfig(name="sft", steps=config.steps, prompts_per_step=config.prompts_per_step)
    return sft.ALGORITHM, settings
