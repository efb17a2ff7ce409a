"""The policy: the model that is sampled from and trained.

    prompts ─ generate, greedy ─> rollouts         (rollout engine)
    rollouts ─ logprobs ─> old_logprobs            (training engine)
    rollouts + advantages, demonstrations ─ update ─> metrics, by any losses (training engine)
    publish: what was trained is what is sampled next, under the next version
    begin, save: a phase of training, and what it goes on from

Both engines work on the same parameters, so publishing moves no byte here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rillflow.errors import TrainingError
from rillflow.graph.loss import LossTerm, loss_terms
from rillflow.models.language_model import LanguageModel
from rillflow.records.batch import Batch, joined
from rillflow.records.metrics import Metric, merge_metrics
from rillflow.roles.sampler import Own, Sampler
from rillflow.roles.share import Share
from rillflow.rollout.config import RolloutConfig, SamplingConfig
from rillflow.rollout.native.engine import NativeEngine
from rillflow.train.config import PassesConfig, TrainConfig, UpdateConfig
from rillflow.train.loss import SAMPLED, are_sampled, loss_of
from rillflow.train.minibatches import minibatches
from rillflow.train.trainer import Aim, Trainer
from rillflow.workers.endpoint import endpoint
from rillflow.workers.transfer import ALL_MICRO_DP, THREE_D, TOGETHER, TRAIN

ROLLOUT_FIELDS = ("tokens", "loss_mask", "sampler_logprobs", "versions", "finish", "columns", "limits")
"""What ``records.rollout.rollout_batch`` makes, and the most tokens that each row could have sampled."""
SAYS = ("logprobs", "entropy", "likeliest", "old_logprobs", "row_lengths")
"""What a loss is given beside fields."""
GREEDY_SAMPLE = -1
"""The sample in the row ids of greedy answers: they are no sample of their prompt."""


class Policy:
    """A language model with a rollout engine and a training engine over one set of parameters.

    Args:
        share: the model, or this rank's part of it.
        train: the optimiser's settings of the first phase.
        rollout: how it is sampled.
        sampler: what it generates with; the trained module itself where none is given.
        seed: the run's seed; every random number follows from it and from row ids.
        updates: optimiser steps of that phase, for the schedule.
        version: publishes so far.
    """

    def __init__(
        self,
        share: Share[LanguageModel],
        *,
        train: TrainConfig,
        rollout: RolloutConfig,
        seed: int,
        updates: int,
        version: int = 0,
        sampler: Sampler | None = None,
    ) -> None:
        self.model = model = share.model
        self.version = version
        self._share = share
        self._sampler = sampler or Own(model.module)
        self.trainer = self._new_trainer(train, updates)
        self._rollout = rollout
        self._seed = seed
        stop = {model.tokenizer.token_of(text) for text in rollout.stop}
        self._engine = NativeEngine(
            self._sampler.module,
            rollout,
            stop_tokens=frozenset(stop | model.tokenizer.stop_tokens),
            seed=seed,
            context=model.context,
            version=version,
            tp=self._sampler.tp,
        )

    @endpoint(TOGETHER)
    def begin(self, train: TrainConfig, updates: int, resume: Path | None = None) -> None:
        """Start a phase with an optimiser of its own.

        Args:
            train: its settings.
            updates: optimiser steps of the whole phase.
            resume: the file ``save`` wrote in this phase; None starts afresh.
        """
        self._sampler.turn_to_training()
        self.trainer = self._new_trainer(train, updates)
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

    def save(self, folder: Path) -> None:
        """Write the weights as a Hugging Face directory ``policy``, the optimiser beside it; on all ranks."""
        self.save_weights(folder / "policy")
        self._share.save_state(self.trainer, folder / "policy.optimizer")

    def save_weights(self, folder: Path) -> None:
        """Write the weights as a Hugging Face directory; on all ranks."""
        self._sampler.turn_to_training()
        self._share.save_weights(folder)

    @endpoint(ALL_MICRO_DP, reads=("tokens", "columns"), writes=ROLLOUT_FIELDS)
    def generate(self, prompts: Batch, samples: int = 1, sampling: SamplingConfig | None = None) -> Batch:
        """Rollouts of ``samples`` answers to every prompt, ordered by prompt and sample."""
        return self._generated(prompts, samples, sampling)

    @endpoint(ALL_MICRO_DP, reads=("tokens", "columns"), writes=ROLLOUT_FIELDS)
    def greedy(self, prompts: Batch) -> Batch:
        """Rollouts of the likeliest answer to every prompt, in the prompts' order; see GREEDY_SAMPLE."""
        sampling = SamplingConfig(temperature=0, max_tokens=self._rollout.max_tokens, stop=self._rollout.stop)
        rollouts = self._generated(prompts, 1, sampling)
        ids = rollouts.ids.clone()
        ids[:, 2] = GREEDY_SAMPLE
        return Batch(ids=ids, fields=rollouts.fields)

    @endpoint(THREE_D, reads=("tokens", "loss_mask"), writes=("old_logprobs",))
    def logprobs(self, rollouts: Batch) -> Batch:
        """The field ``old_logprobs``: what the present weights give every sampled token."""
        self._sampler.turn_to_training()
        found = self.trainer.logprobs(rollouts, temperature=self._rollout.temperature)
        return Batch(ids=rollouts.ids, fields={"old_logprobs": found})

    @endpoint(TRAIN, reads=("tokens", "loss_mask"), says=SAYS)
    def update(
        self, /, *batches: Batch, loss: Any, passes: PassesConfig, name: str = "", **options: Any
    ) -> dict[str, Metric]:
        """Optimiser steps on rows joined from ``batches``: rollouts, advantages and what the loss reads.

        Args:
            batches: rows; of several losses those of each, one after the other.
            loss: a function (see ``formulas.losses``), ``config.loss``, or what ``over`` says of several: an
                optimiser step then takes a minibatch of each, and one over no row is left out.
            passes: how often rows are gone through, and in how many steps.
            name: the area of the loss's metrics; policy if left out.
            options: arguments of the loss that are no fields.

        Raises:
            TrainingError: a number is not finite, the first minibatch is not on-policy, or losses are over
                unequal numbers of minibatches.
        """
        self._sampler.turn_to_training()
        terms = loss_terms({"loss": loss, "name": name, **options}, len(batches))
        left, cut = list(batches), []
        for term in terms:
            rows, left = joined(left[: term.count]), left[term.count :]
            cut.append(self._aims(rows, term, passes))
        if len(cut) == 1:
            return merge_metrics([self.trainer.step(aim) for aim in cut[0]])
        whole = [aims for aims in map(list, cut) if aims]
        if len({len(aims) for aims in whole}) > 1:
            counts = [f"{len(aims)} of {aims[0].loss.name}" for aims in whole]
            raise TrainingError(
                f"the losses of an update are over unequal numbers of minibatches: {', '.join(counts)}",
                why="every optimiser step takes one of each",
                fix="lower algorithm.minibatches, or raise algorithm.prompts_per_step",
            )
        return merge_metrics([self.trainer.step(*aims) for aims in zip(*whole, strict=True)])

    @endpoint(TOGETHER)
    def publish(self) -> int:
        """Make the trained weights those that are sampled; return their version."""
        self.version += 1
        self._sampler.publish(self.version)
        self._engine.version = self.version
        return self.version

    def _generated(self, prompts: Batch, samples: int, sampling: SamplingConfig | None) -> Batch:
        self._sampler.turn_to_generation()
        rollouts = self._engine.generate(prompts, samples, sampling)
        limit = (sampling or self._rollout).max_tokens
        return rollouts.with_fields(limits=torch.full((len(rollouts),), limit))

    def _aims(self, rows: Batch, term: LossTerm, passes: PassesConfig) -> Iterator[Aim]:
        """What each optimiser step minimises of one loss; rows that were sampled begin on-policy."""
        objective = loss_of(term, SAYS[:3], "policy", self._rollout.max_tokens)
        sampled, ratio, gap = are_sampled(rows), None, None
        temperature = self._rollout.temperature if sampled else 1.0
        if sampled and isinstance(passes, UpdateConfig):
            ratio, gap = (passes.ratio_tolerance, None) if self._exact else (None, passes.gap_tolerance)
            if passes.reuses_rows and passes.old_logprobs == "sampler":
                rows = rows.with_fields(old_logprobs=rows.ragged(SAMPLED))
        how: dict[str, Any] = {"weight": term.weight, "ratio_tolerance": ratio, "gap_tolerance": gap}
        for minibatch in minibatches(
            rows, passes.epochs, passes.minibatches, self._seed, self.version, ranks=self._share.rows
        ):
            yield self.trainer.aim(minibatch, objective, temperature, **how)
            how = {"weight": term.weight}

    def _new_trainer(self, train: TrainConfig, updates: int) -> Trainer:
        share = self._share
        return Trainer(
            self.model.module, train, total_steps=updates, ranks=share.rows, parallel=share.parallel
        )

    @property
    def _exact(self) -> bool:
        """Whether the weights are wide enough for the on-policy contract token by token, not in the mean."""
        return bool(self.model.module.dtype.itemsize >= 4)
