"""Admission: which rows and settings the engine can run at all. Said before anything runs, with the value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from operator import itemgetter

from rillflow.errors import RolloutError
from rillflow.records.rollout import Finish, Rollout
from rillflow.records.row import RowId
from rillflow.rollout.config import SamplingConfig
from rillflow.rollout.native.scheduler import twice


def check_tokens(rollout: Rollout, context: int, vocabulary: int) -> None:
    """Show that a row can be continued.

    Raises:
        RolloutError: it has ended, is empty, fills the context, or has a token the model does not know.
    """
    tokens = rollout.tokens
    if rollout.finish is not Finish.ABORTED:
        raise RolloutError(
            f"row ({rollout.row}) has ended with {rollout.finish.name}",
            why="only a row that has not ended goes on",
            fix="append to it with Rollout.inserted, or make a new row",
        )
    if not tokens:
        raise RolloutError(
            f"row ({rollout.row}) has an empty prompt",
            why="the first token is drawn from what the model says after the prompt",
            fix="begin every prompt with at least one token, such as the tokeniser's first",
        )
    if len(tokens) >= context:
        raise RolloutError(
            f"row ({rollout.row}) has {len(tokens)} tokens",
            why=f"the context is {context} tokens, and a new one must find room in it",
            fix="shorten the prompt, or use a model with a longer context",
        )
    odd = [token for token in (min(tokens), max(tokens)) if not 0 <= token < vocabulary]
    if odd:
        raise RolloutError(
            f"row ({rollout.row}) has token {odd[0]}, at place {tokens.index(odd[0])}",
            why=f"the model's vocabulary is 0 to {vocabulary - 1}",
            fix="encode the prompt with the model's own tokeniser",
        )


def limit_of(rollout: Rollout, max_tokens: int, context: int) -> int:
    """Tokens at which a row ends: its prompt and what was inserted, and ``max_tokens`` that are sampled.

    Raises:
        RolloutError: it has as many sampled tokens already.
    """
    drawn = sum(rollout.loss_mask)
    if drawn >= max_tokens:
        raise RolloutError(
            f"row ({rollout.row}) has {drawn} sampled tokens and max_tokens is {max_tokens}",
            why="a row that runs draws at least one token more",
            fix="raise max_tokens",
        )
    return min(len(rollout.tokens) - drawn + max_tokens, context)


def check_stop(sampling: SamplingConfig, engine: SamplingConfig) -> None:
    """Show that a row stops at the texts that the engine's stop tokens were made from.

    Raises:
        RolloutError: it names others.
    """
    if sampling.stop != engine.stop:
        raise RolloutError(
            f"a row is to stop at {list(sampling.stop)}, but the engine stops at {list(engine.stop)}",
            why="stop texts are made into tokens when an engine is built",
            fix="build the engine with these stop texts, or leave them as they are",
        )


def check_stop_tokens(stop_tokens: frozenset[int], vocabulary: int) -> None:
    """Show that every stop token can be drawn.

    Raises:
        RolloutError: one of them is outside the vocabulary.
    """
    for token in sorted(stop_tokens):
        if not 0 <= token < vocabulary:
            raise RolloutError(
                f"stop token {token} is outside the vocabulary",
                why=f"the model's vocabulary is 0 to {vocabulary - 1}, so it is never drawn",
                fix="use the tokeniser the model was trained with",
            )


def check_ids(rows: Iterable[RowId]) -> None:
    """Show that no two rows have one id.

    Raises:
        RolloutError: two have.
    """
    id_, count = max(Counter(rows).items(), key=itemgetter(1), default=(None, 0))
    if id_ is not None and count > 1:
        raise twice(id_)
