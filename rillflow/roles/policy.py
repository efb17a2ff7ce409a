"""The policy: the model that is trained; its other half, the sampler, generates.

rollouts ─ logprobs ─> old_logprobs
rollouts + advantages, demonstrations ─ update ─> metrics, by any losses
publish: make the trained weights the next version to sample from (roles.publishing)
begin, save: a phase of training, and the state to resume it from

The reference is the frozen policy of the phase's start: rollouts ─ logprobs ─> reference_logprobs
follow: move the reference towards the policy; every rank moves its own shard
Both have rows ─ totals ─> log probabilities summed over each row
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from rillflow.errors import ModelError, TrainingError
from rillflow.graph.loss import LossTerm, loss_terms
from rillflow.models.language_model import LanguageModel
from rillflow.records.batch import Batch, joined
from rillflow.records.metrics import Max, Metric, Metrics, histogram_of, mean_of, merge_metrics
from rillflow.roles.answer_totals import KeptTotals, totals_of
from rillflow.roles.logprob_check import canary_rows
from rillflow.roles.model_shard import ModelShard
from rillflow.roles.publishing import SentWeights, SharedWeights, TrainedWeights, lay_out
from rillflow.roles.saving import Saving
from rillflow.roles.setting import RoleSetting
from rillflow.roles.trained_role import StatefulRole, TrainedRole, Training
from rillflow.rollout.config import NATIVE, RolloutConfig
from rillflow.rollout.engine import Capability, engine_class
from rillflow.runs.abandoning import whole
from rillflow.training.config import PassesConfig, UpdateConfig
from rillflow.training.guards import ROUTES, check_freshness
from rillflow.training.loss import are_sampled, loss_of
from rillflow.training.offload import OnHost
from rillflow.training.scorer import Scorer
from rillflow.training.terms import SAMPLED
from rillflow.training.trainer import Objective
from rillflow.workers.endpoint import endpoint
from rillflow.workers.transfer import BROADCAST, SPLIT_DP, SPLIT_DP_REDUCE

MODEL_OUTPUTS = ("logprobs", "entropy", "likeliest", "old_logprobs", "row_lengths")
"""Inputs of a loss besides fields."""
KNOWN = ("versions", SAMPLED, "old_logprobs", "preferred", *ROUTES)
"""Fields that an update reads from sampled rows or pairs of rows."""


class Policy(TrainedRole[LanguageModel]):
    """A language model that is trained and published to its sampler.

    Args:
        share: the model, or this rank's shard of it.
        training: settings of its training.
        rollout: sampling settings; losses use the temperature.
        weights: sends the weights to the sampler; None if the sampler has the trained module itself.
        has_canary: whether a publish carries the log probabilities of fixed texts.

    Raises:
        ModelError: experts are to be balanced, or their routing replayed, and the model has no experts.
    """

    def __init__(
        self,
        share: ModelShard[LanguageModel],
        training: Training,
        *,
        rollout: RolloutConfig,
        weights: TrainedWeights | None = None,
        has_canary: bool = False,
    ) -> None:
        super().__init__(share, training, name="policy")
        if training.config.balance > 0:
            share.parallel.routers.require(f"policy.balance is {training.config.balance:g}")
        if rollout.replay_routing:
            share.parallel.routers.require("rollout.replay_routing is true")
        self.weights = weights or SharedWeights(share.model.module, self.version)
        self._rollout, self._has_canary = rollout, has_canary

    @classmethod
    def make(cls, setting: RoleSetting) -> Self:
        """Make the policy, whose sampler is on the same ranks, or on others that it sends its weights to."""
        model = setting.load(LanguageModel)
        weights: TrainedWeights
        if setting.generate is None:
            share = setting.share(model)
            weights = SentWeights(share, setting.codecs.weights)
        else:
            share, weights = lay_out(
                model,
                sizes=setting.sizes,
                generate=setting.generate,
                ranks=setting.site.ranks,
                version=setting.version,
            )
        has_canary = Capability.SCORE in engine_class(setting.engine).can
        return cls(share, setting.training, rollout=setting.rollout, weights=weights, has_canary=has_canary)

    def _be_training(self) -> None:
        self.weights.turn_to_training()

    @endpoint(
        SPLIT_DP,
        reads=("tokens", "loss_mask"),
        writes=("old_logprobs",),
        alone=True,
        optional_fields=(*ROUTES,),
    )
    def logprobs(self, rollouts: Batch) -> Batch:
        """Return the field ``old_logprobs``: log probabilities of sampled tokens by the present weights."""
        self.weights.turn_to_training()
        found = self._scorer.logprobs(rollouts, temperature=self._rollout.temperature)
        return Batch(ids=rollouts.ids, fields={"old_logprobs": found})

    @endpoint(
        SPLIT_DP,
        reads=("tokens", "loss_mask"),
        writes=("policy_totals",),
        optional_fields=("versions", *ROUTES),
    )
    def totals(self, rows: Batch) -> Batch:
        """Return the field ``policy_totals`` [B]: the rows' log probabilities by the present weights."""
        self.weights.turn_to_training()
        found = totals_of(self._scorer, rows, self._rollout.temperature)
        return Batch(ids=rows.ids, fields={"policy_totals": found})

    @endpoint(
        SPLIT_DP_REDUCE,
        reads=("tokens", "loss_mask"),
        optional_fields=KNOWN,
        model_outputs=MODEL_OUTPUTS,
        by_parts=True,
    )
    def update(
        self,
        /,
        *batches: Batch,
        loss: Any,
        passes: PassesConfig,
        name: str = "",
        part: tuple[int, int] = (0, 1),
        **options: Any,
    ) -> dict[str, Metric]:
        """Make optimiser steps on rows joined from ``batches``: rollouts, advantages and inputs of the loss.

        Args:
            batches: rows; with several losses, the batches of each, one after the other.
            loss: a function (see ``formulas.losses``), ``config.loss``, or several joined by ``over``: an
                optimiser step then takes a minibatch of each, and a loss without rows is left out.
            passes: number of epochs and minibatches.
            name: area of the loss's metrics; policy if empty.
            part: index of this part of the iteration's rows, and the number of parts.
            options: arguments of the loss that are not fields.

        Raises:
            TrainingError: a number is not finite, a token is older than ``passes.freshness`` allows, a token
                of the present version in the first minibatch is not on-policy, or losses have unequal
                numbers of minibatches.
        """
        self.weights.turn_to_training()
        terms = loss_terms({"loss": loss, "name": name, **options}, len(batches))
        left, cut, beside = list(batches), [], dict[str, Metric]()
        if isinstance(self.weights, SentWeights) and part[0] == 0:
            beside |= self.weights.link_metrics()
        for term in terms:
            rows, left = joined(left[: term.count]), left[term.count :]
            if isinstance(passes, UpdateConfig):
                behind = check_freshness(rows, self.version, passes.oldest)
                if passes.oldest != 0 and len(behind):
                    beside |= _ages(behind, passes.oldest)
                    versions = rows.ragged("versions")
                    rows = rows.with_fields(
                        versions_behind=versions.with_values(self.version - versions.values)
                    )
            cut.append(self._aims(rows, term, passes, part))
        if len(cut) == 1:
            return _with(beside, [self.trainer.step(aim) for aim in cut[0]])
        whole = [aims for aims in map(list, cut) if aims]
        if len({len(aims) for aims in whole}) > 1:
            counts = [f"{len(aims)} of {aims[0].loss.name}" for aims in whole]
            raise TrainingError(
                f"the losses of an update have unequal numbers of minibatches: {', '.join(counts)}",
                why="every optimiser step takes one minibatch of each loss",
                fix="lower algorithm.minibatches, or raise algorithm.prompts_per_step",
            )
        return _with(beside, [self.trainer.step(*aims) for aims in zip(*whole, strict=True)])

    @endpoint(BROADCAST)
    def publish(self) -> int:
        """Publish the trained weights to the sampler and return their version."""
        self.version += 1
        self.announce(self.version % self._rollout.weight_check_interval == 0)
        return self.version

    def announce(self, compared: bool = True) -> None:
        """Announce the weights as the present version; see ``SharedWeights.publish``."""
        canary: tuple[float, ...] = ()
        if self._has_canary:
            self.weights.turn_to_training()
            rows = canary_rows(self.model)
            found = self._scorer.logprobs(rows).values
            self.share.groups.pp.sum_([found])
            canary = tuple(found[rows.ragged("loss_mask").values].tolist())
        self.weights.publish(self.version, compared, canary)

    def _aims(
        self, rows: Batch, term: LossTerm, passes: PassesConfig, part: tuple[int, int]
    ) -> Iterator[Objective]:
        """Yield one loss's aim for each optimiser step; the first part's first step must be on-policy."""
        objective = loss_of(term, MODEL_OUTPUTS[:3], "policy", self._rollout.max_tokens)
        sampled, ratio, gap = are_sampled(rows), None, None
        temperature = self._rollout.temperature if sampled else 1.0
        if sampled and isinstance(passes, UpdateConfig):
            if part[0] == 0:
                ratio, gap = (passes.ratio_tolerance, None) if self._exact else (None, passes.gap_tolerance)
            if passes.reads_sampler:
                rows = rows.with_fields(old_logprobs=rows.ragged(SAMPLED))
            if (
                passes.is_off_policy
                and "old_logprobs" in objective.reads
                and "old_logprobs" not in rows.fields
            ):
                raise TrainingError(
                    "the policy's loss reads old_logprobs, and no batch of the update has them",
                    why="freshness, minibatches or epochs make the rows off-policy; without old log "
                    "probabilities every ratio would be 1",
                    fix='add flow.policy.logprobs(rollouts) to the batches, or set old_logprobs = "sampler"',
                )
        how: dict[str, Any] = {"weight": term.weight, "ratio_tolerance": ratio, "gap_tolerance": gap}
        for minibatch in self._minibatches(rows, passes, part, objective.units(rows)):
            yield self.trainer.aim(minibatch, objective, temperature, **how)
            how = {"weight": term.weight}

    @property
    def _exact(self) -> bool:
        """Whether on-policy ratios must be 1 at every token, not only in the mean."""
        return self._rollout.engine == NATIVE and bool(self.model.module.dtype.itemsize >= 4)


class EarlierAdapter(AbstractContextManager[None]):
    """Context in which the policy's module has an earlier adapter; both use one copy of the base.

    A stop does not interrupt the context: the policy could not be saved in it.

    Args:
        policy: the policy on this rank.
        adapter: this rank's tensors of the earlier adapter, by name.
    """

    def __init__(self, policy: Policy, adapter: Mapping[str, Tensor]) -> None:
        self._policy, self._other = policy, dict(adapter)
        self._section: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> None:
        self._section = whole()
        self._section.__enter__()
        self._policy.weights.turn_to_training()
        self._exchange()

    def __exit__(self, *error: object) -> None:
        self._exchange()
        self._section.__exit__(None, None, None)

    @torch.no_grad()
    def follow(self) -> None:
        """Copy the policy's present adapter."""
        for name, kept in self._other.items():
            kept.copy_(self._policy.share.parallel.parameters[name])

    def _exchange(self) -> None:
        for name, kept in self._other.items():
            weight = self._policy.share.parallel.parameters[name]
            self._other[name], weight.data = weight.data, kept


class Reference(StatefulRole):
    """A language model that only scores.

    Args:
        share: the model, or this rank's shard of it; it is frozen, unless it is the policy's.
        setting: settings of the role; a file next to its model keeps the totals of data rows.
        within: set if the policy's own module is the reference.
    """

    def __init__(
        self, share: ModelShard[LanguageModel], setting: RoleSetting, within: EarlierAdapter | None = None
    ) -> None:
        super().__init__()
        share.compress(setting.codecs.activations)
        assert setting.model is not None and setting.model.path is not None, (
            "a reference is a copy of the policy"
        )
        kept = Path(setting.model.path).with_name(f"{setting.role}_totals.jsonl")
        self.share, self._within, self._name = share, within, setting.role
        self._policy: Policy | None = setting.site.objects.get("policy")
        self.updates = setting.version
        """Calls of ``follow`` so far."""
        self._scorer = Scorer(share.model.module, setting.train, parallel=share.parallel)
        self._temperature, self._kept = setting.rollout.temperature, KeptTotals(share.groups, kept)
        self._there: AbstractContextManager[None] = within or nullcontext()
        if within is None:
            share.model.module.requires_grad_(False)
            if setting.train.offload in ("reference", "all"):
                self._there = OnHost(share.model.module.parameters())

    @classmethod
    def make(cls, setting: RoleSetting) -> Self:
        """Make a frozen copy of the policy: a model, or an earlier adapter in the policy's own module."""
        model, policy = setting.load(LanguageModel), setting.site.objects.get("policy")
        if policy is None or not policy.share.has_base_of(model, setting.sizes):
            return cls(ModelShard.of(model, setting.sizes, setting.site.ranks), setting)
        return cls(policy.share, setting, EarlierAdapter(policy, policy.share.read_trained(model)))

    @endpoint(SPLIT_DP, reads=("tokens", "loss_mask"), writes=("reference_logprobs",), alone=True)
    def logprobs(self, rollouts: Batch) -> Batch:
        """Return the field ``reference_logprobs``: log probabilities of sampled tokens by the reference."""
        with self._there:
            found = self._scorer.logprobs(rollouts, temperature=self._temperature)
        return Batch(ids=rollouts.ids, fields={"reference_logprobs": found})

    @endpoint(
        SPLIT_DP,
        reads=("tokens", "loss_mask"),
        writes=("reference_totals",),
        optional_fields=("versions", *ROUTES),
    )
    def totals(self, rows: Batch) -> Batch:
        """Return the field ``reference_totals`` [B]: each row's summed log probability by the reference.

        A row of data is computed once, in the first epoch that has it, and kept. Sampled rows never come
        again and are not kept.
        """

        def compute(some: Batch) -> Tensor:
            with self._there:
                return totals_of(self._scorer, some, self._temperature)

        return Batch(ids=rows.ids, fields={"reference_totals": self._kept.of(rows, compute)})

    @endpoint(BROADCAST)
    def follow(self, rate: float, every: int) -> int:
        """Move towards the policy in every ``every``-th call: ref <- (1 - rate) ref + rate policy.

        TR-DPO, arXiv 2404.09656; a small rate in every call is WARP's exponential mean, arXiv 2406.16768.
        Each rank moves its own shard; nothing is sent.

        Returns:
            The number of calls in the phase.

        Raises:
            ModelError: the policy is on other ranks or sharded differently, or the two are adapters, whose
                mean is not the mean of their changes.
        """
        policy, own = self._policy, self.share.parallel.local_weights()
        theirs = {} if policy is None else policy.share.parallel.local_weights()
        cut = ({name: each.shape for name, each in held.items()} for held in (own, theirs))
        if policy is None or next(cut) != next(cut):
            raise ModelError(
                "the reference cannot follow the policy",
                why="each rank moves its own shard; the two are on different ranks or sharded differently",
                fix="place both in one pool with one grid",
            )
        if rate < 1 and self.share.model.adapter is not None:
            raise ModelError(
                f"algorithm.reference_rate is {rate:g}, and the policy trains an adapter",
                why="the mean of two adapters' factors is not the mean of their changes to the weights",
                fix="set algorithm.reference_rate = 1.0, which copies the policy's adapter",
            )
        with whole():
            self.updates += 1
            if self.updates % every == 0:
                policy.weights.turn_to_training()
                self._move(own, theirs, rate)
        return self.updates

    @torch.no_grad()
    def _move(self, own: Mapping[str, Tensor], theirs: Mapping[str, Tensor], rate: float) -> None:
        if self._within is not None:
            self._within.follow()
            return
        with self._there:
            for name in self.share.written.keys() & own.keys():
                own[name].lerp_(theirs[name], rate)
            if isinstance(self._there, OnHost):
                self._there.keep()

    def _saved(self, folder: Path) -> Saving:
        with self._there:
            return Saving(self.share, folder / self._name)


def _ages(behind: Tensor, bound: int | None) -> dict[str, Metric]:
    """Return metrics of the versions [N] that tokens are behind; a histogram needs a bound."""
    counts = {} if bound is None else {"staleness/versions/histogram": histogram_of(behind, range(bound))}
    return {
        **counts,
        "staleness/versions/mean": mean_of(behind),
        "staleness/versions/max": Max(value=float(behind.max())),
    }


def _with(beside: Mapping[str, Metric], steps: Sequence[Metrics]) -> dict[str, Metric]:
    """Merge the metrics of optimiser steps and further ones; empty on a rank that reports none."""
    found = merge_metrics(steps)
    return found and {**found, **beside}
