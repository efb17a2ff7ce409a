"""The critic: what every state of a rollout is worth, learned from what came of it.

rollouts ─ values ─> values of the states before the sampled tokens
rollouts + values + returns ─ update ─> metrics
"""

from __future__ import annotations

from rillflow.cluster.ranks import Ranks
from rillflow.models.scalar_model import ScalarModel
from rillflow.models.tokenizer import Tokenizer
from rillflow.records.batch import Batch, joined
from rillflow.records.metrics import Metric, merge_metrics
from rillflow.roles.scalar_role import ScalarRole
from rillflow.train.config import PassesConfig, TrainConfig, ValueLossConfig
from rillflow.train.minibatches import minibatches
from rillflow.train.scalar_loss import ValueLoss
from rillflow.workers.endpoint import endpoint
from rillflow.workers.transfer import DP, TRAIN


class Critic(ScalarRole):
    """A model with a scalar head that is trained on returns.

    Args:
        model: the module and its tokeniser.
        tokenizer: the policy's; the two must have the same tokens.
        train: the optimiser's settings of the first phase.
        seed: the run's seed; it decides how rows are cut into minibatches.
        updates: optimiser steps of that phase, for the schedule.
        version: calls of ``update`` so far.
        ranks: those that hold the other rows of every batch.
        name: ``critic``, or ``cost_critic`` for one that is trained on costs.

    Raises:
        ModelError: the policy's tokens are others.
    """

    def __init__(
        self,
        model: ScalarModel,
        *,
        tokenizer: Tokenizer,
        train: TrainConfig,
        seed: int,
        updates: int,
        version: int = 0,
        name: str = "critic",
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(
            model,
            name=name,
            tokenizer=tokenizer,
            train=train,
            seed=seed,
            updates=updates,
            version=version,
            ranks=ranks,
        )

    @endpoint(DP, reads=("tokens", "loss_mask"), writes=("values",))
    def values(self, rollouts: Batch) -> Batch:
        """The field ``values``: what the state before each sampled token is worth, 0 elsewhere."""
        return Batch(ids=rollouts.ids, fields={"values": self._scorer.values(rollouts)})

    @endpoint(TRAIN, reads=("tokens", "loss_mask", "values", "returns"))
    def update(self, *known: Batch, loss: ValueLossConfig, reuse: PassesConfig) -> dict[str, Metric]:
        """Optimiser steps on rows joined from ``known``: rollouts, the ``values`` they had, and ``returns``.

        Both are aligned to ``tokens`` and count at the sampled tokens. Metrics are named after the role.

        Raises:
            TrainingError: a number is not finite.
        """
        rows = joined(known)
        rows = rows.with_fields(old_values=rows.ragged("values"))
        cut = minibatches(rows, reuse.epochs, reuse.minibatches, self._seed, self.version, ranks=self._ranks)
        metrics = merge_metrics([self.trainer.update(part, ValueLoss(loss)) for part in cut])
        self.version += 1
        return {f"{self._name}/{name.partition('/')[2]}": metric for name, metric in metrics.items()}
