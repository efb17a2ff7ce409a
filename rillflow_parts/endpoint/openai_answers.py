"""OpenAI: write sampled rows as answers of its protocol.

Rollout ─ Choice.next ─> JSON     text before the stop, tool calls; ids, versions, log probabilities
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rillflow.models.token_text import TokenPart, escaped
from rillflow.models.tokenizer import Tokenizer
from rillflow.records.rollout import Finish, Rollout
from rillflow_parts.endpoint.openai_protocol import ChatRequest, CompletionRequest, SamplingRequest
from rillflow_parts.endpoint.text_scores import TextScores
from rillflow_parts.endpoint.tool_calls import Answer, Plain, ToolFormat, call_json


class Choice:
    """One answer, sent whole or in pieces.

    Args:
        asked: the request.
        index: number of the answer.
        begin: the row before sampling.
        tokenizer: tokeniser of the model.
        tools: format of tool calls.
    """

    def __init__(
        self, asked: SamplingRequest, index: int, begin: Rollout, tokenizer: Tokenizer, tools: ToolFormat
    ) -> None:
        self._asked, self._index, self._prompt, self._tokenizer = asked, index, begin.tokens, tokenizer
        self._tools = tools
        self._held = max(map(len, asked.stops), default=1) - 1
        self.count, self._characters, self._calls, self._is_begun = 0, 0, 0, False
        """Number of tokens sent so far."""

    def next(self, rollout: Rollout, *, is_over: bool, scores: TextScores | None = None) -> dict[str, Any]:
        """Return the new part of the answer as JSON: all of it in the first call.

        Args:
            rollout: the row so far.
            is_over: whether the row has ended.
            scores: log probabilities of the whole row, if the request wants those of its prompt.
        """
        first, begin = not self._is_begun, len(self._prompt) + self.count
        self._is_begun = True
        answer = read_answer(
            self._asked, rollout, len(self._prompt), self._tokenizer, self._tools, is_over=is_over
        )
        text = answer.content
        if not is_over:  # hold back a possible stop prefix
            text = text[: max(self._characters, len(text) - self._held)]
        new, self._characters = text[self._characters :], max(self._characters, len(text))
        self.count = len(rollout.tokens) - len(self._prompt)
        told: dict[str, Any] = {"index": self._index}
        finish = {Finish.STOP: "stop", Finish.LENGTH: "length"}
        told["finish_reason"] = finish[rollout.finish] if is_over else None
        if isinstance(self._asked, CompletionRequest):
            is_echoed = first and self._asked.echo
            told["text"] = self._tokenizer.decode(self._prompt) + new if is_echoed else new
        else:
            told["delta" if self._asked.stream else "message"] = self._message(answer, new, first)
            if is_over and answer.calls and rollout.finish == Finish.STOP:
                told["finish_reason"] = "tool_calls"
        told["logprobs"] = self._logprobs(rollout, begin) if scores is None else self._all(rollout, scores)
        if self._asked.return_token_ids:
            told |= {"prompt_token_ids": list(self._prompt)} if first else {}
            told |= {"token_ids": list(rollout.tokens[begin:]), "versions": list(rollout.versions[begin:])}
        return told

    def _message(self, answer: Answer, new: str, is_first: bool) -> dict[str, Any]:
        """Return the new part of a message: a delta has its role once, and each call once, whole."""
        calls = answer.calls[self._calls :]
        made = [
            {"index": self._calls + place, **call_json(call, len(self._prompt), self._calls + place)}
            for place, call in enumerate(calls)
        ]
        self._calls = len(answer.calls)
        told: dict[str, Any] = {"role": "assistant"} if is_first or not self._asked.stream else {}
        told["content"] = new or (None if made else "")
        if answer.reasoning:
            told["reasoning_content"] = answer.reasoning
        if made and not self._asked.stream:
            made = [{name: value for name, value in call.items() if name != "index"} for call in made]
        return told | ({"tool_calls": made} if made else {})

    def _all(self, rollout: Rollout, scores: TextScores) -> dict[str, Any]:
        """Return the log probabilities of prompt and answer, with the likeliest token at each place."""
        own, best = (
            [escaped(content) for content in self._tokenizer.token_bytes(tokens, special=True)]
            for tokens in (rollout.tokens[1:], scores.likeliest)
        )
        pairs = zip(own, scores.logprobs, best, scores.highest, strict=True)
        tops = [{token: value, likeliest: highest} for token, value, likeliest, highest in pairs]
        return self._places(rollout, 0) | {
            "token_logprobs": [None, *scores.logprobs],
            "top_logprobs": [None, *tops],
        }

    def _logprobs(self, rollout: Rollout, begin: int) -> dict[str, Any] | None:
        asked, values = self._asked, list(rollout.logprobs[begin:])
        if isinstance(asked, CompletionRequest) and asked.logprobs is not None:
            return self._places(rollout, begin) | {"token_logprobs": values, "top_logprobs": None}
        if isinstance(asked, ChatRequest) and asked.logprobs:
            told = [
                {
                    "token": escaped(part.content),
                    "logprob": value,
                    "bytes": [*part.content],
                    "top_logprobs": [],
                }
                for part, value in zip(self._answer_parts(rollout, begin), values, strict=True)
            ]
            return {"content": told}
        return None

    def _answer_parts(self, rollout: Rollout, begin: int) -> list[TokenPart]:
        """Return the parts of an answer's tokens from place ``begin`` of the row on."""
        length = len(self._prompt)
        return self._tokenizer.parts(rollout.tokens[length:])[begin - length :]

    def _places(self, rollout: Rollout, begin: int) -> dict[str, Any]:
        """Return tokens and their places in the text; the prompt counts if the text has it."""
        prompt, before = list[TokenPart](), 0
        if isinstance(self._asked, CompletionRequest) and self._asked.echo:
            prompt = self._tokenizer.parts(self._prompt)[begin:]
            before = len(self._tokenizer.decode(self._prompt))
        answer = self._answer_parts(rollout, max(begin, len(self._prompt)))
        return {
            "tokens": [escaped(part.content) for part in (*prompt, *answer)],
            "text_offset": [*(part.begin for part in prompt), *(before + part.begin for part in answer)],
        }


def read_answer(
    asked: SamplingRequest,
    rollout: Rollout,
    begin: int,
    tokenizer: Tokenizer,
    tools: ToolFormat,
    *,
    is_over: bool = True,
) -> Answer:
    """Return what a row says from place ``begin`` on: text before the first stop text, and tool calls."""
    own = rollout.tokens[begin:]
    if not asked.reads_calls or isinstance(tools, Plain):
        return Answer(content=_before(_text(own, tokenizer, is_over=is_over), asked.stops))
    assert isinstance(asked, ChatRequest), "only conversations have tools"
    text = _before(_text(own, tokenizer, is_over=is_over, special=True), asked.stops)
    prompt = tokenizer.decode(rollout.tokens[:begin], special=True) if is_over else ""
    found = tools.read(text, asked.tools or (), prompt=prompt, is_over=is_over)
    calls = found.calls if asked.parallel_tool_calls else found.calls[:1]
    return replace(found, content=tokenizer.without_special(found.content), calls=calls)


def text_of(tokens: Sequence[int], stops: Sequence[str], tokenizer: Tokenizer) -> str:
    """Return the text of an answer, before the first stop text."""
    return _before(tokenizer.decode(tokens), stops)


def _text(tokens: Sequence[int], tokenizer: Tokenizer, *, is_over: bool, special: bool = False) -> str:
    return (tokenizer.decode if is_over else tokenizer.settled_text)(tokens, special=special)


def _before(text: str, stops: Sequence[str]) -> str:
    return text[: min((found for stop in stops if (found := text.find(stop)) >= 0), default=None)]


def envelope(asked: SamplingRequest, name: str, model: str, version: int, **more: Any) -> dict[str, Any]:
    """Return the answer object around choices; ``version`` is that of the newest weights."""
    kind = asked.kind + ".chunk" * (asked.stream and asked.kind == ChatRequest.kind)
    about = {"id": name, "object": kind, "created": int(time.time()), "model": model}
    return {**about, "system_fingerprint": f"version {version}", **more}
