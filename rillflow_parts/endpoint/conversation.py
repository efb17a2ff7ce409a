"""Conversation: everything an agent samples under its key, as one row that only grows.

    request ─ starts with the earlier text? ─┬─ yes: only new tokens ─> row ── sampled ──> row
                                             └─ no: refused             mask 0    mask 1

Sampled tokens are never tokenised again: a later request is compared as messages, text or tokens, and only
its new part is encoded.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from threading import Lock
from typing import Any

from rillflow.errors import DataError
from rillflow.records.rollout import Finish, Rollout
from rillflow.rollout.config import SamplingConfig
from rillflow.tasks.encoded import Encoder
from rillflow.tasks.example import Example, shown
from rillflow_parts.endpoint.messages import chat_of, same
from rillflow_parts.endpoint.next_turn import encode_next
from rillflow_parts.endpoint.openai_answers import read_answer, text_of
from rillflow_parts.endpoint.openai_protocol import ChatRequest, SamplingRequest
from rillflow_parts.endpoint.openai_server import encoder_for, prompts_of
from rillflow_parts.endpoint.tool_calls import Answer, ToolFormat, turn_of

_WHY = "a row is one conversation: its tokens stay as sampled, and new tokens are appended"
_FIX = "send the earlier messages and answers unchanged, followed by the new part"


class Conversation:
    """A visitor whose requests form one row.

    Args:
        start: the row as it was added, with its prompt of the data.
        usual: sampling settings.
        encoder: encodes messages and texts.
        tools: format in which the model writes tool calls.
    """

    def __init__(self, start: Rollout, usual: SamplingConfig, encoder: Encoder, tools: ToolFormat) -> None:
        self.start = self.row = start
        """The row as it was added; the row up to the last answer."""
        self.key = secrets.token_urlsafe(24)
        """Key of the agent at the door."""
        self.is_left = False
        """See Visitor; a request of the agent that is still on the way then samples nothing."""
        self.is_begun = self.is_asking = False
        """Whether any token was sampled; whether an answer is in progress."""
        self.since = time.monotonic()
        """Time when the agent began, or received its last answer."""
        self._usual, self._encoder, self._tools = usual, encoder, tools
        self._said: list[dict[str, Any]] | str | None = None
        self._known: list[dict[str, Any]] | tuple[str, ...] = ()
        self._begin, self._has_own_limit = 0, False
        self._answer = Answer(content="")
        self._answered: SamplingRequest | None = None
        self._rendering = self._rendered = ""  # the template's text of the request, of the last answered one
        self._lock = Lock()

    def begin(self, asked: SamplingRequest) -> list[Rollout]:
        """See Visitor; any thread may call it."""
        with self._lock:
            if self.is_asking:
                why, fix = "a row is one conversation", "wait for that answer"
                raise DataError("an answer is being sampled", why=why, fix=fix)
            self._require_usual(asked)
            tokens = self._of_chat(asked) if isinstance(asked, ChatRequest) else self._of_text(asked)
            row = self.row if self.is_begun else Rollout.start(self.row.row, (), self.row.columns)
            self.is_asking, self._begin = True, len(row.tokens) + len(tokens)
            return [row.inserted(tokens)]

    def sampling(self, asked: SamplingRequest) -> SamplingConfig:
        """See Visitor; the recipe's ``max_tokens`` limits the whole row."""
        most = self._usual.max_tokens
        wanted = sum(self.row.loss_mask) + (asked.limit or most)
        self._has_own_limit = wanted < most
        return self._usual.model_copy(update={"max_tokens": min(wanted, most)})

    def over(self, asked: SamplingRequest, rollouts: list[Rollout]) -> None:
        """See Visitor."""
        self.is_asking = False
        for row in rollouts:
            own, tokenizer = row.tokens[self._begin :], self._encoder.tokenizer
            if isinstance(self._said, list):
                self._answer = read_answer(asked, row, self._begin, tokenizer, self._tools)
                self._known = [*self._said, turn_of(self._answer, self._begin)]
                self._answered, self._rendered = asked, self._rendering
            elif self._said is not None:  # the next text may continue with the sampled stop, or without it
                text = text_of(own, asked.stops, tokenizer)
                self._known = (self._said + tokenizer.decode(own), self._said + text)
            self.row = replace(row, finish=Finish.STOP) if self._has_own_limit else row
            self.is_begun, self.since = True, time.monotonic()

    def _of_chat(self, asked: ChatRequest) -> list[int]:
        """Return the new tokens of messages."""
        example, known = chat_of(asked), self._known
        encoder = encoder_for(asked, self._encoder)
        chat = encoder.chat(example, example.turns)
        if not self.is_begun:
            self._said = example.turns
            tokens = encoder.rows([example])[0].prompt.tolist()
            self._rendering = encoder.tokenizer.rendered(chat, opens=True)
            return tokens
        if not isinstance(known, list):
            raise DataError("messages follow a text prompt", why=_WHY, fix=_FIX)
        turns = self._continued(known, asked, example)
        last = self.row.tokens[-1]
        found = encode_next(
            encoder.tokenizer,
            self._rendered,
            self._answer.content or encoder.tokenizer.decode(self.row.tokens[self._begin :]),
            replace(chat, turns=turns),
            is_ended=last in encoder.tokenizer.stop_tokens,
            agrees=self._agrees,
        )
        self._said, self._rendering = turns, found.text
        return found.tokens

    def _continued(
        self, known: list[dict[str, Any]], asked: ChatRequest, example: Example
    ) -> list[dict[str, Any]]:
        """Return the known turns, followed by the new ones of a request that begins with them.

        Raises:
            DataError: it begins with other turns, or has other tools.
        """
        turns = example.turns
        for place, was in enumerate(known):
            now = turns[place] if place < len(turns) else None
            if now is None or not same(now, was):
                what = f"message {place + 1} is {shown(now)}, but was {shown(was)}"
                raise DataError(what, why=_WHY, fix=_FIX)
        assert isinstance(self._answered, ChatRequest), "turns were answered"
        if asked.tools != self._answered.tools:
            what = f"tools are {shown(asked.tools)}, but were {shown(self._answered.tools)}"
            raise DataError(what, why=_WHY, fix="send the same tools with every request")
        return [*known, *turns[len(known) :]]

    def _agrees(self, body: str) -> bool:
        """Return whether the template's text of the last answer says what was sampled."""
        asked = self._answered
        if not isinstance(asked, ChatRequest) or not asked.reads_calls:
            return self._answer.agrees(Answer(content=body))
        tokenizer = self._encoder.tokenizer
        found = self._tools.read(body, asked.tools or (), prompt=self._rendered)
        return self._answer.agrees(replace(found, content=tokenizer.without_special(found.content)))

    def _of_text(self, asked: SamplingRequest) -> list[int]:
        """Return the new tokens of a prompt, which is text or tokens."""
        prompts = prompts_of(asked)
        if len(prompts) > 1:
            raise DataError(f"{len(prompts)} prompts", why="a row is one conversation", fix="send one")
        prompt = prompts[0]
        if not isinstance(prompt, Example):
            self._said, old = None, len(self.row.tokens) if self.is_begun else 0
            if tuple(prompt[:old]) != self.row.tokens[:old]:
                raise DataError(f"the prompt does not begin with the row's {old} tokens", why=_WHY, fix=_FIX)
            return prompt[old:]
        self._said = text = str(prompt.prompt)
        if not self.is_begun:
            return self._encoder.rows([prompt])[0].prompt.tolist()
        for known in self._known:
            if isinstance(known, str) and text.startswith(known):
                rest = text[len(known) :]
                return self._encoder.tokenizer.encode_more(rest, is_rendered=self._encoder.is_rendered)
        what = f"the prompt is {shown(text)}, but does not begin with {shown(next(iter(self._known), None))}"
        raise DataError(what, why=_WHY, fix=_FIX)

    def _require_usual(self, asked: SamplingRequest) -> None:
        """Raise DataError unless the row is sampled with the settings that the trainer assumes."""
        usual, said = self._usual.model_dump(), asked.sampling(self._usual).model_dump()
        if asked.n != 1:
            raise DataError(f"n is {asked.n}", why="a row is one conversation", fix="omit n")
        for name in ("temperature", "top_p", "top_k"):
            if said[name] != usual[name]:
                what = f"{name} is {said[name]}, but this row's is {usual[name]}"
                raise DataError(what, why="the recipe sets how a row is sampled", fix=f"omit {name}")
