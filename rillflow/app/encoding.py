"""Encoding: turn a recipe's rows into tokens before a run starts, and handle rows that do not fit.

    task ─ tokeniser ─> tokens ─ context ─┬─> rows of every use: prompts, demonstrations, pairs
                                          └─> refused, or left out and counted: task.too_long

Imports no torch if the tokeniser needs none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rillflow.app.resolved import Resolved
from rillflow.app.sections import Recipe
from rillflow.errors import DataError
from rillflow.models.tokenizer import ModelInput, Tokenizer
from rillflow.tasks.encoded import Encoded, Encoder
from rillflow.tasks.example import Example
from rillflow.tasks.kinds import PROMPTS, DataKind
from rillflow.tasks.task import Task

PATIENCE_S = 2.0
"""Seconds between progress messages while rows are encoded."""


@dataclass(frozen=True, kw_only=True)
class EncodedTask:
    """A task's rows as tokens; every kept row fits into the context."""

    model_input: ModelInput
    """Tokeniser and context that the rows are encoded for."""
    train: Mapping[DataKind, Sequence[Encoded | None]]
    """Training rows in the task's order, by kind of data; None for a row that was left out."""
    held_out: Sequence[Encoded]
    """Rows to evaluate on."""
    sets: Mapping[str, Sequence[Encoded]]
    """Further rows to evaluate on, by set name."""
    left_out: Mapping[DataKind, int]
    """Number of training rows left out, by kind of data."""
    problems: Sequence[DataError]
    """Errors about rows that cannot be used, where ``task.too_long`` refuses them."""
    notes: Sequence[str]
    """Notes on rows that were cut or left out, and on text that may be encoded in an unexpected way."""


def encode_task(
    resolved: Resolved, task: Task, model_input: ModelInput, say: Callable[[str], None] | None = None
) -> EncodedTask:
    """Encode every row.

    Args:
        resolved: the recipe; its algorithm and warm start determine the kinds of data.
        task: the rows.
        model_input: the tokeniser and context to encode for.
        say: receives progress messages if encoding takes long.
    """
    recipe = resolved.recipe
    uses, sieve = data_uses(resolved), _Sieve(recipe, model_input, say)
    trained = sieve.encoded(task.train, "to train on", max(uses, key=lambda use: len(use.answers)))
    rows = {use: sieve.fitting(trained, "to train on", use) for use in uses}
    judged = recipe.chosen.data if recipe.chosen.score is not None else PROMPTS

    def judging(asked: Sequence[Example], part: str) -> list[Encoded]:
        is_evaluated = recipe.evaluate.problems > 0 and is_judged(resolved, task)
        found = sieve.encoded(asked if is_evaluated else (), part, judged)
        return [row for row in sieve.fitting(found, part, judged) if row is not None]

    sets = {name: judging(rows, f"of the set {name}") for name, rows in task.sets.items()}
    return EncodedTask(
        model_input=model_input,
        train=rows,
        held_out=judging(task.held_out, "held out"),
        sets=sets,
        left_out={use: kept.count(None) for use, kept in rows.items()},
        problems=sieve.problems,
        notes=[
            *sieve.notes,
            *([] if recipe.task.chat_template_applied else _spelling(task, model_input.tokenizer)),
        ],
    )


def longest_row(resolved: Resolved, encoded: EncodedTask) -> int:
    """Return the tokens of the longest row, prompt and answer; one of several turns may fill the context."""
    recipe = resolved.recipe
    if resolved.writer is not None:
        return encoded.model_input.context
    kind, limit = recipe.chosen.data, recipe.rollout.max_tokens
    rows = [row for row in encoded.train[kind] if row is not None]
    trained = max((row.length(kind, limit) for row in rows), default=0)
    judged = [*encoded.held_out, *(row for rows in encoded.sets.values() for row in rows)]
    asked = max((len(row.prompt) + limit for row in judged), default=0) if resolved.generates else 0
    return max(trained, asked)


class _Sieve:
    """Encoder that refuses rows that do not fit, or leaves them out with a note."""

    def __init__(self, recipe: Recipe, model_input: ModelInput, say: Callable[[str], None] | None) -> None:
        self._begin = model_input.tokenizer.begin
        self._limit, self._context, self._say = recipe.rollout.max_tokens, model_input.context, say
        self._task, self._encoder = (
            recipe.task,
            Encoder.of(model_input.tokenizer, recipe.task, model_input.context),
        )
        self.problems: list[DataError] = []
        """Errors that refuse the run."""
        self.notes: list[str] = []
        """Notes on rows that were cut or left out."""

    def encoded(self, examples: Sequence[Example], part: str, use: DataKind) -> list[Encoded | None]:
        """Encode the rows; None for a row that cannot be encoded."""
        found: list[Encoded | DataError] = []
        told = time.monotonic()
        for row in self._encoder.encode(examples, use):
            found.append(row)
            if self._say is not None and time.monotonic() - told > PATIENCE_S:
                told = time.monotonic()
                self._say(f"encoded {len(found):,} of {len(examples):,} rows {part}")
        bad = [row for row in found if isinstance(row, DataError)]
        if bad:
            what = f"{len(bad):,} of {len(examples):,} rows {part} cannot be used: {bad[0].what}"
            self._stop(DataError(what, bad[0].why, bad[0].fix), len(found) - len(bad))
        return [row if isinstance(row, Encoded) else None for row in found]

    def fitting(self, rows: Sequence[Encoded | None], part: str, use: DataKind) -> list[Encoded | None]:
        """Return the rows that fit, each with only the answers that ``use`` needs; None for the others."""
        context = self._context
        if self._task.too_long == "cut":
            rows = self._shortened(rows, part, use)
        lengths = [0 if row is None else row.length(use, self._limit) for row in rows]
        kept = [
            None if row is None or length > context else row.cut(use)
            for row, length in zip(rows, lengths, strict=True)
        ]
        length, row = max(zip(lengths, rows, strict=True), key=lambda each: each[0], default=(0, None))
        if row is not None and length > context:
            long = sum(each > context for each in lengths)
            rest = "its answer" if use.answers else f"rollout.max_tokens = {self._limit}"
            what = (
                f"{long:,} of {len(rows):,} {use} {part} do not fit into {context:,} tokens; "
                f"the longest, {row.example}, has {length:,} with {rest}"
            )
            why, fix = "prompt and answer share the context", "shorten them, or use a longer context"
            self._stop(DataError(what, why, fix), len(kept) - kept.count(None))
        return kept

    def _shortened(self, rows: Sequence[Encoded | None], part: str, use: DataKind) -> list[Encoded | None]:
        """Cut prompts from the left so that rows fit; a row whose answers leave no room stays unchanged."""
        room, begin = self._context, self._begin
        if not use.answers:
            room -= self._limit  # a sampled answer takes up to this many tokens
        found = [
            row and (row.short(use, room, begin) or row if row.length(use, 0) > room else row) for row in rows
        ]
        count = sum(row is not other for row, other in zip(found, rows, strict=True))
        if count:
            self.notes.append(
                f"cut: {count:,} of {len(rows):,} {use} {part} have their prompts cut from the left"
            )
        return found

    def _stop(self, error: DataError, left: int) -> None:
        """Refuse the run, or leave out the rows of the error with a note."""
        if self._task.too_long != "error" and left:
            self.notes.append(f"left out: {error.what}")
            return
        other = '; or set task.too_long = "drop" to leave out these rows' if left else ""
        self.problems.append(DataError(error.what, error.why, f"{error.fix}{other}"))


def data_uses(resolved: Resolved) -> list[DataKind]:
    """Return every kind of data that a phase's step receives."""
    found: list[DataKind] = []
    for plan in resolved.phases:
        beside = plan.algorithm.beside(plan.config)
        found += [plan.algorithm.data, *([] if beside is None else [beside])]
    return [*dict.fromkeys(found)]


def is_judged(resolved: Resolved, task: Task) -> bool:
    """Return whether something scores held-out rows."""
    reward, own = resolved.recipe.reward, [each.reward for each in resolved.writers.values()]
    has_scorer = any((reward.named, reward.model, reward.judge, task.reward, *own))
    return resolved.main.algorithm.score is not None or (resolved.has_policy and has_scorer)


def _spelling(task: Task, tokenizer: Tokenizer) -> list[str]:
    """Return a note on prompts that contain the text of a special token."""
    texts = [row for row in (*task.train, *task.held_out) if isinstance(row.prompt, str)]
    found = [(row, special) for row in texts if (special := tokenizer.special_in(str(row.prompt)))]
    if not found:
        return []
    row, special = found[0]
    return [
        f"{len(found):,} of {len(texts):,} prompts spell a special token (the first, {row}, {special!r}): "
        "it is encoded as plain text. If the chat template wrote these prompts, set "
        "task.chat_template_applied = true"
    ]
