"""Remote model: the module of a run in another process, built from its config and filled with its weights.

GET model ─ config ─┐
whole weights ──────┴─ from_pretrained ─> module ─ NativeEngine
later versions ─ the same names ─> copied over the module's own, else converted by from_pretrained again
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from rillflow.errors import ModelError
from rillflow.models.architecture import (
    built_with,
    causal_class,
    settle_attention,
    settle_positions,
    short_copy,
)
from rillflow.models.attention import register
from rillflow.models.language_model import quiet
from rillflow.models.lazy_weights import ALONE
from rillflow.models.model_files import own_weights
from rillflow.rollout.config import RolloutConfig
from rillflow.rollout.native.engine import NativeEngine


class RemoteModel:
    """A run's module, in memory of its own.

    Args:
        about: the run's answer to ``GET model``.
        weights: weights of any version, by their names in files.
        device: device of the module.

    Raises:
        ModelError: the installed transformers cannot build this model, or weights are missing.
    """

    def __init__(self, about: Mapping[str, Any], weights: Mapping[str, Tensor], device: torch.device) -> None:
        _require_no_texts(about)
        self._about = about
        self._config = config_of(about["config"])
        register()
        with ALONE, quiet():
            self.module = self._built(weights)
            tried = short_copy(self.module)
            settle_attention(self.module, tried)
            settle_positions(self.module, tried)
            self.module.to(device)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy the weights of a version over the module's own; no row may run meanwhile."""
        own = own_weights(self.module)
        if own.keys() != weights.keys():
            with ALONE, quiet():
                weights = own_weights(self._built(weights))
        with torch.inference_mode():
            for name, each in own.items():
                each.copy_(weights[name])

    def engine(self, rows: int) -> NativeEngine:
        """Return an engine that samples up to ``rows`` rows at once.

        A row's seed is part of its id here, so that every sampler draws the same tokens for it.
        """
        return NativeEngine(
            self.module,
            RolloutConfig.model_validate({"max_rows": rows}),
            stop_tokens=frozenset(self._about["stop_tokens"]),
            seed=0,
            context=int(self._about["context"]),
        )

    def _built(self, weights: Mapping[str, Tensor]) -> PreTrainedModel:
        kind = causal_class(self._config)
        try:
            module, found = kind.from_pretrained(
                None,
                state_dict={name: each.clone() for name, each in weights.items()},
                config=self._config,
                dtype=next(iter(weights.values())).dtype,
                attn_implementation=built_with(kind, self._config),
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            raise ModelError(
                f"the run's {kind.__name__} cannot be built here",
                why=str(error).strip().splitlines()[-1],
                fix="install the run's version of transformers",
            ) from error
        if found["missing_keys"]:
            name = min(found["missing_keys"])
            raise ModelError(f"the run's weights lack {name}", why="its model has this weight")
        made: PreTrainedModel = module
        return made.eval()


def config_of(settings: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the config of a decoder.

    Raises:
        ModelError: the installed transformers has no such type.
    """
    rest = dict(settings)
    kind = rest.pop("model_type", None)
    try:
        made: PreTrainedConfig = AutoConfig.for_model(kind, **rest)
        return made
    except (ValueError, TypeError) as error:
        raise ModelError(
            f"the run's model type is {kind!r}",
            why=str(error).strip().splitlines()[0],
            fix="install the run's version of transformers",
        ) from error


def _require_no_texts(about: Mapping[str, Any]) -> None:
    if about.get("reads_text", bool(about["stop"])):
        raise ModelError(
            f"rows of this run end at the texts {about['stop']}",
            why="a remote sampler has no tokeniser, so it finds only stops that are one token",
            fix="use stop texts that are single tokens of the model (rollout.stop)",
        )
