"""Prompts: examples as batches, in an order that a resume takes up exactly.

train ── PromptStream.take ──> (epoch, example) ─┬─ prompt_batch ─────> tokens of the prompt
  order of an epoch: a permutation of its own    ├─ supervised_batch ─> prompt, answer and end token
                                                 └─ preference_batch ─> the same, two rows a pair
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

import torch

from rillflow.errors import DataError, ModelError
from rillflow.formulas.counter import permutation
from rillflow.models.tokenizer import Tokenizer
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.rollout import Finish
from rillflow.records.row import RowId
from rillflow.tasks.example import Example
from rillflow.tasks.preference import Preference

TooLong = Literal["error", "drop"]
Row = TypeVar("Row", bound=Example)


class Draw(NamedTuple, Generic[Row]):
    """One row of the stream."""

    epoch: int
    """How many times the data had been gone through before."""
    example: Row
    """The row."""


@dataclass(frozen=True, kw_only=True)
class StreamPosition:
    """A place in the stream, as plain data. Example: ``StreamPosition(**saved)``."""

    epoch: int = 0
    """The pass through the data."""
    offset: int = 0
    """Rows taken in it."""


class PromptStream(Generic[Row]):
    """An endless stream of examples: every epoch has each of them once, in an order of its own.

    Example:
        stream = PromptStream(task.train, seed=0)
        first = stream.take(64)
        again = PromptStream(task.train, seed=0, position=stream.position)   # goes on where stream is

    Args:
        examples: the rows, at least one.
        seed: decides every epoch's order.
        position: where to begin.

    Raises:
        DataError: there are no examples, or the position is beyond their end.
    """

    def __init__(
        self, examples: Sequence[Row], *, seed: int, position: StreamPosition = StreamPosition()
    ) -> None:
        if not examples or not 0 <= position.offset <= len(examples) or position.epoch < 0:
            raise DataError(
                f"there is no epoch {position.epoch}, row {position.offset} in {len(examples)} rows",
                why="the stream would begin there; the position belongs to other data, or there is no data",
            )
        self._examples = examples
        self._seed = seed
        self.position = position
        """Where the next row comes from."""
        self._order: list[int] = self._permutation(position.epoch)

    def take(self, count: int) -> list[Draw[Row]]:
        """The next ``count`` rows; more than one epoch holds is fine."""
        drawn: list[Draw[Row]] = []
        epoch, offset = self.position.epoch, self.position.offset
        while len(drawn) < count:
            if offset == len(self._order):
                epoch, offset = epoch + 1, 0
                self._order = self._permutation(epoch)
            part = self._order[offset : offset + count - len(drawn)]
            drawn += [Draw(epoch, self._examples[index]) for index in part]
            offset += len(part)
        self.position = StreamPosition(epoch=epoch, offset=offset)
        return drawn

    def state(self) -> dict[str, int]:
        """The position as a checkpoint holds it."""
        return asdict(self.position)

    def _permutation(self, epoch: int) -> list[int]:
        order: list[int] = permutation(self._seed, len(self._examples), stream=epoch).tolist()
        return order


def prompt_batch(
    examples: Sequence[Example],
    tokenizer: Tokenizer,
    *,
    epoch: int | Sequence[int],
    context: int,
    max_tokens: int,
    too_long: TooLong = "error",
) -> Batch:
    """Prompts to sample answers for: ``tokens`` and ``columns``, ids (epoch, index, 0).

    Args:
        examples: B rows.
        tokenizer: the model's.
        epoch: of all rows, or of each.
        context: the longest row in tokens.
        max_tokens: new tokens a row must have room for.
        too_long: whether a prompt without that room is an error, or is left out; the batch then has fewer
            rows than there are examples.

    Raises:
        DataError: a prompt is too long or cannot be encoded, with its place in the source; none is left.
    """
    tokens = _prompt_tokens(examples, tokenizer)
    keep = _fitting(
        examples, [len(row) + max_tokens for row in tokens], context, too_long, f"{max_tokens} new tokens"
    )
    epochs = [epoch] * len(examples) if isinstance(epoch, int) else epoch
    return Batch(
        ids=row_ids([RowId(epochs[place], examples[place].index, 0) for place in keep]),
        fields={
            "tokens": Ragged.from_rows([tokens[place] for place in keep]),
            "columns": Ragged.from_text(examples[place].as_json() for place in keep),
        },
    )


def supervised_batch(
    examples: Sequence[Example],
    tokenizer: Tokenizer,
    *,
    epoch: int | Sequence[int],
    context: int,
    too_long: TooLong = "error",
) -> Batch:
    """Demonstrations: the fields of ``rollout_batch``, the loss mask on the answer and its end token.

    Args and raises as ``prompt_batch``; a row without an answer is an error too.
    """
    answers = [_answer(example) for example in examples]
    prompts = _prompt_tokens(examples, tokenizer)
    completions = _encoded(examples, answers, tokenizer.encode_completions, "completion")
    each = [[completion] for completion in completions]
    return _answered(examples, prompts, each, epoch, context, too_long)


def preference_batch(
    examples: Sequence[Preference],
    tokenizer: Tokenizer,
    *,
    epoch: int | Sequence[int],
    context: int,
    too_long: TooLong = "error",
) -> Batch:
    """Pairs: the fields of ``supervised_batch``, two rows an example, sample 0 chosen and sample 1 rejected.

    Args and raises as ``prompt_batch``. A pair of which one row is too long is left out, or an error, as a
    whole.
    """
    prompts = _prompt_tokens(examples, tokenizer)
    better, worse = [_answer(example) for example in examples], [example.rejected for example in examples]
    chosen = _encoded(examples, better, tokenizer.encode_completions, "chosen answer")
    rejected = _encoded(examples, worse, tokenizer.encode_completions, "rejected answer")
    pairs = [list(pair) for pair in zip(chosen, rejected, strict=True)]
    return _answered(examples, prompts, pairs, epoch, context, too_long)


def _answered(
    examples: Sequence[Example],
    prompts: Sequence[list[int]],
    answers: Sequence[Sequence[list[int]]],
    epoch: int | Sequence[int],
    context: int,
    too_long: TooLong,
) -> Batch:
    """A row for each answer of each example, samples numbered from 0; an example fits as a whole or not."""
    lengths = [len(prompt) + max(map(len, each)) for prompt, each in zip(prompts, answers, strict=True)]
    keep = _fitting(examples, lengths, context, too_long, "the answer")
    epochs = [epoch] * len(examples) if isinstance(epoch, int) else epoch
    rows = [(place, sample) for place in keep for sample in range(len(answers[place]))]
    tokens = Ragged.from_rows([[*prompts[place], *answers[place][sample]] for place, sample in rows])
    starts = torch.tensor([len(prompts[place]) for place, _ in rows], dtype=torch.int64)
    nothing = torch.zeros(tokens.values.shape[0])
    return Batch(
        ids=row_ids([RowId(epochs[place], examples[place].index, sample) for place, sample in rows]),
        fields={
            "tokens": tokens,
            "loss_mask": tokens.with_values(tokens.positions >= tokens.expand(starts)),
            "sampler_logprobs": tokens.with_values(nothing),
            "versions": tokens.with_values(torch.full(nothing.shape, -1, dtype=torch.int32)),
            "finish": torch.full((len(rows),), int(Finish.STOP), dtype=torch.int8),
            "columns": Ragged.from_text(examples[place].as_json() for place, _ in rows),
        },
    )


def _answer(example: Example) -> str:
    if example.completion is None:
        raise DataError(
            f"{example} has no answer to learn from",
            why="supervised steps learn the column 'completion', or else 'answer'",
            fix="add the column, or leave supervised steps out",
        )
    return example.completion


def _prompt_tokens(examples: Sequence[Example], tokenizer: Tokenizer) -> list[list[int]]:
    texts = [example for example in examples if isinstance(example.prompt, str)]
    encoded = iter(_encoded(texts, [str(text.prompt) for text in texts], tokenizer.encode_texts, "prompt"))
    return [
        next(encoded) if isinstance(example.prompt, str) else _chat_tokens(example, tokenizer)
        for example in examples
    ]


def _chat_tokens(example: Example, tokenizer: Tokenizer) -> list[int]:
    assert not isinstance(example.prompt, str)
    try:
        return tokenizer.encode_chat(example.prompt)
    except ModelError as error:
        raise _unencodable(example, "prompt", error) from error


def _encoded(
    examples: Sequence[Example],
    texts: Sequence[str],
    encode: Callable[[Sequence[str]], list[list[int]]],
    name: str,
) -> list[list[int]]:
    """All texts at once; one by one only to find the row of an error."""
    try:
        return encode(texts)
    except ModelError:
        for example, text in zip(examples, texts, strict=True):
            try:
                encode([text])
            except ModelError as error:
                raise _unencodable(example, name, error) from error
        raise


def _unencodable(example: Example, name: str, error: ModelError) -> DataError:
    return DataError(f"the {name} of {example}: {error.what}", why=error.why, fix=error.fix)


def _fitting(
    examples: Sequence[Example], lengths: Sequence[int], context: int, too_long: TooLong, rest: str
) -> list[int]:
    """Places of the rows that fit."""
    keep = [place for place, length in enumerate(lengths) if length <= context]
    if len(keep) < len(examples) and (too_long == "error" or not keep):
        place = next(place for place, length in enumerate(lengths) if length > context)
        raise DataError(
            f"{examples[place]} has {lengths[place]} tokens with {rest}; the context has {context}",
            why="a row must fit into the model's context" if keep else "no row fits into the model's context",
            fix="shorten it, set task.too_long = 'drop', or use a longer context",
        )
    return keep
