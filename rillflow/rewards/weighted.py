"""Weighted: several reward functions, each in children of its own, and the sum of what they say.

prompts, completions, columns ─┬─> RewardWorkers of f ──┐
                               └─> RewardWorkers of g ──┴─> weight_f f + weight_g g, row by row

A function that abstains is left out of a row's sum; where all do, the row has none. A time-out or an error
of one is the row's: a sum without it would be another reward.
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
"""What one scorer's row has none of, or the row has no sum."""


class WeightedWorkers(ExitStack):
    """Children of several functions; a context manager, used from one thread.

    Args:
        functions: what scores, each with its weight.
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
    """The weighted sum of what several scorers say of a row, of each its weight and its score by name."""
    for name, (_, score) in said.items():
        if score.outcome in FAILURES:
            return Score(outcome=score.outcome, message=f"{name}: {score.message}")
    parts = {name: score.value for name, (_, score) in said.items() if score.value is not None}
    if not parts:
        return Score(outcome=Outcome.ABSTAIN)
    total = sum(said[name][0] * value for name, value in parts.items())
    return Score(outcome=Outcome.SCORE, value=total, parts=parts)
