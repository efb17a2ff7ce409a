"""ScalarTrainer: optimiser steps over the numbers of a scalar head, and the numbers themselves.

minibatch ─ Learner.step ─> part ─ ScalarScorer.forward, loss.back tokens before ─> [N] ─ loss ─> terms
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from rillflow.cluster.ranks import Ranks
from rillflow.parallel.module import Parallel
from rillflow.records.batch import Batch
from rillflow.records.metrics import Metric
from rillflow.records.ragged import Ragged
from rillflow.train.config import TrainConfig
from rillflow.train.learner import Aim, Learner
from rillflow.train.reading import Reading
from rillflow.train.scalar_loss import ScalarLoss
from rillflow.train.scalar_scorer import ScalarScorer


class ScalarTrainer(Learner):
    """Trains a module with a scalar head and scores with it.

    Args:
        module: a decoder with a scalar head and Rillflow's attention; its parameters are changed in place.
        config: the optimiser, and how a minibatch is cut.
        total_steps: optimiser steps of the whole phase, for the schedule.
        ranks: those that hold the other parts of every minibatch.
        parallel: where the module is a rank's part of one, that part; ``ranks`` is then its dp.

    Example:
        trainer = ScalarTrainer(model.module, TrainConfig(lr=1e-4), total_steps=100)
        metrics = trainer.update(pairs, PreferenceLoss())
    """

    def __init__(
        self,
        module: nn.Module,
        config: TrainConfig,
        *,
        total_steps: int,
        ranks: Ranks | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        super().__init__(module, config, total_steps=total_steps, ranks=ranks, parallel=parallel)
        self._scorer = ScalarScorer(module, config, parallel=parallel)

    def values(self, batch: Batch) -> Ragged:
        """The value of the state before each loss token, 0 elsewhere; see ``ScalarScorer.values``."""
        return self._scorer.values(batch)

    def scores(self, batch: Batch) -> Tensor:
        """[B] the score of each row; see ``ScalarScorer.scores``."""
        return self._scorer.scores(batch)

    def update(self, minibatch: Batch, loss: ScalarLoss) -> dict[str, Metric]:
        """Make one optimiser step; see ``Learner.step``.

        Args:
            minibatch: rows with the fields the loss reads.
            loss: what is minimised.
        """
        return self.step(self.aim(minibatch, loss))

    def aim(self, minibatch: Batch, loss: ScalarLoss) -> Aim[Tensor]:
        """A loss over a scalar head, for a ``step``."""
        return Aim(rows=minibatch, loss=loss, forward=_Scalars(self._scorer, loss.back))


@dataclass(frozen=True, eq=False)
class _Scalars:
    """The forward pass of a scalar head; see Forward."""

    scorer: ScalarScorer
    back: int

    def __call__(self, part: Batch, tokens: Batch) -> Tensor:
        del tokens  # there is nothing that the numbers could be compared with
        return self.scorer.forward(part, back=self.back)

    def lay_out(self, part: Batch) -> Reading:
        return self.scorer.lay_out(part, back=self.back)

    def read(self, part: Batch, tokens: Batch, output: Tensor) -> Tensor:
        del part, tokens
        return output

    def describe(self, read: Tensor, index: int) -> str:
        return f"the head gives it {float(read[index].detach())}"
