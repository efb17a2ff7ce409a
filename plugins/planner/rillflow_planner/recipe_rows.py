"""Rows: describe the rows of a phase's step for a plan.

data of the recipe ──> prompts, demonstrations ─┬─> lengths, share that is computed ────> Workload
nothing known of responses ──> assumed ─────────┤
a run's rollouts, spans ──> measured ───────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from rillflow.algorithms.config import SampledConfig
from rillflow.app.facts import RecipeFacts
from rillflow.app.phases import PhasePlan
from rillflow.app.resolved import Resolved
from rillflow.app.sections import Recipe
from rillflow.errors import PlanError
from rillflow.runs import layout
from rillflow.runs.reader import read_rollouts, read_spans, require_run
from rillflow.tasks.example import Example, answer_text
from rillflow_planner.workload import Lengths, Packing, Workload, sharing

CHARACTERS_PER_TOKEN = 4
"""Characters per token if the tokeniser is not available; a new model's tokens are characters."""
ASSUMED_SHARE, ASSUMED_SIGMA = 0.25, 0.6
"""Median response as a share of the longest, and its spread, if nothing was measured."""
READ_STEPS = 6
"""Last steps of a run whose rollouts are read; as many steps are drawn from data with answers."""
KEPT_LENGTHS = 512
"""Measured lengths that represent all of them, taken evenly from the sorted ones."""
_END = "\0"
_Row = list[Any]
_Known = Mapping[str, Any]


def workload_of(
    loaded: Resolved,
    phase: PhasePlan,
    run: Path | None = None,
    *,
    prompt: Lengths | None = None,
    response: Lengths | None = None,
) -> Workload:
    """Return the workload of a phase's step; a pair of answers counts as two rows of one prompt.

    Args:
        loaded: the recipe.
        phase: one of its phases.
        run: a run directory whose last steps give row lengths and the reward function's seconds; None: the
            lengths of the data's prompts and answers, or of prompts and assumed answers if rows are sampled.
        prompt, response: lengths of sampled rows that replace those of the data and the assumed ones.

    Raises:
        RunDirectoryError: the path is not a run directory.
        PlanError: the run sampled no rows.
    """
    recipe, config, known = loaded.recipe, phase.config, known_rows(loaded.recipe, phase)
    if run is not None:
        return measured(known, run)
    if isinstance(config, SampledConfig):
        return _assumed(known, loaded, prompt, response)
    if prompt or response:
        why = f"{phase.name} learns from answers of its data"
        raise PlanError("--prompt or --response is given", why=why, fix="leave them out")
    examples = RecipeFacts(resolved=loaded).task.train
    return _learnt(known, examples, characters_per_token(recipe))


def known_rows(recipe: Recipe, phase: PhasePlan) -> dict[str, Any]:
    """Return the values of a phase's workload that the recipe states: all but lengths."""
    config = phase.config
    samples = config.samples_per_prompt if isinstance(config, SampledConfig) else 1
    return {
        "prompts": config.prompts_per_step,
        "samples": max(samples, len(phase.algorithm.data.answers)),
        "epochs": config.epochs,
        "minibatches": config.minibatches,
        "tokens_per_micro_batch": recipe.policy.tokens_per_micro_batch,
        "dtype": recipe.policy.model.dtype,
        "rows_at_once": recipe.rollout.max_rows,
    }


def characters_per_token(recipe: Recipe) -> int:
    """Return the characters that count as one token of the recipe's texts."""
    return 1 if recipe.policy.model.new is not None else CHARACTERS_PER_TOKEN


def _learnt(known: _Known, examples: Sequence[Example], per_token: int) -> Workload:
    """Return the workload of rows with answers in the data: prompt, answer and end token."""
    prompts, minibatches = known["prompts"], known["minibatches"]
    answers = [len(text) for one in examples for text in one.answers]
    drawn = Random(0).sample(examples, len(examples))
    steps = [drawn[start : start + prompts] for start in range(0, len(drawn), prompts)][:READ_STEPS]
    return Workload(
        **known,
        prompt=_lengths(_tokens(map(_prompt_length, examples), per_token)),
        response=_lengths([tokens + 1 for tokens in _tokens(answers, per_token)]),
        packing=_packing(steps, minibatches, lambda part: _texts(part, per_token)),
    )


def _assumed(known: _Known, loaded: Resolved, prompt: Lengths | None, response: Lengths | None) -> Workload:
    """Return the workload of sampled rows with the given lengths, the data's prompts, assumed answers."""
    recipe = loaded.recipe
    limit = recipe.rollout.max_tokens
    if response is not None and response.limit > limit:
        raise PlanError(
            f"--response has lengths up to {response.limit:,}, and rollout.max_tokens is {limit:,}",
            why="no answer of the recipe is longer",
            fix=f"pass --set rollout.max_tokens={response.limit}, or a smaller max",
        )
    if prompt is None:
        examples = RecipeFacts(resolved=loaded).task.train
        prompt = _lengths(_tokens(map(_prompt_length, examples), characters_per_token(recipe)))
    middle = min(float(limit), max(4.0, ASSUMED_SHARE * limit))
    assumed = Lengths(kind="lognormal", limit=limit, median=middle, sigma=ASSUMED_SIGMA)
    return sharing(Workload(**known, prompt=prompt, response=response or assumed))


def _prompt_length(example: Example) -> int:
    """Return the characters of a prompt; for a conversation, of all its messages."""
    if isinstance(example.prompt, str):
        return len(example.prompt)
    return sum(len(turn.get("content", "")) for turn in example.turns)


def measured(known: _Known, run: Path) -> Workload:
    """Return the workload of a run's last steps, with its functions' seconds per row.

    Args:
        known: all other values of the workload.
        run: its directory.
    """
    require_run(run)
    steps = [read_rollouts(run, step) for step in list(layout.rollout_files(run))[-READ_STEPS:]]
    records = [record for step in steps for record in step]
    if not records:
        raise PlanError(
            f"{run} has no rollouts",
            why="row lengths are measured from a run's rollouts",
            fix="name a run of an algorithm that samples, or leave --lengths out",
        )
    scored = [span for span in read_spans(run) if span.stage in ("reward.score", "cost.score") and span.rows]
    judged = [record.advantage for record in records if record.advantage is not None]
    minibatches = known["minibatches"]
    return Workload(
        **known,
        prompt=_lengths([len(record.tokens) - len(record.sampled) for record in records]),
        response=_lengths([len(record.sampled) for record in records]),
        function_s=median(span.duration_s / span.rows for span in scored) if scored else 0.0,
        packing=_packing(steps, minibatches, lambda part: [list(record.tokens) for record in part]),
        gradient_share=sum(map(bool, judged)) / len(judged) if judged else 1.0,
    )


def _packing(
    steps: Sequence[Sequence[Any]], minibatches: int, texts: Callable[[Sequence[Any]], list[_Row]]
) -> Packing:
    """Return the shares of tokens that training and scoring compute, for steps cut into minibatches.

    The last token of a row is not an input.
    """
    whole = [[texts(step[place::minibatches]) for place in range(minibatches)] for step in steps]
    read = [[[row[:-1] for row in part] for part in step] for step in whole]
    tokens = sum(len(row) for step in whole for part in step for row in part)
    return Packing(
        trained=sum(_distinct(part) for step in read for part in step) / tokens,
        scored=sum(_distinct([row for part in step for row in part]) for step in read) / tokens,
    )


def _distinct(rows: Sequence[_Row]) -> int:
    """Count the tokens of rows; a prefix that several rows share counts once."""
    ordered = sorted(rows)
    return sum(map(len, ordered)) - sum(_common(one, other) for one, other in pairwise(ordered))


def _common(one: _Row, other: _Row) -> int:
    """Count the tokens of a common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _texts(examples: Sequence[Example], per_token: int) -> list[_Row]:
    """Return the examples' rows, with texts cut into pieces in place of tokens."""
    return [
        [*_cut(one.key, per_token), *_cut(answer_text(each), per_token), _END]
        for one in examples
        for each in one.answers
    ]


def _cut(text: str, per_token: int) -> list[str]:
    return [text[start : start + per_token] for start in range(0, len(text), per_token)]


def _tokens(characters: Iterable[int], per_token: int) -> list[int]:
    return [max(1, -(-count // per_token)) for count in characters]


def _lengths(found: Sequence[int]) -> Lengths:
    """Return measured lengths, thinned so that their quantiles stay."""
    ordered = sorted(found)
    count = min(len(ordered), KEPT_LENGTHS)
    kept = tuple(ordered[(2 * place + 1) * len(ordered) // (2 * count)] for place in range(count))
    return Lengths(kind="measured", limit=ordered[-1], values=kept)
