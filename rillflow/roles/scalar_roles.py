"""Scalar roles: models with a scalar head that score and are trained: critics, reward and cost models.

    critic          rollouts ─ values ─> values of the states before the sampled tokens
                    rollouts ─ final_values ─> value of the state after each row's last token
                    rollouts + values + returns ─ update ─> metrics
    reward model    rollouts ─ score ─> rewards (or costs), with the fields of the reward role
                    pairs ─ update ─> metrics                                     chosen above rejected

A rollout is scored at its last token; the model reads prompt and answer as the policy's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch

from rillflow.errors import RewardError
from rillflow.graph.loss import only_term
from rillflow.models.language_model import ScalarModel, require_same_tokens
from rillflow.models.tokenizer import Tokenizer
from rillflow.records.batch import Batch, joined
from rillflow.records.metrics import Metric
from rillflow.records.rollout import completions
from rillflow.rewards.outcome import Outcome, Score
from rillflow.roles.model_shard import ModelShard
from rillflow.roles.retokenize import OtherTokens, Reread
from rillflow.roles.reward import (
    COST_FIELDS,
    SCORE_FIELDS,
    cost_metrics,
    require_readable,
    reward_metrics,
    scored_rows,
)
from rillflow.roles.setting import RoleSetting
from rillflow.roles.trained_role import TrainedRole, Training
from rillflow.tasks.encoded import Encoder
from rillflow.training.config import PassesConfig
from rillflow.training.loss import loss_of
from rillflow.workers.endpoint import endpoint
from rillflow.workers.transfer import SPLIT_DP, SPLIT_DP_REDUCE, SPLIT_PAIRS_REDUCE


class Critic(TrainedRole[ScalarModel]):
    """A model with a scalar head that is trained on returns; a cost critic has another name.

    Args:
        share: the model, or this rank's shard of it.
        training: settings of its training.
        tokenizer: the policy's tokeniser.
        name: its name in errors, metrics and files.

    Raises:
        ModelError: the model's tokens differ from the policy's.
    """

    def __init__(
        self,
        share: ModelShard[ScalarModel],
        training: Training,
        *,
        tokenizer: Tokenizer,
        name: str = "critic",
    ) -> None:
        require_same_tokens(share.model, tokenizer, name)
        super().__init__(share, training, name=name)

    @classmethod
    def make(cls, setting: RoleSetting) -> Self:
        """Make a critic with a zero head or a checkpoint's; errors and metrics carry the role's name."""
        share = setting.share(setting.load(ScalarModel))
        return cls(share, setting.training, tokenizer=setting.tokenizer, name=setting.role)

    @endpoint(SPLIT_DP, reads=("tokens", "loss_mask"), writes=("values",), alone=True)
    def values(self, rollouts: Batch) -> Batch:
        """Return the field ``values``: the value of the state before each sampled token, 0 elsewhere."""
        return Batch(ids=rollouts.ids, fields={"values": self._scorer.values(rollouts)})

    @endpoint(SPLIT_DP, reads=("tokens",), writes=("final_values",), alone=True)
    def final_values(self, rollouts: Batch) -> Batch:
        """Return the field ``final_values`` [B]: the value of the state after each row's last token."""
        return Batch(ids=rollouts.ids, fields={"final_values": self._scorer.scores(rollouts)})

    @endpoint(
        SPLIT_DP_REDUCE,
        reads=("tokens", "loss_mask", "values"),
        model_outputs=("values", "old_values", "row_lengths"),
        by_parts=True,
    )
    def update(
        self,
        /,
        *known: Batch,
        loss: Any,
        passes: PassesConfig,
        part: tuple[int, int] = (0, 1),
        **options: Any,
    ) -> dict[str, Metric]:
        """Make optimiser steps on rows joined from ``known``: rollouts, their ``values``, and ``returns``.

        Both fields are aligned to ``tokens`` and count at sampled tokens. Metrics are named after the role.

        Args:
            known: rows with the inputs of the loss.
            loss: a function (see ``formulas.losses``), or ``config.value_loss``.
            passes: number of epochs and minibatches.
            part: index of this part of the iteration's rows, and the number of parts.
            options: arguments of the loss that are not fields.

        Raises:
            TrainingError: a number is not finite.
        """
        rows = joined(known)
        rows = rows.with_fields(old_values=rows.ragged("values"))
        term = only_term(f"{self._name}.update", loss, options)
        metrics = self._learn(rows, loss_of(term, ("values",), self._name), passes, part=part)
        return {f"{self._name}/{name.partition('/')[2]}": metric for name, metric in metrics.items()}


class RewardModel(TrainedRole[ScalarModel]):
    """A model with a scalar head that scores rollouts and is trained on pairs.

    Args:
        share: the model, or this rank's shard of it.
        training: settings of its training.
        tokenizer: the policy's tokeniser; both must have the same tokens, unless ``reread`` converts rows.
        reread: converts the policy's rows for a model with other tokens, which only scores.

    Raises:
        ModelError: the model's tokens differ from the policy's, and ``reread`` is None.
    """

    called = "reward model"
    """Its name in errors and files."""
    field = "rewards"
    """Name of the scores' field."""

    def __init__(
        self,
        share: ModelShard[ScalarModel],
        training: Training,
        *,
        tokenizer: Tokenizer,
        reread: Callable[[Batch], Reread] | None = None,
    ) -> None:
        if reread is None:
            require_same_tokens(share.model, tokenizer, self.called)
        super().__init__(share, training, name=self.called)
        self._tokenizer, self._reread = tokenizer, reread

    @classmethod
    def make(cls, setting: RoleSetting) -> Self:
        """Make a model to train, or one that only scores, whose tokeniser may differ from the policy's."""
        model, reread = setting.load(ScalarModel, f"{setting.role}.model"), None
        wrote = model.tokenizer if setting.model is not None else setting.tokenizer
        if model.tokenizer.first_difference(wrote) is not None:
            encoder = Encoder.of(model.tokenizer, setting.task)
            reread = OtherTokens(wrote=wrote, encoder=encoder, context=model.context)
        return cls(setting.share(model), setting.training, tokenizer=wrote, reread=reread)

    @endpoint(
        SPLIT_DP,
        reads=("tokens", "loss_mask"),
        optional_fields=("columns",),
        writes=SCORE_FIELDS,
        measures=reward_metrics,
        alone=True,
    )
    def score(self, rollouts: Batch) -> Batch:
        """Score every rollout.

        Returns:
            The fields of ``Reward.score``; a row is valid if the model's tokeniser can read it.

        Raises:
            RewardError: a score is not finite, or no row can be read.
            TrainingError: a row is empty.
        """
        reread = None if self._reread is None else self._reread(rollouts)
        why = [""] * len(rollouts) if reread is None else reread.why
        require_readable(self.called, why)
        values = self._scorer.scores(rollouts if reread is None else reread.rows)
        odd = (~torch.isfinite(values)).nonzero()
        if len(odd):
            row = int(odd[0])
            raise RewardError(
                f"the model's score of row ({rollouts.row_id(row)}) is {float(values[row])}",
                why=f"training needs finite {self.field}",
                fix="look for non-finite weights in the model",
            )
        texts = [self._tokenizer.decode(tokens) for tokens in completions(rollouts).lists()]
        scores = [
            Score(outcome=Outcome.ERROR, message=why) if why else Score(outcome=Outcome.SCORE, value=value)
            for value, why in zip(values.tolist(), why, strict=True)
        ]
        return scored_rows(rollouts, texts, scores, self.field)

    @endpoint(
        SPLIT_PAIRS_REDUCE,
        reads=("tokens",),
        optional_fields=("loss_mask",),
        model_outputs=("chosen", "rejected"),
    )
    def update(self, /, pairs: Batch, loss: Any, passes: PassesConfig, **options: Any) -> dict[str, Metric]:
        """Make optimiser steps over pairs of a better and a worse answer.

        Args:
            pairs: two rows per pair, one after the other, as ``tasks.prompts.answered_batch`` makes them.
                For costs, the chosen answer is the one that costs more.
            loss: a function of ``chosen`` and ``rejected`` scores [P], such as ``formulas.preference_loss``.
            passes: number of epochs and minibatches.
            options: further arguments of the loss.

        Raises:
            TrainingError: a row has no partner, or a number is not finite.
        """
        term = only_term(f"{self._name}.update", loss, options)
        return self._learn(pairs, loss_of(term, ("chosen", "rejected"), self._name), passes)


class SafetyCostModel(RewardModel):
    """A reward model whose scores are ``costs``: higher is worse."""

    called = "cost model"
    field = "costs"

    @endpoint(
        SPLIT_DP,
        reads=("tokens", "loss_mask"),
        optional_fields=("columns",),
        writes=COST_FIELDS,
        measures=cost_metrics,
        alone=True,
    )
    def score(self, rollouts: Batch) -> Batch:
        """Score every rollout like ``RewardModel.score``; the scores are called ``costs``."""
        return super().score(rollouts)
