"""Notes of ``check`` and of a run's start on what scores.

a function that compares rows, in calls with a part of them ─┐
tests that run in the process of the answer's program ───────┴─ note_scorers ─> Report.notes
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rillflow.app.any_recipe import AnyRecipe
from rillflow.app.check_report import Report
from rillflow.app.facts import RecipeFacts
from rillflow.app.sections import Recipe
from rillflow.config.problems import shown
from rillflow.errors import RewardError
from rillflow.rewards.function import FunctionPath
from rillflow.rewards.text_execution import is_shut_in
from rillflow.tasks.example import Example
from rillflow_parts.scorers.code_tests import num_exposed
from rillflow_parts.scorers.plugin import CODE_TESTS
from rillflow_parts.scorers.row_comparison import row_comparisons


def note_scorers(facts: RecipeFacts | AnyRecipe, report: Report) -> None:
    """Add the notes on rewards and costs; their source is read, and nothing of it runs."""
    if not isinstance(facts, RecipeFacts) or not facts.resolved.has_policy:
        return
    for role, functions in (("reward", facts.functions), ("cost", facts.costs)):
        for function in functions:
            report.notes += _comparisons(function, facts.recipe, role)
            if function.file == CODE_TESTS.file:
                report.notes += _exposed_tests(facts.task.train)


def _exposed_tests(rows: Sequence[Example]) -> Iterator[str]:
    """Yield a note on tests that run in the process of the program that they test."""
    exposed = [row for row in rows if num_exposed(row.columns.get("tests"), row.columns.get("entry_point"))]
    if exposed:
        yield (
            f"code-tests: {len(exposed)} of {len(rows)} rows have tests that run in the process of the "
            f"answer's program, which can cheat them (first {shown(exposed[0].key)}); assert f(x) == "
            "literal, a function check with entry_point, and inputs with outputs cannot be cheated"
        )


def _comparisons(function: FunctionPath, recipe: Recipe, role: str) -> Iterator[str]:
    """Yield a note on a function that compares rows, if its calls have a part of the rows."""
    places = row_comparisons(function)
    divided = _division(function, recipe, role) if places else ""
    if divided:
        yield (
            f"warning: {function} compares rows with each other ({places[0]}), and {divided}. Score each "
            "answer alone: a group's baseline compares answers to a prompt. Or compare with [reward.judge]"
        )


def _division(function: FunctionPath, recipe: Recipe, role: str) -> str:
    """Return how the rows of a step are divided into calls, and how to avoid that; empty for one call."""
    reward, placement = recipe.reward, recipe.placement
    try:
        is_shut = is_shut_in(function, reward.sandbox, unless_harmless=True)
    except RewardError:  # reported where the function is tried
        return ""
    if is_shut:
        return (
            "the sandbox calls it with one row at a time, so a row meets only itself. If it runs no text of "
            "an answer, reward.sandbox = false gives it all rows"
        )
    if reward.workers > 1 and not recipe.schedule.is_by_group:
        return (
            f"reward.workers is {reward.workers}: each child gets a share of the rows, which may divide the "
            "answers to a prompt. reward.workers = 1 calls it with all rows"
        )
    ranks = placement.pools.get(placement.pool_of(role), 1)
    chunks = recipe.schedule.chunks
    reasons = {
        "ready first calls it with the answers to one prompt": recipe.schedule.is_by_group,
        f"{ranks} ranks score, each the answers to some of a step's prompts": ranks > 1,
        f"schedule.stream_chunks is {chunks}, so a call has the prompts of one chunk": chunks > 1,
    }
    return next((f"{why}: it must compare only these" for why, holds in reasons.items() if holds), "")
