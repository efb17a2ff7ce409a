"""Recomputation of activations in the backward pass, for transformers' modules."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rillflow.errors import ModelError
from rillflow.models.architecture import recomputing_layers, trial
from rillflow.sharding.pipeline import require_same


class Recompute:
    """Context in which the module's layers keep only their inputs and recompute the rest.

    Enter it for passes that a backward pass follows. transformers recomputes layers whose ``training`` flag
    is set. Only this flag is set, only on the layers, and it is cleared while a layer computes: everything
    else that a model does in training mode (dropout, noise in the routing of experts) stays off. Otherwise
    the trainer would train another function than the sampled one.

    Args:
        module: a decoder, or a rank's part of one.
        whole: whether the module can be tried alone.

    Raises:
        ModelError: no layer supports recomputation, or recomputation changes the outputs.
    """

    def __init__(self, module: Any, *, whole: bool = True) -> None:
        self._layers = recomputing_layers(module)
        if not self._layers:
            raise ModelError(
                f"no layer of {type(module).__name__} supports gradient checkpointing",
                why="gradient_checkpointing would save no memory",
                fix="set gradient_checkpointing to false and lower tokens_per_micro_batch",
            )
        expected = trial(module) if whole else None
        settings = {"use_reentrant": False, "context_fn": lambda: (self._resting(), self._resting())}
        with warnings.catch_warnings():  # newer versions rename it, older ones know only this name
            warnings.simplefilter("ignore", FutureWarning)
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
        if expected is not None:
            with self:
                found = trial(module, graph=True)
            way, why = "gradient checkpointing", "a module outside its layers reads their training flag"
            require_same(module, found, expected, way, why, "set gradient_checkpointing to false")

    def __enter__(self) -> None:
        self._flag(True)

    def __exit__(self, *error: object) -> None:
        self._flag(False)

    def _flag(self, training: bool) -> None:
        for layer in self._layers:
            layer.training = training

    @contextmanager
    def _resting(self) -> Iterator[None]:
        """Clear the flags while a layer computes, in both passes."""
        self._flag(False)
        try:
            yield
        finally:
            self._flag(True)
