"""Trained roles: common base of roles with a model, an optimiser for each phase, and files to resume from.

begin, begin_saving, written: a phase of training, and the state to resume it from
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic

import torch
from torch import Tensor

from rillflow.errors import RunDirectoryError
from rillflow.models.language_model import Model
from rillflow.models.model_files import Digest
from rillflow.models.tokenizer import ModelInput
from rillflow.records.batch import Batch
from rillflow.records.metrics import Metric, merge_metrics
from rillflow.roles.model_shard import ModelShard
from rillflow.roles.saving import Saving
from rillflow.runs.durable import flush, publish_folder, write_error
from rillflow.sharding.codec import EdgeCodecs
from rillflow.sharding.pipeline_runner import PipelineRunner
from rillflow.sharding.sharded_file import WRITE, together
from rillflow.training.config import PassesConfig, TrainConfig
from rillflow.training.minibatches import minibatches
from rillflow.training.scorer import Scorer
from rillflow.training.terms import Loss
from rillflow.training.trainer import Trainer
from rillflow.workers.arguments import Pipelined, PipelineRun
from rillflow.workers.endpoint import endpoint
from rillflow.workers.transfer import BROADCAST


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a role's training; a phase replaces those of the optimiser."""

    config: TrainConfig
    """Settings of the optimiser and of micro-batches."""
    seed: int
    """The run's seed; it decides how rows are cut into minibatches."""
    updates: int = 1
    """Optimiser steps of the phase, for the schedule."""
    version: int = 0
    """Number of publishes, or of training calls, so far."""
    codecs: EdgeCodecs = field(default_factory=EdgeCodecs)
    """Codecs of gradients that are summed over ranks, and of activations."""


class StatefulRole:
    """A role whose weights change; checkpoints hold its state."""

    def __init__(self) -> None:
        self._saves = dict[Path, Saving]()

    def _saved(self, folder: Path) -> Saving:
        """Start to write the state to resume from below a folder."""
        raise NotImplementedError

    def begin_saving(self, folder: Path) -> None:
        """Copy the state to resume from, and let a thread write it; ``written`` raises its errors.

        Earlier saves are finished first, so there is at most one copy.
        """
        for earlier in self._saves.values():
            earlier.end()
        self._saves = {where: save for where, save in self._saves.items() if where.is_dir()}
        self._saves[folder] = self._saved(folder)

    def written(self, folder: Path, *, wait: bool) -> dict[str, Digest] | None:
        """Return the files that ``begin_saving`` wrote there; see ``Saving.written``; all ranks call it."""
        return self._saves[folder].written(wait=wait)


class TrainedRole(StatefulRole, Pipelined, Generic[Model]):
    """A model that is trained in phases.

    Args:
        share: the model, or this rank's shard of it.
        training: settings of its training.
        name: its name in errors and files.
    """

    def __init__(self, share: ModelShard[Model], training: Training, *, name: str) -> None:
        super().__init__()
        self.model, self.share = share.model, share
        self.version = training.version
        self._name, self._seed = name.replace(" ", "_"), training.seed
        self._config, self._updates = training.config, training.updates
        self._codec = training.codecs.gradients
        share.compress(training.codecs.activations)
        self._scorer = Scorer(share.model.module, training.config, parallel=share.parallel)
        self._trainer: Trainer | None = None

    def _be_training(self) -> None:
        """Switch the weights to training."""

    @property
    def trainer(self) -> Trainer:
        """The trainer, made at first use, because a model that only scores needs no optimiser memory."""
        if self._trainer is None:
            self._trainer = Trainer(
                self.model.module,
                self._config,
                total_steps=self._updates,
                parallel=self.share.parallel,
                codec=self._codec,
            )
        return self._trainer

    @endpoint(BROADCAST)
    def begin(self, train: TrainConfig, updates: int, resume: Path | None = None) -> None:
        """Start a phase with an optimiser of its own.

        Args:
            train: settings of the optimiser.
            updates: optimiser steps of the whole phase.
            resume: the directory that ``begin_saving`` wrote in this phase; None starts anew.
        """
        self._be_training()
        self._config, self._updates, self._trainer = train, updates, None
        if resume is not None:
            self.share.load_state(self.trainer, resume)

    @property
    def pipeline(self) -> PipelineRunner | None:
        """Runner of its pipeline; None if the model has one stage."""
        return self.share.parallel.pipeline

    def taken_runs(self) -> Sequence[PipelineRun]:
        """See Pipelined."""
        return () if self.pipeline is None else self.pipeline.taken_runs()

    @property
    def updates(self) -> int:
        """Optimiser steps made in this phase."""
        return self.trainer.optimizer.steps

    def model_input(self) -> ModelInput:
        """Return the tokeniser and context that rows are encoded for."""
        return ModelInput(tokenizer=self.model.tokenizer, context=self.model.context)

    def _learn(
        self,
        rows: Batch,
        loss: Loss,
        passes: PassesConfig,
        part: tuple[int, int] = (0, 1),
    ) -> dict[str, Metric]:
        """Make optimiser steps over rows, those of one unit together; see ``Policy.update`` for ``part``."""
        cut = self._minibatches(rows, passes, part, loss.units(rows))
        metrics = merge_metrics([self.trainer.update(minibatch, loss) for minibatch in cut])
        self.version += part[0] + 1 == part[1]
        return metrics

    def _minibatches(
        self, rows: Batch, passes: PassesConfig, part: tuple[int, int], units: Tensor | None = None
    ) -> Iterator[Batch]:
        """Yield minibatches of one part of the iteration's rows; ``part``: its index, and their number."""
        return minibatches(
            rows,
            passes.epochs,
            passes.minibatches // part[1],
            self._seed,
            self.version,
            units,
            self.share.groups.dp,
            shuffle=passes.shuffle,
        )

    def save(self, folder: Path) -> None:
        """Write the state to resume from below a folder; a collective call.

        The weights become a Hugging Face directory named after the role, with the training state next to it.

        Raises:
            RunDirectoryError: the state does not fit, or the disk fails.
        """
        self._saved(folder).written(wait=True)

    def _saved(self, folder: Path) -> Saving:
        self._be_training()
        state = folder / f"{self._name}.optimizer"
        return Saving(self.share, folder / self._name, state, self.trainer.optimizer.state())

    def save_weights(self, folder: Path) -> None:
        """Write the weights as a Hugging Face directory, and wait for the files; a collective call.

        Raises:
            RunDirectoryError: the disk is full or fails; an earlier directory is left intact.
        """
        self._be_training()
        draft, everyone = folder.with_name(f".{folder.name}.draft"), self.share.groups.everyone

        def cleared() -> str:
            if everyone.rank == 0:
                shutil.rmtree(draft, ignore_errors=True)
                draft.mkdir(parents=True)
            return ""

        together(everyone, torch.device("cpu"), cleared, draft, WRITE)
        try:
            Saving(self.share, draft).written(wait=True)
            if everyone.rank == 0:
                for path in draft.iterdir():
                    flush(path)
                publish_folder(draft, folder)
        except (OSError, RunDirectoryError) as error:
            shutil.rmtree(draft, ignore_errors=True)
            if isinstance(error, OSError):
                raise write_error(folder, error) from error
            raise
