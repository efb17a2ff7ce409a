"""What one step's journal says: metrics of the sampled rows, and the rows themselves for the disk.

Reads fields, not algorithms: whatever an algorithm calls, rows that were generated are recorded with
whatever scores and advantages were computed for them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rillflow.models.language_model import LoadedModel
from rillflow.observe.run_directory import write_rollouts
from rillflow.records.batch import Batch, Field
from rillflow.records.metrics import Max, Mean, Metric, Metrics, Min, Sum, merge_metrics
from rillflow.records.rollout import Finish
from rillflow.roles.reward import OUTCOMES, SCORE_FIELDS
from rillflow.train.minibatches import prompt_units

SAMPLING, SCORING, PRICING = "policy.generate", "reward.score", "cost.score"


class Speaker(Protocol):
    """A role whose tokens the rows are made of."""

    @property
    def model(self) -> LoadedModel:
        """What it starts from, its tokeniser among it."""
        ...


def record(lead: Speaker, run: Path, step: int, stages: Sequence[str], *batches: Batch) -> Metrics:
    """Write the rows sampled in a step into the run directory, and measure what was sampled and scored.

    Runs where the policy is, so that rollouts do not pass through the controller.

    Args:
        lead: the policy, or what is trained in its place; its tokeniser knows each token's text.
        run: the run directory, as this rank sees it.
        step: of the run.
        stages: what made each batch.
        batches: every batch of the step, in order.
    """
    sampled = [batch for stage, batch in zip(stages, batches, strict=True) if stage == SAMPLING]
    measured = [rollout_metrics(rollouts) for rollouts in sampled]
    for stage, scores in zip(stages, batches, strict=True):
        if not any(torch.equal(scores.ids, rollouts.ids) for rollouts in sampled):
            continue
        if stage == SCORING:
            measured.append(reward_metrics(scores))
        if stage == PRICING:
            measured.append(cost_metrics(scores))
    write_rollouts(run, step, rollout_rows(sampled, batches, lead.model.tokenizer.pieces))
    return merge_metrics(measured)


def rollout_metrics(rollouts: Batch) -> dict[str, Metric]:
    """Lengths and endings of sampled rows."""
    lengths = rollouts.ragged("loss_mask").sums().double()
    ended = rollouts.dense("finish") == Finish.STOP
    return {
        "rollout/length/mean": _mean(lengths),
        "rollout/length/max": Max(value=float(lengths.max())),
        "rollout/stopped/share": _mean(ended.double()),
        "rollout/tokens/sum": Sum(value=float(lengths.sum())),
        "rollout/rows/sum": Sum(value=float(len(rollouts))),
    }


def reward_metrics(scores: Batch) -> dict[str, Metric]:
    """Scores of the rows that have one, what the others got instead, and groups without a difference."""
    valid = scores.dense("valid")
    rewards = scores.dense("rewards")[valid].double()
    groups = prompt_units(scores)[valid]
    metrics: dict[str, Metric] = {
        "reward/score/mean": _mean(rewards),
        "reward/flat_groups/share": _mean(_flat(groups, rewards)),
    }
    if len(rewards):
        metrics["reward/score/max"] = Max(value=float(rewards.max()))
        metrics["reward/score/min"] = Min(value=float(rewards.min()))
    for index, outcome in enumerate(OUTCOMES):
        metrics[f"reward/{outcome}/share"] = _mean((scores.dense("outcome") == index).double())
    return metrics


def cost_metrics(scores: Batch) -> dict[str, Metric]:
    """Costs of the rows that have one, and how many have."""
    valid = scores.dense("valid")
    costs = scores.dense("costs")[valid].double()
    metrics: dict[str, Metric] = {
        "cost/value/mean": _mean(costs),
        "cost/valid/share": _mean(valid.double()),
        "cost/none/sum": Sum(value=float(not len(costs))),
    }
    if len(costs):
        metrics["cost/value/max"] = Max(value=float(costs.max()))
    return metrics


def rollout_rows(
    sampled: Sequence[Batch], batches: Sequence[Batch], decode: Callable[[list[int]], list[str]]
) -> Iterator[dict[str, Any]]:
    """One JSON record a sampled row, with whatever was computed for it.

    Args:
        sampled: what was generated.
        batches: everything of the step that is known of rows.
        decode: gives each token's text. Lists are aligned to the row's tokens, prompt included.
    """
    advantages, paid = _by_row(batches, "advantages"), _by_row(batches, "penalised", "rewards")
    for rollouts in sampled:
        known: dict[str, Field] = {}
        for batch in batches:
            if torch.equal(batch.ids, rollouts.ids):
                known = {**(_costs(batch) if "costs" in batch.fields else batch.fields), **known}
        for row, record in zip(
            rollouts.row_ids(), _rows(Batch(ids=rollouts.ids, fields=known), decode), strict=True
        ):
            if record.get("reward") is not None and paid[row] != record["reward"]:
                record["penalised_reward"] = paid[row]
            yield record | ({"advantage": advantages[row]} if row in advantages else {})


def _by_row(batches: Sequence[Batch], *names: str) -> dict[tuple[int, ...], float]:
    """The number of each row in the last batch that has one of the fields, the first it has."""
    found: dict[tuple[int, ...], float] = {}
    for batch in batches:
        values = next((batch.fields[name] for name in names if name in batch.fields), None)
        if isinstance(values, Tensor):
            found |= zip(map(tuple, batch.ids.tolist()), values.tolist(), strict=True)
    return found


def _rows(batch: Batch, decode: Callable[[list[int]], list[str]]) -> Iterator[dict[str, Any]]:
    columns = [json.loads(text) for text in batch.ragged("columns").to_text()]
    names = ("tokens", "sampler_logprobs", "versions")
    lists = {name: [row.tolist() for row in batch.ragged(name).rows()] for name in names}
    for index, row in enumerate(batch.row_ids()):
        yield {
            "epoch": row.epoch,
            "prompt_id": row.prompt,
            "sample": row.sample,
            "prompt": columns[index].pop("prompt"),
            "columns": columns[index],
            "tokens": lists["tokens"][index],
            "token_texts": decode(lists["tokens"][index]),
            "logprobs": lists["sampler_logprobs"][index],
            "versions": lists["versions"][index],
            "finish": Finish(int(batch.dense("finish")[index])).name.lower(),
            **_verdict(batch, index),
        }


def _verdict(batch: Batch, index: int) -> dict[str, Any]:
    """What was computed for a row after it was sampled."""
    found: dict[str, Any] = {}
    for name in ("completion", "message"):
        if name in batch.fields:
            field = batch.ragged(name)
            found[name] = bytes(field.row(index).tolist()).decode("utf-8")
    if "outcome" in batch.fields:
        outcome = OUTCOMES[int(batch.dense("outcome")[index])]
        found |= {"outcome": str(outcome), "reward": None}
        if bool(batch.dense("valid")[index]):
            found["reward"] = float(batch.dense("rewards")[index])
    if "costs" in batch.fields:
        cost = float(batch.dense("costs")[index])
        found["cost"] = None if cost != cost else cost
    return found


def _costs(batch: Batch) -> dict[str, Field]:
    """What a batch says of costs; NaN where a row has none. Its other verdicts are not the reward's."""
    kept = {name: field for name, field in batch.fields.items() if name not in SCORE_FIELDS}
    return {**kept, "costs": batch.dense("costs").masked_fill(~batch.dense("valid"), torch.nan)}


def _mean(values: Tensor) -> Mean:
    return Mean(total=float(values.sum()), count=float(values.numel()))


def _flat(groups: Tensor, rewards: Tensor) -> Tensor:
    """[G] float64: 1 where all rewards of a group are equal."""
    names, index = torch.unique(groups, return_inverse=True)
    low = torch.full((len(names),), torch.inf, dtype=rewards.dtype).scatter_reduce(0, index, rewards, "amin")
    high = torch.full((len(names),), -torch.inf, dtype=rewards.dtype).scatter_reduce(
        0, index, rewards, "amax"
    )
    return (low == high).double()
