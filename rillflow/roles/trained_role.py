"""What roles that are trained have in common: a model, an optimiser for each phase, files to go on from.

begin, save: a phase of training, and what it goes on from
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Generic

from torch import Tensor

from rillflow.models.language_model import Model
from rillflow.records.batch import Batch
from rillflow.roles.share import Share
from rillflow.training.config import PassesConfig, TrainConfig
from rillflow.training.minibatches import minibatches
from rillflow.training.trainer import Trainer
from rillflow.workers.endpoint import endpoint
from rillflow.workers.transfer import TOGETHER


class TrainedRole(Generic[Model]):
    """A model that is trained in phases.

    Args:
        share: the model, or this rank's part of it.
        train: the optimiser's settings of the first phase.
        seed: the run's seed; it decides how rows are cut into minibatches.
        updates: optimiser steps of that phase, for the schedule.
        version: calls of what counts versions so far.
        name: what errors and files call it.
    """

    def __init__(
        self, share: Share[Model], *, train: TrainConfig, seed: int, updates: int, version: int, name: str
    ) -> None:
        self.model = share.model
        self.version = version
        self._name = name.replace(" ", "_")
        self._share, self._train, self._seed, self._updates = share, train, seed, updates
        self._trainer: Trainer | None = None

    def _be_training(self) -> None:
        """Have the weights as they are trained."""

    @property
    def trainer(self) -> Trainer:
        """Made when it is first asked for: a model that only scores needs no optimiser's memory."""
        if self._trainer is None:
            self._trainer = Trainer(
                self.model.module, self._train, total_steps=self._updates, parallel=self._share.parallel
            )
        return self._trainer

    @endpoint(TOGETHER)
    def begin(self, train: TrainConfig, updates: int, resume: Path | None = None) -> None:
        """Start a phase with an optimiser of its own.

        Args:
            train: its settings.
            updates: optimiser steps of the whole phase.
            resume: the file ``save`` wrote in this phase; None starts afresh.
        """
        self._be_training()
        self._train, self._updates, self._trainer = train, updates, None
        if resume is not None:
            self._share.load_state(self.trainer, resume)

    @property
    def saved_bytes(self) -> int:
        """Bytes of what ``save`` writes, headers aside."""
        state = self.trainer.optimizer.state().values()
        return self._share.saved_bytes + sum(tensor.nbytes for tensor in state)

    @property
    def updates(self) -> int:
        """Optimiser steps made in this phase."""
        return self.trainer.optimizer.steps

    def _minibatches(
        self, rows: Batch, passes: PassesConfig, part: tuple[int, int], units: Tensor | None = None
    ) -> Iterator[Batch]:
        """Minibatches of rows, which are one part of the iteration's: which, of how many."""
        return minibatches(
            rows,
            passes.epochs,
            passes.minibatches // part[1],
            self._seed,
            self.version,
            units,
            self._share.groups.dp,
            shuffle=passes.shuffle,
        )

    def save(self, folder: Path) -> None:
        """Write the weights as a Hugging Face directory of the role's name, the optimiser beside it."""
        self.save_weights(folder / self._name)
        self._share.save_state(self.trainer, folder / f"{self._name}.optimizer")

    def save_weights(self, folder: Path) -> None:
        """Write the weights as a Hugging Face directory; on all ranks."""
        self._be_training()
        self._share.save_weights(folder)
