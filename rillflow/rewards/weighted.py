"""Weighted: run several reward functions, each in its own children, and sum their scores.

prompts, completions, columns ─┬─> RewardWorkers of f ──┐
                               └─> RewardWorkers of g ──┴─> weight_f f + weight_g g, row by row

A function that abstains is left out of a row's sum; if all abstain, the row has no score. A timeout or an
error of one function is the row's outcome: a sum without it would be another reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from rillflow.rewards.columns import Columns, Text
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import FunctionPath
from rillflow.rewards.outcome import Outcome, Score
from rillflow.rewards.workers import RewardWorkers

FAILURES = (Outcome.ERROR, Outcome.TIMEOUT)
"""Outcomes of one scorer that leave the row without a sum."""


class WeightedWorkers(ExitStack):
    """Children of several functions; a context manager, used from one thread.

    Args:
        functions: reward functions with their weights.
        config: time limit, memory and number of children of each.
    """

    def __init__(self, functions: Sequence[FunctionPath], config: RewardConfig) -> None:
        super().__init__()
        self._functions = functions
        with ExitStack() as started:
            self._workers = [started.enter_context(RewardWorkers(each, config)) for each in functions]
            self.push(started.pop_all())

    def score(self, prompts: Sequence[Text], completions: Sequence[Text], columns: Columns) -> list[Score]:
        """Score every row, in order; see ``RewardWorkers.score``."""
        each = [workers.score(prompts, completions, columns) for workers in self._workers]
        return [self._summed(scores) for scores in zip(*each, strict=True)]

    def _summed(self, scores: Sequence[Score]) -> Score:
        if len(scores) == 1 and self._functions[0].weight == 1:
            return scores[0]
        pairs = list(zip(self._functions, scores, strict=True))
        for function, score in pairs:
            if score.outcome in FAILURES:
                return Score(outcome=score.outcome, message=f"{function}: {score.message}")
        return summed({function.name: (function.weight, score) for function, score in pairs})


def summed(said: Mapping[str, tuple[float, Score]]) -> Score:
    """Return the weighted sum of several scorers for a row, given weight and score by name."""
    for name, (_, score) in said.items():
        if score.outcome in FAILURES:
            return Score(outcome=score.outcome, message=f"{name}: {score.message}")
    parts = {name: score.value for name, (_, score) in said.items() if score.value is not None}
    if not parts:
        return Score(outcome=Outcome.ABSTAIN)
    total = sum(said[name][0] * value for name, value in parts.items())
    return Score(outcome=Outcome.SCORE, value=total, parts=parts)
