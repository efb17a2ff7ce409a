"""Small models to merge: a base, and models that were trained from it as far as noise is training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, load_model, save_model

NEW = NewModel(hidden=16, layers=2, heads=4, kv_heads=2, context=16, alphabet="0123456789+=")
Made = Callable[..., Path]


def model(new: NewModel = NEW, *, seed: int = 0, noise: int | None = None) -> LanguageModel:
    """A new model; ``noise``: the seed of what is added to every weight."""
    made = load_model(ModelConfig(new=new), seed=seed, device=torch.device("cpu"), base=Path())
    if noise is not None:
        generator = torch.Generator().manual_seed(noise)
        for parameter in made.module.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return made


@pytest.fixture
def make(tmp_path: Path) -> Made:
    """Writes a model of ``model`` under a name."""

    def of(name: str, new: NewModel = NEW, **how: int | None) -> Path:
        save_model(model(new, **how), tmp_path / name)
        return tmp_path / name

    return of
