"""Activations: record a decoder's activations on some texts.

texts ─ tokens ─ model, one text at a time ─┬─ residual stream before every layer and after the last
                                            ├─ inputs of every output projection: heads
                                            └─ inputs of every down projection: feed-forward
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rillflow.errors import DataError
from rillflow.models.config import ModelConfig
from rillflow.models.language_model import choose_device, load_model

MOST_TOKENS = 2_048
"""Largest number of tokens to run; fewer suffice to distinguish up to ten thousand units."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Activations:
    """Activations of a decoder on N tokens, float32."""

    residual: Sequence[Tensor]
    """[N, d] before each layer and after the last."""
    heads: Sequence[Tensor]
    """[N, heads x dims] by layer."""
    inner: Sequence[Tensor]
    """[N, units of the feed-forward layer] by layer."""


def activations(directory: Path, texts: Sequence[str]) -> Activations:
    """Return a decoder's activations on the first tokens of some texts.

    Args:
        directory: directory of the model, which is loaded for this call only.
        texts: texts, read in order until there are enough tokens.

    Raises:
        DataError: there is no text.
        ModelError: the model cannot be loaded, or its tokeniser lacks a character of a text.
    """
    if not any(texts):
        raise DataError(
            "there is no prompt to align with",
            why="units are compared by their activations on prompts",
            fix="give a file with one prompt per line",
        )
    config = ModelConfig(path=str(directory.absolute()))
    model = load_model(config, seed=0, device=choose_device("cpu"), base=Path())
    body: Any = model.module.base_model
    kept: dict[str, list[Tensor]] = {}

    def keeping(name: str) -> Callable[..., None]:
        def keep(_: object, inputs: tuple[Tensor, ...], named: dict[str, Any]) -> None:
            states = inputs[0] if inputs else named["hidden_states"]
            kept.setdefault(name, []).append(states[0].detach().float())

        return keep

    watched = {f"residual {place}": layer for place, layer in enumerate(body.layers)}
    watched |= {f"heads {place}": layer.self_attn.o_proj for place, layer in enumerate(body.layers)}
    watched |= {f"inner {place}": layer.mlp.down_proj for place, layer in enumerate(body.layers)}
    watched[f"residual {len(body.layers)}"] = body.norm
    for name, part in watched.items():
        part.register_forward_pre_hook(keeping(name), with_kwargs=True)
    left = MOST_TOKENS
    with torch.no_grad():
        for tokens in model.tokenizer.encode_texts([text for text in texts if text]):
            if left <= 0:
                break
            body(input_ids=torch.tensor([tokens[: min(left, model.context)]]), use_cache=False)
            left -= len(tokens)
    count = len(body.layers)

    def of(kind: str, number: int) -> list[Tensor]:
        return [torch.cat(kept[f"{kind} {place}"]) for place in range(number)]

    return Activations(residual=of("residual", count + 1), heads=of("heads", count), inner=of("inner", count))
