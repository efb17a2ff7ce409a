"""What critic and reward model have in common: a model with a scalar head, trained in phases.

begin, save: a phase of training, and what it goes on from
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from torch import Tensor

from rillflow.models.language_model import ScalarModel, require_same_tokens
from rillflow.models.tokenizer import Tokenizer
from rillflow.records.batch import Batch
from rillflow.records.metrics import Metric, merge_metrics
from rillflow.roles.share import Share
from rillflow.train.config import PassesConfig, TrainConfig
from rillflow.train.loss import Loss
from rillflow.train.minibatches import minibatches
from rillflow.train.scorer import Scorer
from rillflow.train.trainer import Trainer
from rillflow.workers.endpoint import endpoint
from rillflow.workers.transfer import TOGETHER


class ScalarRole:
    """A model with a scalar head that scores and is trained.

    Args:
        share: the model, or this rank's part of it.
        tokenizer: the policy's; the two must have the same tokens.
        train: the optimiser's settings of the first phase, and how a batch is cut into micro-batches.
        seed: the run's seed; it decides how rows are cut into minibatches.
        updates: optimiser steps of that phase, for the schedule.
        version: calls of the training endpoint so far.
        name: what errors and files call it; ``called`` where nothing is said.

    Raises:
        ModelError: the policy's tokens are others.
    """

    called: ClassVar[str]
    """The usual name."""

    def __init__(
        self,
        share: Share[ScalarModel],
        *,
        tokenizer: Tokenizer,
        train: TrainConfig,
        seed: int,
        updates: int,
        version: int = 0,
        name: str | None = None,
    ) -> None:
        name = name or self.called
        model = share.model
        require_same_tokens(model, tokenizer, name)
        self.model = model
        self.version = version
        self._name = name.replace(" ", "_")
        self._scorer = Scorer(model.module, train, parallel=share.parallel)
        self._tokenizer = tokenizer
        self._train = train
        self._seed = seed
        self._updates = updates
        self._share = share
        self._trainer: Trainer | None = None

    @property
    def trainer(self) -> Trainer:
        """Made when it is first asked for: a model that only scores needs no optimiser's memory."""
        if self._trainer is None:
            self._trainer = Trainer(
                self.model.module,
                self._train,
                total_steps=self._updates,
                ranks=self._share.rows,
                parallel=self._share.parallel,
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
        self._train, self._updates, self._trainer = train, updates, None
        if resume is not None:
            self._share.load_state(self.trainer, resume)

    @property
    def saved_bytes(self) -> int:
        """Bytes of what ``save`` writes, headers aside."""
        return self._share.saved_bytes + sum(
            tensor.nbytes for tensor in self.trainer.state().tensors.values()
        )

    @property
    def updates(self) -> int:
        """Optimiser steps made in this phase."""
        return self.trainer.updates

    def _trained(
        self, rows: Batch, loss: Loss, passes: PassesConfig, units: Tensor | None = None
    ) -> dict[str, Metric]:
        """Optimiser steps over rows, those of one unit together."""
        cut = minibatches(
            rows, passes.epochs, passes.minibatches, self._seed, self.version, units, self._share.rows
        )
        metrics = merge_metrics([self.trainer.update(part, loss) for part in cut])
        self.version += 1
        return metrics

    def save(self, folder: Path) -> None:
        """Write the weights as a Hugging Face directory of the role's name, the optimiser beside it."""
        self._share.save_weights(folder / self._name)
        self._share.save_state(self.trainer, folder / f"{self._name}.optimizer")
