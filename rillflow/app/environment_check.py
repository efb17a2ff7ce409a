"""Environment check: load the environment's class, and play the beginning of one episode, as a run would."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rillflow.app.facts import RecipeFacts
from rillflow.errors import RewardError, nearest
from rillflow.rewards.function import place_of
from rillflow.serving.environments.pool import EnvironmentPool, Told
from rillflow.serving.environments.source import ENVIRONMENT_REWARD, METRICS, TURNS
from rillflow.tasks.example import Example, answer_text, shown

if TYPE_CHECKING:
    from rillflow.app.check_report import Report

TRIED = {ENVIRONMENT_REWARD: 0.0, METRICS: {}, TURNS: 1}
"""Columns of an environment that a reward function is tried with."""
_TURNS = 2
_SAYS = "0"


def look_at_environment(facts: RecipeFacts, report: Report) -> None:
    """Check that each row has the columns that ``reset`` needs; reset one environment, and step twice.

    Raises:
        RewardError: a column is missing, or the environment failed.
        RolloutError: the class cannot be loaded.
    """
    source, config, task = facts.environment, facts.recipe.rollout.environment, facts.task
    if source is None or config is None:
        return
    pool = EnvironmentPool(source, config)
    try:
        rows = [*task.train, *task.held_out, *(row for rows in task.sets.values() for row in rows)]
        for name, row in ((name, row) for name in pool.load().required for row in rows):
            if name not in {"prompt", *row.columns}:
                known = sorted({"prompt", *row.columns})
                raise RewardError(
                    f"{place_of(source.path)}: {source.path.name}.reset needs {name!r}",
                    why=f"{row} provides {', '.join(known)}",
                    fix=f"{nearest(name, known)}; or give the parameter a default",
                )
        report.say("environment", [f"{source}", *_played(pool, rows[0])])
    finally:
        pool.close()


def _played(pool: EnvironmentPool, example: Example) -> list[str]:
    """Return what the environment said to the row's own answer, or to a text."""
    row, lines = pool.begin(json.loads(example.as_json())), list[str]()
    text = answer_text(example.completion or "") or _SAYS
    for turn in range(_TURNS + 1):
        told = _answer(pool, row)
        said = "nothing" if told.observation is None else shown(told.observation)
        if not turn:
            lines.append(f"reset: {said}")
        else:
            over = ", and the episode is over" if told.is_over else ""
            lines.append(f"step({shown(text)}): {said}, reward {told.reward:g}{over}")
        if told.is_over or turn == _TURNS:
            break
        pool.step(row, text, {"role": "assistant", "content": text})
    return lines


def _answer(pool: EnvironmentPool, row: int) -> Told:
    told: list[Told] = []
    while not told:
        told = [each for each in pool.turn(1.0) if each.row == row]
    failed: Any = told[0].failed
    if failed is not None:
        raise RewardError(
            f"{failed[1]}",
            why="it was tried on the first row, as a run does; such a row has no reward in a run",
            fix="fix the class; if the time was too short, raise rollout.environment.timeout_s",
        )
    return told[0]
