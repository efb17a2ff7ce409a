"""The reference: the policy as it was when the algorithm began, frozen."""

from __future__ import annotations

from rillflow.models.language_model import LanguageModel
from rillflow.records.batch import Batch
from rillflow.roles.share import Share
from rillflow.training.config import TrainConfig
from rillflow.training.scorer import Scorer
from rillflow.workers.endpoint import endpoint
from rillflow.workers.transfer import THREE_D


class Reference:
    """A language model that only scores.

    Args:
        share: the model, or this rank's part of it; it is frozen.
        train: how a batch is cut into micro-batches.
        temperature: the temperature the policy is sampled at.
    """

    def __init__(self, share: Share[LanguageModel], *, train: TrainConfig, temperature: float) -> None:
        share.model.module.requires_grad_(False)
        self._scorer = Scorer(share.model.module, train, parallel=share.parallel)
        self._temperature = temperature

    @endpoint(THREE_D, reads=("tokens", "loss_mask"), writes=("reference_logprobs",))
    def logprobs(self, rollouts: Batch) -> Batch:
        """The field ``reference_logprobs``: what the reference gives every sampled token."""
        found = self._scorer.logprobs(rollouts, temperature=self._temperature)
        return Batch(ids=rollouts.ids, fields={"reference_logprobs": found})
