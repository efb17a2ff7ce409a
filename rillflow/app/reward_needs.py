"""Reward needs: contradictions between the settings of what scores."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

from rillflow.algorithms.config import OnlineConfig
from rillflow.app.contradictions import Contradiction
from rillflow.app.resolved import Resolved
from rillflow.rewards.config import JudgeConfig
from rillflow.rewards.judge_prompt import RATING


def reward_needs(resolved: Resolved) -> Iterator[Contradiction]:
    """Yield every contradiction between the settings of what scores."""
    yield from _functions(resolved)
    yield from _weights(resolved)
    yield from _judge(resolved)


def compares(judge: JudgeConfig | None) -> bool:
    """Return whether a judge needs two answers to a prompt; a model's own frame is taken to do so."""
    if judge is None:
        return False
    frame = judge.frame or (RATING if judge.url is not None else None)
    return frame is None or frame.compares


def _functions(resolved: Resolved) -> Iterator[Contradiction]:
    config = resolved.recipe.reward
    given = [name for name in ("function", "functions", "url") if vars(config)[name] is not None]
    if len(given) > 1:
        yield Contradiction(
            f"[reward] sets {' and '.join(given)}",
            why="it is not clear how they add up",
            fix='weigh them in one table: reward.functions = { "a.py:exact" = 1.0, "http://..." = 0.1 }',
        )
    weights = config.functions
    if weights is not None and not (weights and all(map(isfinite, weights.values()))):
        yield Contradiction(
            f"reward.functions is {weights}",
            why="it needs a finite weight for at least one function",
            fix='set reward.functions = { "rewards.py:exact" = 1.0, "rewards.py:brief" = 0.1 }',
        )


def _weights(resolved: Resolved) -> Iterator[Contradiction]:
    config, judge = resolved.recipe.reward, resolved.recipe.reward.judge
    weights = config.weights
    if weights is None:
        return
    named = {"function": True, "model": config.model is not None, "judge": judge is not None}
    missing = [name for name in weights if not named.get(name, False)]
    left = [name for name in ("model", "judge") if named[name] and name not in weights]
    if missing or left or not weights or not all(map(isfinite, weights.values())):
        yield Contradiction(
            f"reward.weights is {dict(weights)}",
            why="it needs a finite number for each of function, model and judge that [reward] sets"
            + (f"; [reward] sets no {', no '.join(missing)}" if missing else "")
            + (f"; it has no number for {', '.join(left)}" if left else ""),
            fix="set reward.weights = { function = 0.1, model = 1 }",
        )


def _judge(resolved: Resolved) -> Iterator[Contradiction]:
    recipe, judge, config = resolved.recipe, resolved.recipe.reward.judge, resolved.recipe.algorithm
    if judge is None:
        return
    yield from _judge_place(judge)
    if recipe.reward.model is not None and recipe.reward.weights is None:
        yield Contradiction(
            f"reward.judge.{'url' if judge.url else 'model'} is {judge.url or judge.model!r} "
            f"and reward.model is {recipe.reward.model!r}",
            why="only one of them can score the training rows, unless they have weights",
            fix="remove one of them, or weigh them: reward.weights = { model = 1, judge = 1 }",
        )
    alone = isinstance(config, OnlineConfig) and config.samples_per_prompt < 2
    if alone and compares(judge):
        yield Contradiction(
            "algorithm.samples_per_prompt is 1, and reward.judge compares answers",
            why="the judge scores an answer against other answers to the same prompt",
            fix="set it to at least 2, or rate single answers: reward.judge.frame with {prompt} and {answer}",
        )
    if not compares(judge) and (judge.abstain or judge.compare == "tournament"):
        yield Contradiction(
            f"reward.judge.frame rates, but abstain is {judge.abstain:g} and compare is {judge.compare!r}",
            why="abstain and compare apply to comparisons, and this frame rates each answer alone",
            fix="remove reward.judge.abstain and reward.judge.compare",
        )


def _judge_place(judge: JudgeConfig) -> Iterator[Contradiction]:
    """Yield errors about where the judge is: a model of this run, or a server."""
    if (judge.model is None) == (judge.url is None):
        yield Contradiction(
            "reward.judge has both model and url" if judge.url else "reward.judge has neither model nor url",
            why="a judge is a model that this run loads, or a server",
            fix='set reward.judge.model = "path/to/judge", or reward.judge.url = "http://localhost:8000/v1"',
        )
    elif judge.url is None:
        remote = {name: vars(judge)[name] for name in ("model_name", "key_variable") if vars(judge)[name]}
        for name, value in remote.items():
            yield Contradiction(
                f"reward.judge.{name} is {value!r}, and reward.judge.url is not set",
                why="it belongs to a judge behind a server",
                fix=f"set reward.judge.url, or remove reward.judge.{name}",
            )
