"""The name of an evaluation: accuracy for rewards of 0 or 1, otherwise a mean with its interval."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import pytest
import torch

from rillflow.app.evaluate import Evaluation, judged
from rillflow.records.batch import Batch, row_ids
from rillflow.records.rollout import Finish, Rollout, rollout_batch
from rillflow.records.row import RowId
from rillflow.tasks.preference import PREFERENCES


def found(rewards: list[float | None], success: float | None = None) -> Evaluation:
    rows = [
        Rollout.start(RowId(-1, index, 0), [1, 2]).sampled([3, 4], [-0.1, -0.1], 1, Finish.STOP)
        for index in range(len(rewards))
    ]
    rollouts = rollout_batch(rows)
    fields = {
        "rewards": torch.tensor([reward or 0.0 for reward in rewards]),
        "valid": torch.tensor([reward is not None for reward in rewards]),
    }
    return judged(rollouts, Batch(ids=rollouts.ids, fields=fields), success=success)


def test_rewards_of_0_and_1_have_an_accuracy_where_no_score_is_not_right() -> None:
    evaluation = found([1.0, 0.0, 1.0, None])
    assert (evaluation.correct, evaluation.count, evaluation.is_accuracy) == (2, 4, True)
    assert evaluation.interval == pytest.approx((0.150, 0.850), abs=1e-3)  # Wilson of 2 in 4, by hand
    assert evaluation.mean_reward == pytest.approx(2 / 3)
    assert evaluation.text == "held-out accuracy 0.500 [0.150, 0.850] (2 of 4)"


def test_graded_rewards_have_a_mean_with_its_interval_and_no_accuracy() -> None:
    rewards = [0.0, 6.0, 1.0, 0.5, 2.5]
    evaluation = found([*rewards, None])
    half = 2.776445105 * stdev(rewards) / math.sqrt(5)  # t of 4 degrees of freedom
    assert fmean(rewards) - half < 0, "no reward is below 0, so the interval ends there"
    assert evaluation.interval == pytest.approx((0.0, fmean(rewards) + half))
    assert (evaluation.correct, evaluation.is_accuracy, evaluation.mean_reward) == (None, False, 2.0)
    assert evaluation.text.startswith("held-out mean reward 2.000 [") and "accuracy" not in evaluation.text


def test_the_interval_of_a_mean_reward_stays_in_the_range_of_the_rewards() -> None:
    """Eight problems: 0.938 [0.790, 1.085] for a reward that is at most 1."""
    evaluation = found([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5])
    assert evaluation.interval is not None and evaluation.interval[1] == 1.0
    assert evaluation.interval[0] == pytest.approx(0.790, abs=1e-3)
    costs = found([-3.0, 0.0, 0.0, 0.0]).interval
    assert costs is not None and costs[1] == 0.0 and costs[0] >= -3.0


def test_what_counts_as_right_is_the_users_to_say() -> None:
    evaluation = found([0.2, 0.7, 0.5, 0.9], success=0.5)
    assert (evaluation.correct, evaluation.is_accuracy) == (3, False)
    assert evaluation.text.endswith("(4 answers, 3 of them right)")


def test_rewards_that_do_not_differ_say_nothing_of_chance() -> None:
    assert found([0.5, 0.5, 0.5]).interval is None


def test_no_reward_at_all_is_no_accuracy_of_0() -> None:
    evaluation = found([None, None])
    assert (evaluation.correct, evaluation.is_accuracy, evaluation.interval) == (None, False, None)
    assert evaluation.text == "no reward for any of 2 held-out answers"


def test_an_order_of_two_is_right_or_wrong() -> None:
    ids = row_ids([RowId(-1, index, sample) for index in range(3) for sample in range(2)])
    scores = Batch(ids=ids, fields={"rewards": torch.tensor([2.0, 1.0, 0.0, 0.5, 3.0, 3.0])})
    evaluation = PREFERENCES.evaluated(scores, scores.only())
    assert (evaluation.correct, evaluation.count, evaluation.is_accuracy) == (1, 3, True)
    assert evaluation.more["calibration_error"] == pytest.approx((0.26894 + 0.62246 + 0) / 3, abs=1e-4)


def test_several_answers_to_a_prompt_are_no_trials_of_their_own() -> None:
    """Three prompts of two answers give an interval of three means, and pass@k from each prompt's count."""
    right = [1.0, 1.0, 0.0, 1.0, 0.0, None]
    rows = [
        Rollout.start(RowId(-1, n // 2, n % 2), [1, 2]).sampled([3], [-0.1], 1, Finish.STOP) for n in range(6)
    ]
    rollouts = rollout_batch(rows)
    fields = {
        "rewards": torch.tensor([each or 0.0 for each in right]),
        "valid": torch.tensor([each is not None for each in right]),
    }
    evaluation = judged(rollouts, Batch(ids=rollouts.ids, fields=fields), success=None)
    assert (evaluation.correct, evaluation.count, evaluation.is_accuracy) == (3, 6, True)
    assert evaluation.more["pass@1"] == pytest.approx(0.5) and evaluation.more["pass@2"] == pytest.approx(
        2 / 3
    )
    half = 4.302652730 * stdev([1.0, 0.5, 0.0]) / math.sqrt(3)  # t of 2 degrees of freedom
    assert half > 0.5 and evaluation.interval == (0, 1), "no share of right answers is outside 0 to 1"
    fields["rewards"] = torch.tensor([2.0, 4.0, 0.5, 0.5, 3.0, 0.0])
    graded = judged(rollouts, Batch(ids=rollouts.ids, fields=fields), success=None)
    middle, half = (3 + 0.5 + 3) / 3, 4.302652730 * stdev([3, 0.5, 3]) / math.sqrt(3)
    assert (middle - half, middle + half) == pytest.approx((-1.41888, 5.75221), abs=1e-4)
    assert graded.interval == (0.5, 4.0), "the range of the rewards"
