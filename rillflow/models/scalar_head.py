"""Scalar head: one number per token, on top of a decoder's body.

    tokens ── module.base_model ──> hidden states [U, D] ── head, a linear layer to one number ──> [U]

The module is transformers' own, unmodified. Its own forward pass returns one number per row
(ForSequenceClassification) or has dropout (ForTokenClassification), so body and head are called separately.

Legend: U tokens of all rows, laid end to end; D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rillflow.errors import ModelError


def head_of(module: Any) -> nn.Linear:
    """Return the head: the only linear layer outside the body.

    Raises:
        ModelError: there is none, or it gives more than one number.
    """
    body = module.base_model
    found = [part for part in module.children() if part is not body and isinstance(part, nn.Linear)]
    if len(found) != 1 or found[0].out_features != 1:
        shape = [f"{part.in_features} to {part.out_features}" for part in found]
        raise ModelError(
            f"{type(module).__name__} has no scalar head",
            why=f"outside its body it has {len(found)} linear layers {', '.join(shape)}; a head is one, to 1",
            fix="load it with load_scalar_model",
        )
    return found[0]


def head_weights(module: PreTrainedModel) -> frozenset[str]:
    """Return the names of the head's parameters in the module."""
    own = {id(parameter) for parameter in head_of(module).parameters()}
    return frozenset(name for name, parameter in module.named_parameters() if id(parameter) in own)


def start_head(module: PreTrainedModel) -> None:
    """Set a new head to return 0 for every token."""
    for parameter in head_of(module).parameters():
        nn.init.zeros_(parameter)


def require_one_number(config: PreTrainedConfig) -> None:
    """Set a config to a head of one number, read at a row's last token.

    With a padding token, transformers would skip trailing ones to find the last token. A row's last token may
    be the end token, which many models also use for padding.
    """
    config.num_labels = 1
    config.get_text_config().pad_token_id = None


def token_scores(body: Any, head: nn.Linear, inputs: dict[str, Any]) -> Tensor:
    """Return [U] the head's number at every token, row after row, in float32 or wider."""
    hidden = body(**inputs).last_hidden_state.flatten(0, 1)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    bias = None if head.bias is None else head.bias.to(wide)
    return nn.functional.linear(hidden.to(wide), head.weight.to(wide), bias).squeeze(-1)
