"""State file: a trainer's state as safetensors, its counters beside the tensors.

Trainer.state() ── tensors by name, counters as metadata ──> one file ──> Trainer.load_state
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rillflow.train.optimizer import TrainerState

_COUNTERS = "counters"


class Stateful(Protocol):
    """A trainer."""

    def state(self) -> TrainerState:
        """What it goes on from, besides the weights."""

    def load_state(self, tensors: Mapping[str, Tensor], counters: Mapping[str, int]) -> None:
        """Go on from a state."""


def save_state(trainer: Stateful, path: Path) -> None:
    """Write a trainer's state."""
    state = trainer.state()
    tensors = {name: tensor.contiguous() for name, tensor in state.tensors.items()}
    save_file(tensors, path, metadata={_COUNTERS: json.dumps(state.counters)})


def load_state(trainer: Stateful, path: Path) -> None:
    """Let a trainer go on from a file.

    Raises:
        TrainingError: the state is another module's.
    """
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict
        counters = json.loads(file.metadata()[_COUNTERS])
    trainer.load_state(tensors, counters)
