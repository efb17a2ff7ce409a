"""Episode: one row that the policy and an environment write in turns.

    reset ─ text ──────> prompt + text             ─┐
          ─ messages ──> the messages               ├─> tokens, mask 0 ─> sampled, mask 1 ─> step(text) ─┐
          ─ None ──────> prompt                    ─┘            ^                                       │
                                                                 └── observation: text or messages <─────┘

A row is text, or messages with a chat template. Sampled tokens are never tokenised again: in a text an
observation is encoded alone; in a conversation the template's text after the answer is.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rillflow.errors import DataError
from rillflow.models.tokenizer import Chat
from rillflow.records.rollout import Finish, Rollout
from rillflow.rewards.outcome import FAILED, LOGGED, RETURNED, Outcome
from rillflow.rollout.config import SamplingConfig
from rillflow.tasks.encoded import Encoder
from rillflow.tasks.example import TEMPLATE_ARGUMENTS, Example, prompt_of
from rillflow_parts.endpoint.next_turn import encode_next
from rillflow_parts.endpoint.tool_calls import Answer, Plain, ToolFormat, call_json, turn_of
from rillflow_parts.environments.pool import Told
from rillflow_parts.environments.source import ENVIRONMENT_REWARD, METRICS, TURNS


class Episode:
    """A row, from its prompt to its end.

    Args:
        start: the row as it was added, with its prompt of the data.
        sampling: sampling settings; ``max_tokens`` limits all turns together.
        encoder: encodes messages.
        encode: returns the tokens of a text in the middle of a row.
        tools: format in which the model writes tool calls.
        context: maximum tokens of a row.
        max_turns: turns after which the row ends.
    """

    def __init__(
        self,
        start: Rollout,
        sampling: SamplingConfig,
        encoder: Encoder,
        *,
        encode: Callable[[str], Sequence[int]],
        tools: ToolFormat,
        context: int,
        max_turns: int,
    ) -> None:
        self.start = self.row = start
        """The row as it was added; the row so far."""
        self.sampling = sampling
        """Sampling settings."""
        self.columns: dict[str, Any] = json.loads(start.columns)
        """The prompt and the other columns."""
        self.since = time.monotonic()
        """Time of the open call of the environment."""
        self._encoder, self._encode, self._context, self._max_turns = encoder, encode, context, max_turns
        self._format, self._answer, self._rendered = tools, Answer(content=""), ""
        self._turns: list[dict[str, Any]] | None = None
        self._tools: list[dict[str, Any]] | None = self.columns.get("tools")
        self._count, self._reward, self._acted_s = 0, 0.0, 0.0
        self._metrics: Mapping[str, float] = {}
        self._finish = Finish.LENGTH

    @property
    def environment_s(self) -> float:
        """Mean seconds of the environment's steps; infinity before the first."""
        return self._acted_s / self._count if self._count else math.inf

    def begin(self, told: Told) -> Rollout:
        """Return the row to sample after ``reset``.

        Raises:
            DataError, ModelError: its messages are invalid, or its text cannot be encoded.
        """
        said, prompt = told.observation or None, self.columns["prompt"]
        self._tools, self._metrics = told.tools or self._tools, told.metrics
        if isinstance(said, str) and isinstance(prompt, str):
            self.row = self.start.inserted(self._encode(said))
        elif not isinstance(prompt, str) or said is not None:
            turns = said if isinstance(said, list) else _joined(prompt, said or "")
            example = self._conversation(turns)
            self._turns = example.turns
            self._rendered = self._encoder.tokenizer.rendered(self._chat(self._turns), opens=True)
            if said is not None:
                tokens = self._encoder.rows([example])[0].prompt.tolist()
                self.row = Rollout.start(self.start.row, tokens, self.start.columns)
        self._require_room()
        return self.row

    def answered(self, row: Rollout) -> str:
        """Append the policy's turn to the row; return its text."""
        own = row.tokens[len(self.row.tokens) :]
        self._begin = len(self.row.tokens)
        self.row, self._count, self.since = row, self._count + 1, time.monotonic()
        text = self._encoder.tokenizer.decode(own)
        self._answer = Answer(content=text)
        if self._turns is not None and self._tools and not isinstance(self._format, Plain):
            self._answer = self._read(self._encoder.tokenizer.decode(own, special=True))
        return text

    def message(self) -> dict[str, Any]:
        """Return the policy's turn as a message of the assistant, with its tool calls."""
        calls = [call_json(call, self._begin, place) for place, call in enumerate(self._answer.calls)]
        message = {"role": "assistant", "content": self._answer.content}
        return {**message, "tool_calls": calls} if calls else message

    def _read(self, text: str) -> Answer:
        """Return what a text of the template says."""
        tokenizer = self._encoder.tokenizer
        found = self._format.read(text, self._tools or (), prompt=self._rendered)
        return replace(found, content=tokenizer.without_special(found.content))

    def observed(self, told: Told) -> Rollout | None:
        """Append an observation; return the row to sample on, None if it has ended.

        Raises:
            DataError, ModelError: see ``begin``.
        """
        self._reward += told.reward
        self._acted_s += time.monotonic() - self.since
        self._metrics = told.metrics or self._metrics
        self._tools = told.tools or self._tools
        if told.is_over:
            self._finish = Finish.STOP
            return None
        is_full = sum(self.row.loss_mask) >= self.sampling.max_tokens
        if not is_full and self._count < self._max_turns:
            longer = self.row.inserted(self._next(told.observation))
            if len(longer.tokens) < self._context:
                self.row = longer
                return longer
        return None

    def drop_cache(self) -> None:
        """Forget the row's KV cache, so that it is computed again."""
        self.row = replace(self.row, cache=None)

    def ended(self) -> Rollout:
        """Return the row of an episode that has ended, with its reward in the columns."""
        more = {ENVIRONMENT_REWARD: self._reward, METRICS: dict(self._metrics), TURNS: self._count}
        more[LOGGED] = {name: (value, 1) for name, value in {**self._metrics, TURNS: self._count}.items()}
        columns = json.dumps({**self.columns, **more})
        return replace(self.row, finish=self._finish, cache=None, columns=columns)

    def failed(self, outcome: Outcome, why: str) -> Rollout:
        """Return the row of an episode that has failed."""
        columns = {**self.columns, RETURNED: None, FAILED: (outcome, why)}
        return replace(self.row, finish=Finish.LENGTH, cache=None, columns=json.dumps(columns))

    def _next(self, said: str | list[dict[str, Any]] | None) -> list[int]:
        """Return the tokens between the policy's turn and its next one."""
        if self._turns is None:
            if isinstance(said, list):
                raise DataError(
                    "the environment said messages in a row of text",
                    why="a row is text or a conversation from its start",
                    fix="return text, or begin with messages",
                )
            return [*self._encode(said)] if said else []
        more = said if isinstance(said, list) else [{"role": "user", "content": said or ""}]
        tokenizer, own = self._encoder.tokenizer, self.row.tokens[self._begin :]
        later = self._conversation([*self._turns, turn_of(self._answer, self._begin), *more]).turns
        has_calls = bool(self._tools) and not isinstance(self._format, Plain)
        found = encode_next(
            tokenizer,
            self._rendered,
            self._answer.content or tokenizer.decode(own),
            self._chat(later),
            is_ended=own[-1] in tokenizer.stop_tokens,
            agrees=lambda body: self._answer.agrees(self._read(body) if has_calls else Answer(content=body)),
        )
        self._turns, self._rendered = later, found.text
        return found.tokens

    def _chat(self, turns: Sequence[Mapping[str, Any]]) -> Chat:
        return self._encoder.chat(self._conversation([*turns]), turns)

    def _conversation(self, turns: list[Any]) -> Example:
        columns = {"prompt": turns, "tools": self._tools}
        if (arguments := self.columns.get(TEMPLATE_ARGUMENTS)) is not None:
            columns[TEMPLATE_ARGUMENTS] = arguments
        return Example(index=0, prompt=prompt_of(columns), columns=columns, place="the episode")

    def _require_room(self) -> None:
        if len(self.row.tokens) >= self._context:
            raise DataError(
                f"the row begins with {len(self.row.tokens):,} tokens",
                why=f"the context is {self._context:,} tokens, and the policy needs room for one at least",
                fix="shorten the first observation, or use a longer context",
            )


def _joined(prompt: list[dict[str, Any]], said: str) -> list[dict[str, Any]]:
    """Return the messages of a prompt, with a text after the last message of the user."""
    if said and prompt[-1]["role"] == "user" and isinstance(prompt[-1]["content"], str):
        return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + said}]
    return [*prompt, {"role": "user", "content": said}] if said else [*prompt]
