"""Decoder: find out by a trial whether a model trains with its own attention, and what that excludes.

config ─ outline ─> own? ─ no ──> no note
                      └─── yes ─> a note; a sharded model and the native engine are refused
"""

from __future__ import annotations

from pathlib import Path

import torch

from rillflow.app.recipe import Recipe
from rillflow.errors import ConfigError
from rillflow.models.language_model import LanguageModel, outline
from rillflow.rollout.config import NATIVE
from rillflow.sharding.module import own_attention_is_whole


def decoder_notes(recipe: Recipe, base: Path) -> list[str]:
    """Return notes on a model that trains with its own attention; empty for any other.

    Raises:
        ConfigError: the recipe shards such a model, or samples it with the native engine.
        ModelError: the model cannot be trained with either attention.
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
    answers = not recipe.chosen.data.answers or recipe.evaluate.problems > 0
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
