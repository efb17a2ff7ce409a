"""Decoder: whether the trained model has its own attention, and what that leaves out; found out by trying it.

config ─ outline ─> own? ─ no ──> nothing to say
                      └─── yes ─> a note; refused: a model cut over ranks, the native engine
"""

from __future__ import annotations

from pathlib import Path

import torch

from rillflow.algorithms.algorithm import Data
from rillflow.assembly.recipe import Recipe
from rillflow.errors import ConfigError
from rillflow.models.language_model import LanguageModel, outline
from rillflow.parallel.module import own_attention_is_whole
from rillflow.rollout.config import NATIVE


def decoder_notes(recipe: Recipe, base: Path) -> list[str]:
    """What is to be said of a model that trains with its own attention; nothing of any other.

    Raises:
        ConfigError: the recipe wants what does not go with that.
        ModelError: the model cannot be trained either way.
    """
    device = torch.device("cpu")
    tried = outline(
        LanguageModel, recipe.policy.model, seed=0, device=device, base=base, section="policy.model"
    )
    if tried.own is None:
        return []
    name = type(tried.module).__name__
    if not recipe.placement.mesh_of(recipe.trained_role).is_plain:
        raise ConfigError(*own_attention_is_whole(name))
    answers = recipe.chosen.data is Data.PROMPTS or recipe.evaluate.problems > 0
    if recipe.has_policy and answers and recipe.rollout.engine == NATIVE:
        raise ConfigError(
            f"{name} trains with its own attention, and cannot be sampled by the native engine",
            why=tried.own,
            fix='rollout.engine = "vllm" (docs/design/vllm.md), if vLLM has this model',
        )
    return [
        f"{name} trains with its own attention, padded: {tried.own}. Rows are sorted by length, "
        "policy.tokens_per_micro_batch counts what they are filled up with, and what rows share is computed "
        "for each"
    ]
