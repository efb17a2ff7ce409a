"""Rows: what the rows of a recipe's step are like, for a plan.

data of the recipe ──> prompts, demonstrations ─┬─> lengths, what of them is computed ──> Rows
nothing known of responses ──> assumed, named ──┤
a run's rollouts, spans ──> measured ───────────┘
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from rillflow.algorithms.config import OnlineConfig
from rillflow.assembly.preflight import open_rows, prompt_length
from rillflow.assembly.recipe import LoadedRecipe, Recipe
from rillflow.errors import PlanError
from rillflow.observe import layout
from rillflow.observe.reader import read_rollouts, read_spans, require_run
from rillflow.planner.workload import Lengths, Packing
from rillflow.tasks.example import Example
from rillflow.tasks.preference import Preference

CHARACTERS_PER_TOKEN = 4
"""Of a text whose tokeniser is not at hand; a new model's tokens are characters."""
ASSUMED_SHARE, ASSUMED_SIGMA = 0.25, 0.6
"""The median response as a share of the longest, and its spread, where nothing was measured."""
READ_STEPS = 6
"""Steps of a run whose rollouts are read, its last ones; as many are drawn of data that is learnt from."""
KEPT_LENGTHS = 512
"""Measured lengths that stand for all of them: evenly taken from the sorted ones."""
_END = "\0"
_Row = list[Any]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What rows are like."""

    prompt: Lengths
    """Tokens of a prompt."""
    response: Lengths
    """Tokens of a response."""
    packing: Packing
    """What is computed of those that begin alike."""
    function_s: float = 0.0
    """Seconds a reward's function takes for a row; 0 where nobody measured it."""
    gradient_share: float = 1.0
    """Of them, those with a gradient."""
    assumptions: tuple[str, ...] = ()
    """What was assumed of them."""


def learnt_rows(loaded: LoadedRecipe, prompts: int, minibatches: int) -> Rows:
    """Rows that are learnt from, as the data has them: prompt, answer and the token that ends it.

    Args:
        loaded: the recipe.
        prompts: rows, or pairs of them, of a step.
        minibatches: optimiser steps they are shared out to.
    """
    examples, per_token = open_rows(loaded.recipe, loaded.base).train, _per_token(loaded.recipe)
    answers = [len(text) for one in examples for text in _answers(one)]
    drawn = Random(0).sample(examples, len(examples))
    steps = [drawn[start : start + prompts] for start in range(0, len(drawn), prompts)][:READ_STEPS]
    parts = [[step[place::minibatches] for place in range(minibatches)] for step in steps]
    return Rows(
        prompt=_lengths(_tokens(map(prompt_length, examples), per_token)),
        response=_lengths([tokens + 1 for tokens in _tokens(answers, per_token)]),
        packing=_packing([[_texts(part, per_token) for part in step] for step in parts]),
        assumptions=_by_characters(per_token),
    )


def assumed_rows(loaded: LoadedRecipe) -> Rows:
    """Rows learnt from as the data has them; of sampled ones the prompts, and responses assumed.

    Of sampled rows nothing is known to begin alike but their prompts.
    """
    recipe = loaded.recipe
    config = recipe.algorithm
    if not isinstance(config, OnlineConfig):
        return learnt_rows(loaded, config.prompts_per_step, config.minibatches)
    examples, per_token = open_rows(recipe, loaded.base).train, _per_token(recipe)
    limit = recipe.rollout.max_tokens
    middle = min(float(limit), max(4.0, ASSUMED_SHARE * limit))
    assumed = (
        f"responses: log-normal, median {middle:g} tokens, sigma {ASSUMED_SIGMA}, clipped at {limit:,}; "
        "--lengths RUN measures"
    )
    prompt = _lengths(_tokens(map(prompt_length, examples), per_token))
    response = Lengths(kind="lognormal", limit=limit, median=middle, sigma=ASSUMED_SIGMA)
    shared = [
        (response.mean + prompt.mean * distinct_prompts(config.samples_per_prompt, parts))
        / (response.mean + prompt.mean)
        for parts in (config.minibatches, 1)
    ]
    return Rows(
        prompt=prompt,
        response=response,
        packing=Packing(trained=shared[0], scored=shared[1]),
        assumptions=(*_by_characters(per_token), assumed),
    )


def distinct_prompts(samples: int, parts: int) -> float:
    """Of a prompt's rows, those whose prompt is the first of its kind in its part, rows drawn to equal parts.

    ``p (1 - (1 - 1/p)^s) / s`` of s rows in p parts: a part has none of them with probability (1 - 1/p)^s.
    """
    return parts * (1.0 - (1.0 - 1.0 / parts) ** samples) / samples


def measured_rows(run: Path, minibatches: int = 1) -> Rows:
    """What the rows of a run's last steps were like, and its functions' seconds a row.

    Args:
        run: its directory.
        minibatches: optimiser steps of a pass; rows of two share no beginning.

    Raises:
        RunDirectoryError: it is no run directory.
        PlanError: it sampled no rows.
    """
    require_run(run)
    steps = [read_rollouts(run, step) for step in list(layout.rollout_files(run))[-READ_STEPS:]]
    records = [record for step in steps for record in step]
    if not records:
        raise PlanError(
            f"{run} has no rollouts",
            why="lengths are measured from the rows a run sampled",
            fix="name a run of an algorithm that samples, or leave --lengths out",
        )
    responses = [len(record.sampled) for record in records]
    prompts = [len(record.tokens) - count for record, count in zip(records, responses, strict=True)]
    scored = [span for span in read_spans(run) if span.stage in ("reward.score", "cost.score") and span.rows]
    tokens = [[list(record.tokens) for record in step] for step in steps]
    judged = [record.advantage for record in records if record.advantage is not None]
    return Rows(
        prompt=_lengths(prompts),
        response=_lengths(responses),
        function_s=median(span.duration_s / span.rows for span in scored) if scored else 0.0,
        packing=_packing([[step[place::minibatches] for place in range(minibatches)] for step in tokens]),
        gradient_share=sum(map(bool, judged)) / len(judged) if judged else 1.0,
    )


def _packing(steps: Sequence[Sequence[Sequence[_Row]]]) -> Packing:
    """What training, scoring and attention compute of steps, each of minibatches of rows.

    Nothing reads a row's last token.
    """
    from rillflow.parallel.packed import attention_seats

    read = [[[row[:-1] for row in part] for part in step] for step in steps]
    tokens = sum(len(row) for step in steps for part in step for row in part)
    return Packing(
        trained=sum(_distinct(part) for step in read for part in step) / tokens,
        scored=sum(_distinct([row for part in step for row in part]) for step in read) / tokens,
        attended=sum(attention_seats([len(row) for row in part]) for step in read for part in step) / tokens,
    )


def _distinct(rows: Sequence[_Row]) -> int:
    """Tokens of rows, each beginning that several share counted once."""
    ordered = sorted(rows)
    return sum(map(len, ordered)) - sum(_common(one, other) for one, other in pairwise(ordered))


def _common(one: _Row, other: _Row) -> int:
    """Tokens with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _texts(examples: Sequence[Example], per_token: int) -> list[_Row]:
    """The examples' rows, their texts cut as if into tokens."""
    return [
        [*_cut(one.key, per_token), *_cut(text, per_token), _END]
        for one in examples
        for text in _answers(one)
    ]


def _cut(text: str, per_token: int) -> list[str]:
    return [text[start : start + per_token] for start in range(0, len(text), per_token)]


def _answers(example: Example) -> Iterable[str]:
    if isinstance(example, Preference):
        return str(example.completion), example.rejected
    return (str(example.completion),)


def _per_token(recipe: Recipe) -> int:
    return 1 if recipe.policy.model.new is not None else CHARACTERS_PER_TOKEN


def _by_characters(per_token: int) -> tuple[str, ...]:
    return () if per_token == 1 else (f"prompts: {per_token} characters a token; --lengths RUN measures",)


def _tokens(characters: Iterable[int], per_token: int) -> list[int]:
    return [max(1, -(-count // per_token)) for count in characters]


def _lengths(found: Sequence[int]) -> Lengths:
    """Lengths that were seen, thinned to so many that their quantiles stay."""
    ordered = sorted(found)
    count = min(len(ordered), KEPT_LENGTHS)
    kept = tuple(ordered[(2 * place + 1) * len(ordered) // (2 * count)] for place in range(count))
    return Lengths(kind="measured", limit=ordered[-1], values=kept)
