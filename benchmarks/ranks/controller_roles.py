"""Scripted roles for controller.py; every rank imports this file, so it imports no model."""

from __future__ import annotations

from typing import Any

import torch

from rillflow.records.batch import Batch, joined
from rillflow.records.metrics import Mean, Metric
from rillflow.records.ragged import Ragged
from rillflow.workers.backend import Site
from rillflow.workers.endpoint import endpoint
from rillflow.workers.transfer import BROADCAST, DP, SPLIT_DP_REDUCE


class Policy:
    """Answers every prompt with a long row of one token, at once, and learns nothing."""

    def __init__(self, site: Site) -> None:
        del site
        self._version = 0

    @endpoint(DP, reads=("length",), writes=("tokens", "loss_mask", "sampler_logprobs", "versions"))
    def generate(self, prompts: Batch, samples: int) -> Batch:
        ids = prompts.ids.repeat_interleave(samples, 0)
        ids[:, 2] = torch.arange(samples).repeat(len(prompts))
        lengths = prompts.dense("length").repeat_interleave(samples)
        tokens = Ragged(values=torch.ones(int(lengths.sum()), dtype=torch.int64), lengths=lengths)
        fields = {
            "tokens": tokens,
            "loss_mask": tokens.with_values(tokens.values.bool()),
            "sampler_logprobs": tokens.with_values(-tokens.values.float()),
            "versions": tokens.with_values(tokens.values.int() * self._version),
        }
        return Batch(ids=ids, fields=fields)

    @endpoint(SPLIT_DP_REDUCE, reads=("tokens", "loss_mask", "sampler_logprobs", "advantages"))
    def update(self, *known: Batch, loss: Any, passes: Any) -> dict[str, Metric]:
        del loss, passes
        advantages = joined(known).ragged("advantages").values
        return {"policy/loss/mean": Mean(total=float(advantages.double().sum()), count=len(advantages))}

    @endpoint(BROADCAST)
    def publish(self) -> int:
        self._version += 1
        return self._version


class Critic:
    """Returns 0.1 as the value of every token."""

    def __init__(self, site: Site) -> None:
        del site

    @endpoint(DP, reads=("tokens", "loss_mask"), writes=("values",))
    def values(self, rollouts: Batch) -> Batch:
        tokens = rollouts.ragged("tokens")
        return Batch(ids=rollouts.ids, fields={"values": tokens.with_values(tokens.values * 0.1)})

    @endpoint(SPLIT_DP_REDUCE, reads=("tokens", "loss_mask", "values", "returns"))
    def update(self, *known: Batch, loss: Any, passes: Any) -> dict[str, Metric]:
        del loss, passes
        returns = joined(known).ragged("returns").values
        return {"critic/loss/mean": Mean(total=float(returns.double().sum()), count=len(returns))}


class Reference:
    """Returns the sampled log probabilities minus 0.001."""

    def __init__(self, site: Site) -> None:
        del site

    @endpoint(DP, reads=("sampler_logprobs",), writes=("reference_logprobs",))
    def logprobs(self, rollouts: Batch) -> Batch:
        sampled = rollouts.ragged("sampler_logprobs")
        found = sampled.with_values(sampled.values - 0.001)
        return Batch(ids=rollouts.ids, fields={"reference_logprobs": found})


class Reward:
    """Rewards every third row."""

    def __init__(self, site: Site) -> None:
        del site

    @endpoint(DP, reads=("tokens", "loss_mask"), writes=("rewards", "valid"))
    def score(self, rollouts: Batch) -> Batch:
        valid = torch.ones(len(rollouts), dtype=torch.bool)
        rewards = (rollouts.ids.sum(1) % 3 == 0).float()
        return Batch(ids=rollouts.ids, fields={"rewards": rewards, "valid": valid})
