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
    parts = _parts(scores)
    for name in sorted({name for each in parts for name in each}):
        said = [each[name] for each in parts if name in each]
        metrics[f"rewards/{name}/mean"] = Mean(total=sum(said), count=len(said))
    return metrics


def _parts(scores: Batch) -> list[dict[str, float]]:
    """Of every row, what each function said where several are summed."""
    texts = scores.ragged("parts").to_text() if "parts" in scores.fields else []
    return [json.loads(text or "{}") for text in texts]


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
    lists = [batch.ragged(name).lists() for name in ("tokens", "sampler_logprobs", "versions")]
    ended, computed = (
        [Finish(number).name.lower() for number in batch.dense("finish").tolist()],
        _verdicts(batch),
    )
    for index, (row, text, tokens, logprobs, versions) in enumerate(
        zip(batch.row_ids(), batch.ragged("columns").to_text(), *lists, strict=True)
    ):
        columns = json.loads(text)
        yield {
            "epoch": row.epoch,
            "prompt_id": row.prompt,
            "sample": row.sample,
            "prompt": columns.pop("prompt"),
            "columns": columns,
            "tokens": tokens,
            "token_texts": decode(tokens),
            "logprobs": logprobs,
            "versions": versions,
            "finish": ended[index],
            **{name: values[index] for name, values in computed.items()},
        }


def _verdicts(batch: Batch) -> dict[str, list[Any]]:
    """What was computed for the rows after they were sampled, by name."""
    texts = [name for name in ("completion", "message") if name in batch.fields]
    found: dict[str, list[Any]] = {name: batch.ragged(name).to_text() for name in texts}
    if "outcome" in batch.fields:
        found["outcome"] = [str(OUTCOMES[index]) for index in batch.dense("outcome").tolist()]
        found["reward"] = _known(batch.dense("rewards"), batch.dense("valid"))
    if any(parts := _parts(batch)):
        found["parts"] = parts
    if "costs" in batch.fields:
        found["cost"] = _known(batch.dense("costs"), ~batch.dense("costs").isnan())
    return found


def _known(values: Tensor, valid: Tensor) -> list[float | None]:
    """Each row's number; None where it has none."""
    return [value if kept else None for value, kept in zip(values.tolist(), valid.tolist(), strict=True)]


def _costs(batch: Batch) -> dict[str, Field]:
    """What a batch says of costs; NaN where a row has none. Its other verdicts are not the reward's."""
    kept = {name: field for name, field in batch.fields.items() if name not in SCORE_FIELDS}
    return {**kept, "costs": batch.dense("costs").masked_fill(~batch.dense("valid"), torch.nan)}


def _mean(values: Tensor) -> Mean:
    return Mean(total=float(values.sum()), count=float(values.numel()))


def _flat(groups: Tensor, rewards: Tensor) -> Tensor:
    """[G] float64: 1 where all rewards of a group are equal."""
    names, index = torch.unique(groups, return_inverse=True)
    none = rewards.new_zeros(len(names))
    low, high = (none.scatter_reduce(0, index, rewards, to, include_self=False) for to in ("amin", "amax"))
    return (low == high).double()
