"""Evaluation: how what was trained does on held-out rows.

prompts ─ policy.generate ─> rollouts ─ reward.score ─> scores ─ judged ─> a few numbers
pairs ─ reward_model.score ─> scores of two answers each ─ ranked ─> the same
"""

from __future__ import annotations

from rillflow.formulas.interval import calibration_error, mean_interval, wilson
from rillflow.observe.reader import Evaluation
from rillflow.records.batch import Batch


def judged(rollouts: Batch, scores: Batch, *, success: float | None) -> Evaluation:
    """What the scores of answers to held-out prompts say; ``success`` is the reward of a right one."""
    rewards = scores.dense("rewards")[scores.dense("valid")]
    count, correct = len(rollouts), None
    binary = len(rewards) > 0 and bool(((rewards == 0) | (rewards == 1)).all())
    if binary or success is not None:
        correct = int((rewards >= (1.0 if success is None else success)).sum())
    return Evaluation(
        count=count,
        mean_reward=float(rewards.mean()) if len(rewards) else float("nan"),
        correct=correct,
        is_accuracy=binary,
        interval=wilson(correct, count)
        if binary and correct is not None
        else mean_interval(rewards.double().tolist()),
        more={"length_mean": float(rollouts.ragged("loss_mask").sums().double().mean())},
    )


def ranked(scores: Batch) -> Evaluation:
    """How the scores of held-out pairs, the chosen answer first, order them; equal scores are no order.

    Calibration: what the model is to say with probability sigmoid(s_chosen - s_rejected) against how often
    it is so (``calibration_error``).
    """
    chosen, rejected = scores.dense("rewards").view(-1, 2).double().unbind(1)
    likely, more = (chosen - rejected).sigmoid(), {}
    if "contradicted" in scores.fields:
        likely = chosen  # a judge's rewards are probabilities already
        met = scores.select(range(0, len(scores), 2))
        more = {
            name: float(met.dense(field).nanmean())
            for name, field in (("contradiction", "contradicted"), ("position_bias", "bias"))
        }
    correct, count = int((chosen > rejected).sum()), len(chosen)
    return Evaluation(
        count=count,
        mean_reward=correct / count,
        correct=correct,
        is_accuracy=True,
        interval=wilson(correct, count),
        more={
            "margin_mean": float((chosen - rejected).mean()),
            "calibration_error": calibration_error(likely.tolist()),
            **more,
        },
    )
