"""The reference: the policy as it was when the algorithm began, frozen."""

from __future__ import annotations

from rillflow.models.language_model import LanguageModel
from rillflow.records.batch import Batch
from rillflow.train.config import TrainConfig
from rillflow.train.scorer import Scorer
from rillflow.workers.endpoint import endpoint
from rillflow.workers.transfer import DP


class Reference:
    """A language model that only scores.

    Args:
        model: the frozen module.
        train: how a batch is cut into micro-batches.
        temperature: the temperature the policy is sampled at.
    """

    def __init__(self, model: LanguageModel, *, train: TrainConfig, temperature: float) -> None:
        model.module.requires_grad_(False)
        self._scorer = Scorer(model.module, train)
        self._temperature = temperature

    @endpoint(DP, reads=("tokens", "loss_mask"), writes=("reference_logprobs",))
    def logprobs(self, rollouts: Batch) -> Batch:
        """The field ``reference_logprobs``: what the reference gives every sampled token."""
        found = self._scorer.logprobs(rollouts, temperature=self._temperature)
        return Batch(ids=rollouts.ids, fields={"reference_logprobs": found})
