"""OpenAI: write sampled rows as answers of its protocol.

Rollout ─ Choice.next ─> JSON     text before the stop, tool calls; ids, versions, log probabilities
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from rillflow.models.tokenizer import Tokenizer
from rillflow.records.rollout import Finish, Rollout
from rillflow.serving.openai_protocol import ChatRequest, CompletionRequest, SamplingRequest
from rillflow.serving.text_scores import TextScores
from rillflow.serving.tool_calls import Answer, Plain, ToolCall, ToolFormat


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
        new, self._characters = text[self._characters :], len(text)
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
        pieces = self._tokenizer.pieces(rollout.tokens)
        top: list[dict[str, float] | None] = [None]
        likeliest = self._tokenizer.pieces(scores.likeliest)
        for own, value, best, highest in zip(
            pieces[1:], scores.logprobs, likeliest, scores.highest, strict=True
        ):
            top.append({own: value, best: highest})
        return {
            "tokens": pieces,
            "token_logprobs": [None, *scores.logprobs],
            "text_offset": _offsets(pieces),
            "top_logprobs": top,
        }

    def _logprobs(self, rollout: Rollout, begin: int) -> dict[str, Any] | None:
        asked = self._asked
        pieces, values = self._tokenizer.pieces(rollout.tokens[begin:]), list(rollout.logprobs[begin:])
        if isinstance(asked, CompletionRequest) and asked.logprobs is not None:
            told = {"tokens": pieces, "token_logprobs": values, "text_offset": _offsets(pieces)}
            return {**told, "top_logprobs": None}
        if isinstance(asked, ChatRequest) and asked.logprobs:
            both = zip(pieces, values, strict=True)
            return {
                "content": [
                    {"token": piece, "logprob": value, "bytes": list(piece.encode()), "top_logprobs": []}
                    for piece, value in both
                ]
            }
        return None


def _offsets(pieces: Sequence[str]) -> list[int]:
    return [*accumulate(map(len, pieces[:-1]), initial=0)][: len(pieces)]


def call_json(call: ToolCall, begin: int, place: int) -> dict[str, Any]:
    """Return a call as the protocol writes it.

    Args:
        call: the call.
        begin: place of the answer's first token in its row; calls of later answers have other ids.
        place: number of the call in its answer.
    """
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{begin}_{place}", "type": "function", "function": function}


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
        text = text_of(own, asked.stops, tokenizer)
        return Answer(content=text if is_over else text.removesuffix("\ufffd"))
    assert isinstance(asked, ChatRequest), "only conversations have tools"
    text = _before(tokenizer.decode(own, special=True), asked.stops)
    if not is_over:  # half a character
        text = text.removesuffix("\ufffd")
    prompt = tokenizer.decode(rollout.tokens[:begin], special=True)
    found = tools.read(text, asked.tools or (), prompt=prompt, is_over=is_over)
    calls = found.calls if asked.parallel_tool_calls else found.calls[:1]
    return replace(found, content=tokenizer.without_special(found.content), calls=calls)


def text_of(tokens: Sequence[int], stops: Sequence[str], tokenizer: Tokenizer) -> str:
    """Return the text of an answer, before the first stop text."""
    return _before(tokenizer.decode(tokens), stops)


def _before(text: str, stops: Sequence[str]) -> str:
    return text[: min((found for stop in stops if (found := text.find(stop)) >= 0), default=None)]


def envelope(asked: SamplingRequest, name: str, model: str, version: int, **more: Any) -> dict[str, Any]:
    """Return the answer object around choices; ``version`` is that of the newest weights."""
    kind = asked.kind + ".chunk" * (asked.stream and asked.kind == ChatRequest.kind)
    about = {"id": name, "object": kind, "created": int(time.time()), "model": model}
    return {**about, "system_fingerprint": f"version {version}", **more}
