"""Trainer: one optimiser step per minibatch, for any output of the module and any loss.

    minibatch ─ prepare ─> rows ─ micro_batches ─> part ─ reader ─> outputs [N] ─ loss ─> terms
                                                     └ guards: finite?       weight │ sum / denominator
                      weights <─ Optimizer.step <─ accumulated gradients <── backward ┘

A step may minimise several losses, each over its own rows and with its own denominator: its ``Objective``.
Their gradients are accumulated before one clipping and one step.

Reader and loss use the same type of output: log probabilities, or numbers of a scalar head. Rows whose terms
have no gradient (groups of equal rewards) are only measured, without a backward pass. If no row has a
gradient, weights stay and the step is counted. Any error leaves weights, moments and step count unchanged.

With several ranks each has a part of the minibatch's rows, perhaps none: the denominator and the gradients
are summed over them, in the order of ranks, so all take the same step. If the module itself is split over
ranks, they run all passes and the step together, each on its part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rillflow.errors import NotFiniteError
from rillflow.models.routing import Routing
from rillflow.records.batch import Batch
from rillflow.records.metrics import Mean, Metric, Sum, merge_metrics
from rillflow.sharding.codec import Codec, CodedSum
from rillflow.sharding.module import Output, Parallel, first_said
from rillflow.sharding.packed_rows import routes_of
from rillflow.training.config import TrainConfig
from rillflow.training.guards import describe_token, loss_tokens
from rillflow.training.optimizer import Optimizer
from rillflow.training.recompute import Recompute
from rillflow.training.repeatable import repeatable
from rillflow.training.scorer import LogprobReader, OutputReader, ScalarReader, Scorer, micro_batches
from rillflow.training.skipping import Skip, Skipped
from rillflow.training.terms import Loss, Score

_ELSEWHERE = "a number is not finite on another rank"


@dataclass(frozen=True, kw_only=True, eq=False)
class Objective:
    """One loss over some rows, and its weight in the step's sum; made by ``Trainer.aim``."""

    rows: Batch
    """This rank's part of the minibatch, perhaps empty."""
    loss: Loss
    """The loss to minimise."""
    reader: OutputReader
    """Reader of the module's outputs for the loss."""
    score: Score
    """Scorer of rows by the present weights, at the reader's temperature."""
    weight: float = 1.0
    """Factor on its gradient; metrics are of the unweighted loss."""


class Trainer:
    """Optimisation and scoring of a module.

    Args:
        module: a causal language model, or a decoder with a scalar head, with Rillflow's attention; its
            parameters are changed in place, and it is put in evaluation mode.
        config: the optimiser, and the division into micro-batches.
        total_steps: optimiser steps of the whole phase, for the schedule.
        parallel: this rank's part of the module, if it is split over ranks.
        codec: encodes gradients that are summed over ranks; they hold the whole module.

    Example:
        trainer = Trainer(module, TrainConfig(lr=1e-4), total_steps=100)
        metrics = trainer.update(rows, SupervisedLoss())
    """

    def __init__(
        self,
        module: nn.Module,
        config: TrainConfig,
        *,
        total_steps: int,
        parallel: Parallel | None = None,
        codec: Codec | None = None,
    ) -> None:
        self._parallel = parallel or Parallel.whole(module)
        self._ranks = self._parallel.groups.dp
        self._budget, self._balance = config.tokens_per_micro_batch, config.balance
        self.skipped: Skipped | None = None
        """Collector of non-finite steps; with None they raise an error."""
        self.scorer = Scorer(module, config, parallel=self._parallel)
        """Scorer of the present weights."""
        self.optimizer = Optimizer(
            module,
            config,
            total_steps=total_steps,
            gradients=replace(self._parallel.gradients, coded=CodedSum(codec) if codec else None),
        )
        """The optimiser, with its steps and its state for checkpoints."""
        self._recompute: AbstractContextManager[None] = nullcontext()
        if config.gradient_checkpointing:
            self._recompute = Recompute(module, whole=self._parallel.is_whole)

    def update(
        self, minibatch: Batch, loss: Loss, temperature: float = 1.0, *, ratio_tolerance: float | None = None
    ) -> dict[str, Metric]:
        """Do one optimiser step: ``step`` with the single aim that ``aim`` makes.

        Raises:
            TrainingError: a number is not finite, a row is not on-policy, or there is no loss token;
                nothing was changed.
        """
        return self.step(self.aim(minibatch, loss, temperature, ratio_tolerance=ratio_tolerance))

    def aim(
        self,
        minibatch: Batch,
        loss: Loss,
        temperature: float = 1.0,
        *,
        ratio_tolerance: float | None = None,
        gap_tolerance: float | None = None,
        weight: float = 1.0,
    ) -> Objective:
        """Return a loss over the model's outputs, for ``step``.

        Args:
            minibatch: rows with the fields the loss reads.
            loss: the loss to minimise.
            temperature: temperature at which the tokens were sampled.
            ratio_tolerance: for on-policy rows, the largest deviation of the trainer/sampler ratio at a
                token.
            gap_tolerance: for on-policy rows with rough rounding, the largest mean difference.
            weight: factor on its gradient relative to other aims.
        """
        reader: OutputReader = LogprobReader(
            temperature=temperature, ratio_tolerance=ratio_tolerance, gap_tolerance=gap_tolerance
        )
        if loss.is_scalar:
            self._parallel.require_head()
            reader = ScalarReader(back=loss.back)
        score = partial(self.scorer.logprobs, temperature=temperature)
        return Objective(rows=minibatch, loss=loss, reader=reader, score=score, weight=weight)

    def step(self, *aims: Objective) -> dict[str, Metric]:
        """Do one optimiser step along the weighted sum of the aims' gradients.

        Returns:
            The losses' metrics, ``{loss.name}/loss/mean`` of each, ``train/grad_norm/mean`` and
            ``train/lr/mean``, or ``train/skipped/sum`` if a number is not finite and ``skipped`` is set;
            on a mesh, nothing on the ranks that do not report for their replica.

        Raises:
            NotFiniteError: a number is not finite, on this rank or another one; nothing was changed.
            TrainingError: there is no loss token; nothing was changed.
        """
        try:
            metrics = self._attempt(aims)
        except NotFiniteError as error:
            if self.skipped is None:
                raise
            metrics = self._skip(self.skipped, aims, error)
        finally:
            self.optimizer.discard()
        return metrics if self._parallel.groups.speaks else {}

    def _attempt(self, aims: Sequence[Objective]) -> dict[str, Metric]:
        """Do the step; if one rank met a non-finite number, raise an error on all ranks."""
        problem: NotFiniteError | None = None
        metrics: dict[str, Metric] = {}
        prepared: list[Batch | None] = []
        for aim in aims:
            rows = None
            try:
                rows = aim.loss.prepare(aim.rows) if len(aim.rows) else None
            except NotFiniteError as error:
                problem = problem or error
            prepared.append(rows)
        learning = [place for place, rows in enumerate(prepared) if rows is not None and _learns(rows)]
        denominators, learns = self._agreed(prepared, bool(learning))
        whole = [
            aim.loss.settled(rows, aim.rows, aim.score, self._ranks)
            for aim, rows in zip(aims, prepared, strict=True)
        ]
        pulls = [self._pull(aim, rows) for aim, rows in zip(aims, whole, strict=True)]
        routing = self._routing()
        try:
            for place, (aim, rows) in enumerate(zip(aims, whole, strict=True)):
                routing.pull, last = pulls[place], place in learning[-1:]
                metrics |= self._gather(aim, rows, denominators[place], routing, last=last)
        except NotFiniteError as error:
            problem = problem or error
        if not self.optimizer.sum_over_ranks(learns=learns, is_sound=problem is None):
            raise problem or NotFiniteError(_ELSEWHERE, why="all ranks apply the same update, or none does")
        routing.sum_(self._parallel.groups.everyone)  # not earlier: sums may have started in the last pass
        lr, norm = self.optimizer.lr, self.optimizer.step()
        metrics |= self.optimizer.link_metrics()
        if self.optimizer.moved_bytes is not None:
            metrics["train/moved_bytes/mean"] = Mean(total=self.optimizer.moved_bytes, count=1)
        return {
            **metrics,
            **routing.metrics(),
            "train/grad_norm/mean": Mean(total=norm, count=1),
            "train/lr/mean": Mean(total=lr, count=1),
        }

    def _skip(self, skipped: Skipped, aims: Sequence[Objective], error: NotFiniteError) -> dict[str, Metric]:
        """Record the step that was left out; every rank calls it."""
        groups = self._parallel.groups
        reason = first_said(groups.everyone, "" if error.what == _ELSEWHERE else error.what)
        own = torch.cat([aim.rows.ids for aim in aims]).flatten()
        ids = torch.cat(self._ranks.gather(own)).view(-1, 3).tolist()
        told = [{**aim.loss.about(), "weight": aim.weight} for aim in aims]
        rank = self._ranks.rank if groups.speaks else -1
        skipped.add(Skip(reason=reason, rows=ids), [aim.rows for aim in aims], told, rank)
        return {"train/skipped/sum": Sum(value=1 / self._ranks.size)}

    def _agreed(self, prepared: Sequence[Batch | None], learns: bool) -> tuple[list[float], bool]:
        """Return the denominator of each aim's sum of terms, and whether any rank has gradients."""
        own = [0.0 if rows is None else float(rows.dense("loss_denominator")[0]) for rows in prepared]
        sums = torch.tensor([*own, float(learns)], dtype=torch.float64)
        self._ranks.sum_([sums])
        *denominators, learners = sums.tolist()
        return denominators, learners > 0

    def _parts(self, rows: Batch) -> Iterator[Batch]:
        """Yield micro-batches with loss tokens; rows with and without a gradient are kept apart."""
        active = rows.dense("loss_active")
        for kind in (True, False):
            alike = rows.select((active == kind).nonzero().squeeze(1))
            units = alike.dense("loss_units") if "loss_units" in alike.fields else None
            for index in micro_batches(alike, self._budget, units, padded=self._parallel.padded):
                part = alike.select(index)
                if bool(part.ragged("loss_mask").values.any()):
                    yield part

    def _routing(self) -> Routing:
        return Routing(self._parallel.routers, self._parallel.device)

    def _pull(self, aim: Objective, rows: Batch | None) -> Tensor | None:
        """Return ``Routing.pull`` for an aim, from its rows with a gradient; every rank calls it.

        If the choices of experts were not recorded, a pass determines them.
        """
        if self._balance == 0 or not self._parallel.routers.all:
            return None
        seen, parts = self._routing(), [] if rows is None else list(self._parts(rows))
        learning = [part for part in parts if bool(part.dense("loss_active")[0])]
        routes = [routes_of(part, back=aim.reader.back) for part in learning]
        unknown = torch.tensor([float(not all(int(each.min()) >= 0 for each in routes))])
        self._parallel.groups.everyone.sum_([unknown])
        if unknown:
            self._parallel.run(learning, aim.reader.back, lambda *_: torch.zeros(()), routing=seen)
        else:
            for each in routes:
                seen.count_all(each)
        seen.sum_(self._parallel.groups.everyone)
        return seen.balanced(self._balance * aim.weight)

    def _gather(
        self, aim: Objective, rows: Batch | None, denominator: float, routing: Routing, *, last: bool
    ) -> dict[str, Metric]:
        """Accumulate one aim's gradient and return its metrics; ``last`` marks this rank's last aim."""
        total, metrics = 0.0, list[Mapping[str, Metric]]()

        def finish(part: Batch, output: Output) -> Tensor:
            nonlocal total
            tokens = loss_tokens(part).to(self._parallel.device)
            with repeatable(self._parallel.device, is_on=False):
                read: Any = aim.reader.read(tokens, output)
                checked = aim.reader.checked(tokens, read)
                share, measured = _share(tokens, read, aim, denominator)
            total += float(share.detach())
            metrics.append({**measured, **checked})
            return share * aim.weight

        parts = list(self._parts(rows)) if rows is not None else []
        learning = [part for part in parts if bool(part.dense("loss_active")[0])]
        cut = len(learning) - (last and self._parallel.is_whole)
        run = partial(self._parallel.run, back=aim.reader.back, finish=finish, routing=routing)
        with self._recompute, repeatable(self._parallel.device):
            run(learning[:cut], after=self.optimizer.collect)
            if cut < len(learning):
                with self.optimizer.last_pass():
                    run(learning[cut:], after=self.optimizer.collect)
        run(parts[len(learning) :])
        self._parallel.agree()
        mean = Mean(total=total, count=1 / self._ranks.size)
        return {**merge_metrics(metrics), f"{aim.loss.name}/loss/mean": mean}


def _learns(rows: Batch) -> bool:
    """Return whether a loss token's term has a gradient."""
    return bool((rows.dense("loss_active") & (rows.ragged("loss_mask").sums() > 0)).any())


def _share(
    tokens: Batch, read: Any, aim: Objective, denominator: float
) -> tuple[Tensor, Mapping[str, Metric]]:
    """Return a part's share of the loss, checked to be finite, and its metrics."""
    found = aim.loss(read, tokens)
    share = found.terms.sum() / denominator
    value = float(share.detach())
    if not math.isfinite(value):
        raise _not_finite(tokens, found.terms.detach(), read, aim.reader, value)
    return share, found.metrics


def _not_finite(
    tokens: Batch, terms: Tensor, read: Any, reader: OutputReader, value: float
) -> NotFiniteError:
    odd = (~torch.isfinite(terms)).nonzero()
    where = "the sum of finite terms overflows"
    if len(odd):
        index = int(odd[0])
        loss = float(terms[index])
        where = f"{describe_token(tokens, index)} has loss {loss}, {reader.describe(read, index)}"
    return NotFiniteError(
        f"the loss is {value}: {where}",
        why="the step was not applied; the weights are unchanged",
        fix="look for non-finite weights, or extreme numbers in the metrics before this step",
    )
