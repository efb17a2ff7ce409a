"""Recomputation of activations in the backward pass, for modules of transformers."""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import Any

from torch import nn

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class Recompute:
    """While entered, the module's layers keep their inputs alone and compute the rest a second time.

    transformers recomputes only in training mode. Dropout stays off, as everywhere here: with it the
    trainer would train another function than the one that was sampled from.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        enable: Any = module.gradient_checkpointing_enable
        with warnings.catch_warnings():  # newer versions rename it, older ones know this name alone
            warnings.simplefilter("ignore", FutureWarning)
            enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def __enter__(self) -> None:
        self._module.train()
        for part in self._module.modules():
            if isinstance(part, _DROPOUTS):
                part.eval()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._module.eval()
