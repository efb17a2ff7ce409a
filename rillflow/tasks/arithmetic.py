"""Arithmetic: the built-in task of two numbers and an operator, generated without dependencies.

seed, digits, operators ─> problems drawn without repetition ─> "17+25=" with the answer "42"
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from random import Random

from rillflow.errors import DataError
from rillflow.rewards.function import FunctionPath
from rillflow.tasks.example import Example

REWARD = FunctionPath(file=Path(__file__).resolve().with_name("arithmetic_reward.py"), name="reward")
"""Reward function of the task."""

_OPERATORS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def arithmetic_examples(*, size: int, digits: int, operators: str, seed: int) -> list[Example]:
    """Return ``size`` different problems of numbers with exactly ``digits`` digits, or all that exist.

    Raises:
        DataError: an operator is unknown or repeated.
    """
    for place, symbol in enumerate(operators):
        if symbol not in _OPERATORS or symbol in operators[:place]:
            raise DataError(
                f"task.operators is {operators!r}",
                why=f"{symbol!r} occurs twice"
                if symbol in _OPERATORS
                else f"{symbol!r} is not an operator of this task",
                fix=f"use {' '.join(_OPERATORS)}, each at most once",
            )
    least = 10 ** (digits - 1) if digits > 1 else 0
    span = 10**digits - least
    space = span * span * len(operators)
    drawn = Random(seed).sample(range(space), min(size, space))
    return [_problem(index, number, least, span, operators) for index, number in enumerate(drawn)]


def _problem(index: int, number: int, least: int, span: int, operators: str) -> Example:
    pair, kind = divmod(number, len(operators))
    left, right = (least + part for part in divmod(pair, span))
    symbol = operators[kind]
    prompt, place = f"{left}{symbol}{right}=", f"arithmetic problem {index + 1}"
    answer = str(_OPERATORS[symbol](left, right))
    return Example(index=index, prompt=prompt, completion=answer, columns={"answer": answer}, place=place)
