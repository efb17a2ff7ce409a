"""Gym: problems generated and scored by the reasoning-gym package.

reasoning-gym:NAME, size, seed ─> entries ─> prompt = question, columns = answer, metadata
                                                   └─ gym_reward.py, in a child: the data set's score_answer
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rillflow.errors import DataError, install_package, nearest
from rillflow.rewards.function import FunctionPath
from rillflow.tasks.example import Example
from rillflow.tasks.kinds import GYM

REWARD = FunctionPath(file=Path(__file__).resolve().with_name("gym_reward.py"), name="reward")
"""Reward function of every such task."""


def gym_examples(source: str, *, size: int, seed: int) -> list[Example]:
    """Return the first ``size`` problems of the data set that ``source`` names.

    Raises:
        DataError: reasoning-gym is not installed or has no such data set; its entries are not plain data, or
            cannot be scored as plain data.
    """
    try:
        # Only users of its problems need it.
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise DataError(
            f"task.source is {source!r}",
            why="reasoning-gym is not installed",
            fix=install_package("gym"),
        ) from None
    name = source.removeprefix(GYM)
    if name not in DATASETS:
        raise DataError(
            f"task.source is {source!r}",
            why="reasoning-gym has no data set of this name",
            fix=nearest(name, DATASETS),
        )
    try:
        data = reasoning_gym.create_dataset(name, size=size, seed=seed)
    except (AssertionError, ValueError, TypeError) as error:
        raise DataError(
            f"task.source is {source!r}", why=f"it cannot be made by its name alone: {error}"
        ) from error
    examples = [_example(index, data[index], source) for index in range(size)]
    if examples[0].completion is not None:
        expected = data.score_answer(examples[0].completion, data[0])
        _check_score(source, expected, reasoning_gym.get_score_answer_fn(name), examples[0])
    return examples


def _example(index: int, entry: dict[str, Any], source: str) -> Example:
    answer = entry["answer"]
    columns = {"answer": answer, "metadata": entry["metadata"]}
    return Example(
        index=index,
        prompt=entry["question"],
        completion=answer if isinstance(answer, str) else None,
        columns={name: _plain(value, source) for name, value in columns.items()},
        place=f"{source} problem {index + 1}",
    )


def _check_score(source: str, expected: float, score: Any, example: Example) -> None:
    """Raise DataError for a data set whose scorer needs more than the plain columns."""
    found = score(example.columns["answer"], {"question": example.prompt, **example.columns})
    if found != expected:
        raise DataError(
            f"task.source is {source!r}",
            why=f"its scores change when problems are stored as plain data: a right answer gets {found:g}",
            fix="choose another data set",
        )


def _plain(value: Any, source: str) -> Any:
    """Return the value as JSON data; tuples become lists."""
    if isinstance(value, list | tuple):
        return [_plain(item, source) for item in value]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: _plain(item, source) for name, item in value.items()}
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise DataError(
        f"task.source is {source!r}",
        why=f"its problems hold {value!r}, which is not plain data",
        fix="choose another data set",
    )
