"""ScalarModel: a decoder with a scalar head; what a critic, a reward model and a cost model start from.

ModelConfig ─┬─ path ─ has a head? ─ yes: kept ──> ┐
             │                     └ no: a new one > ├─> module + tokeniser ─ checked together ─> ScalarModel
             └─ new ──> random body, a new head ──> ┘

Saved with ``save_model``, it is a directory that ``AutoModelForSequenceClassification`` loads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from rillflow.errors import ModelError
from rillflow.models.architecture import context_of
from rillflow.models.config import ModelConfig
from rillflow.models.language_model import LoadedModel, listed, module_and_tokenizer, wrapped
from rillflow.models.new_model import new_scalar_module
from rillflow.models.pretrained import load_scalar_module
from rillflow.models.scalar_head import HeadStart, head_of
from rillflow.models.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, eq=False)
class ScalarModel(LoadedModel):
    """A decoder with a scalar head, ready to score with and to train."""

    @property
    def head(self) -> nn.Linear:
        """The layer from a hidden state to the number."""
        return head_of(self.module)


def load_scalar_model(
    config: ModelConfig,
    *,
    seed: int,
    device: torch.device,
    base: Path,
    head: HeadStart = "zero",
    section: str = "critic.model",
) -> ScalarModel:
    """A model with a scalar head from a directory, the hub, or made anew.

    Args:
        config: exactly one of ``path`` and ``new``.
        seed: decides a new model's weights and a new random head; the same on every device.
        device: where the module goes.
        base: what a relative ``path`` is relative to.
        head: how a new head starts; one that a directory has is kept.
        section: what a recipe calls the config, for errors.

    Raises:
        ConfigError: both or none of ``path`` and ``new`` are given.
        ModelError: the model is not there, is none that Rillflow can drive, or has a head of several numbers.
    """
    module, inner = module_and_tokenizer(
        config,
        device=device,
        base=base,
        section=section,
        new=partial(new_scalar_module, seed=seed, start=head),
        read=partial(load_scalar_module, seed=seed, start=head),
        output="last_hidden_state",
    )
    tokenizer = wrapped(module, inner, listed(module.config.get_text_config().eos_token_id))
    return ScalarModel(module=module, tokenizer=tokenizer, context=context_of(module))


def require_same_tokens(model: ScalarModel, tokenizer: Tokenizer, name: str) -> None:
    """Refuse a model that would read the tokens of ``tokenizer`` as other text.

    Args:
        model: what reads the tokens.
        tokenizer: what wrote them, the policy's.
        name: what the model is called, for the error.

    Raises:
        ModelError: the two vocabularies differ.
    """
    odd = model.tokenizer.first_difference(tokenizer)
    if odd is not None:
        raise ModelError(
            f"the {name} and the policy read the token {odd} as different text",
            why="rollouts travel as the policy's tokens",
            fix=f"choose a {name} with the policy's tokeniser",
        )
