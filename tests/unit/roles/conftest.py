"""Small models with a scalar head and rollouts for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import ScalarModel, load_scalar_model
from rillflow.records.batch import Batch
from rillflow.records.rollout import Finish, Rollout, rollout_batch
from rillflow.records.row import RowId

ALPHABET = "0123456789+-="


@pytest.fixture
def make_model() -> Callable[..., ScalarModel]:
    """Return a function that makes a two-layer decoder with a scalar head that starts at 0."""

    def make(seed: int = 0, **sizes: object) -> ScalarModel:
        torch.set_num_threads(1)
        small: dict = {"hidden": 64, "layers": 2, "context": 32, "alphabet": ALPHABET} | sizes
        config = ModelConfig(new=NewModel(**small))
        return load_scalar_model(config, seed=seed, device=torch.device("cpu"), base=Path())

    return make


@pytest.fixture
def make_rollouts() -> Callable[[ScalarModel, Sequence[str]], Batch]:
    """Return a function that makes one sampled answer per prompt; prompts are ``1+P=``."""

    def make(model: ScalarModel, answers: Sequence[str]) -> Batch:
        return rollout_batch(
            [
                Rollout.start(RowId(0, place, 0), model.tokenizer.encode(f"1+{place}=")).sampled(
                    tokens := model.tokenizer.encode_completions([answer])[0],
                    [-1.0] * len(tokens),
                    0,
                    Finish.STOP,
                )
                for place, answer in enumerate(answers)
            ]
        )

    return make
