"""Evaluation: measure a trained model on held-out rows.

prompts ─ policy.generate ─> rollouts ─ reward.score ─> scores ─ judged ─> Evaluation
pairs ─ reward_model.score ─> scores of two answers each ─ DataKind.evaluated ─> Evaluation
"""

from __future__ import annotations

from statistics import fmean

import torch
from torch import Tensor

from rillflow.formulas.interval import mean_interval, observed_range, wilson
from rillflow.formulas.judging import pass_at
from rillflow.records.batch import Batch
from rillflow.runs.reader import Evaluation


def judged(
    rollouts: Batch, scores: Batch, proxies: Batch | None = None, *, success: float | None
) -> Evaluation:
    """Summarise the scores of answers to held-out prompts.

    Args:
        rollouts: rows with equally many answers to each prompt.
        scores: the scores to evaluate by.
        proxies: scores by the model that the policy is trained on.
        success: the least reward of a right answer; None: 1, and only if all rewards are 0 or 1.
    """
    valid = scores.dense("valid")
    rewards = scores.dense("rewards")[valid]
    count, correct = len(rollouts), None
    binary = len(rewards) > 0 and bool(((rewards == 0) | (rewards == 1)).all())
    if binary or success is not None:
        right = valid & (scores.dense("rewards") >= (1.0 if success is None else success))
        correct = int(right.sum())
    more = {"length_mean": float(rollouts.ragged("loss_mask").sums().double().mean())}
    if proxies is not None:
        more["proxy_mean"] = float(proxies.dense("rewards")[proxies.dense("valid")].double().mean())
    interval = wilson(correct, count) if binary and correct is not None else None
    possible = observed_range(rewards.double().tolist())
    samples = int(rollouts.ids[:, 2].max()) + 1 if count else 1
    if samples > 1:  # answers to one prompt are not independent trials
        means = _prompt_means(right if binary else rewards, valid, binary, samples)
        interval = mean_interval(means, possible)
        more |= {"samples": samples}
        if correct is not None:
            counts = right.view(-1, samples).sum(1).tolist()
            for k in powers_of_two(samples):
                more[f"pass@{k}"] = fmean(pass_at(samples, each, k) for each in counts)
    elif not binary:
        interval = mean_interval(rewards.double().tolist(), possible)
    return Evaluation(
        count=count,
        mean_reward=float(rewards.mean()) if len(rewards) else float("nan"),
        correct=correct,
        is_accuracy=binary,
        interval=interval,
        more=more,
    )


def _prompt_means(values: Tensor, valid: Tensor, is_right: bool, samples: int) -> list[float]:
    """Return each prompt's mean: rewards over the scored answers, or right answers over all of them."""
    if is_right:
        return values.view(-1, samples).double().mean(1).tolist()
    whole = torch.full(valid.shape, torch.nan, dtype=torch.float64)
    whole[valid] = values.double()
    means = whole.view(-1, samples).nanmean(1)
    return means[~means.isnan()].tolist()


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4, ... up to ``most``, and ``most``. Example: ``powers_of_two(6) == [1, 2, 4, 6]``."""
    found = [1 << place for place in range(most.bit_length()) if 1 << place <= most]
    return found if found[-1] == most else [*found, most]
