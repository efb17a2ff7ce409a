"""The critic: what every state of a rollout is worth, learned from what came of it.

rollouts ─ values ─> values of the states before the sampled tokens
rollouts ─ final_values ─> value of the state after each row's last token
rollouts + values + returns ─ update ─> metrics
"""

from __future__ import annotations

from typing import Any

from rillflow.graph.loss import only_term
from rillflow.records.batch import Batch, joined
from rillflow.records.metrics import Metric
from rillflow.roles.scalar_role import ScalarRole
from rillflow.training.config import PassesConfig
from rillflow.training.loss import loss_of
from rillflow.workers.endpoint import endpoint
from rillflow.workers.transfer import THREE_D, TRAIN


class Critic(ScalarRole):
    """A model with a scalar head that is trained on returns; the cost's has a name of its own."""

    called = "critic"

    @endpoint(THREE_D, reads=("tokens", "loss_mask"), writes=("values",))
    def values(self, rollouts: Batch) -> Batch:
        """The field ``values``: what the state before each sampled token is worth, 0 elsewhere."""
        return Batch(ids=rollouts.ids, fields={"values": self._scorer.values(rollouts)})

    @endpoint(THREE_D, reads=("tokens",), writes=("final_values",))
    def final_values(self, rollouts: Batch) -> Batch:
        """The field ``final_values`` [B]: what the state after each row's last token is worth."""
        return Batch(ids=rollouts.ids, fields={"final_values": self._scorer.scores(rollouts)})

    @endpoint(TRAIN, reads=("tokens", "loss_mask", "values"), says=("values", "old_values", "row_lengths"))
    def update(self, /, *known: Batch, loss: Any, passes: PassesConfig, **options: Any) -> dict[str, Metric]:
        """Optimiser steps on rows joined from ``known``: rollouts, the ``values`` they had, and ``returns``.

        Both are aligned to ``tokens`` and count at the sampled tokens. Metrics are named after the role.

        Args:
            known: rows, with what the loss reads.
            loss: a function (see ``formulas.losses``), or ``config.value_loss``.
            passes: how often rows are gone through, and in how many steps.
            options: arguments of the loss that are no fields.

        Raises:
            TrainingError: a number is not finite.
        """
        rows = joined(known)
        rows = rows.with_fields(old_values=rows.ragged("values"))
        term = only_term(f"{self._name}.update", loss, options)
        metrics = self._trained(rows, loss_of(term, ("values",), self._name), passes)
        return {f"{self._name}/{name.partition('/')[2]}": metric for name, metric in metrics.items()}
