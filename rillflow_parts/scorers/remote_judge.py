"""Remote judge: a language model behind an OpenAI-compatible chat endpoint rates answers, or compares them.

    rate:     prompt and answer ─ POST /chat/completions ─> last label in the reply ─> its number
    compare:  pairs of answers to one prompt, in both orders ─ POST ─> A or B ─> share of wins

A reply without a label is an error of its row; a row without any comparison abstains.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from rillflow_parts.scorers.json_requests import HttpAddress


class RemoteJudge:
    """A reward function that asks a chat endpoint.

    Args:
        pieces: the template, split into texts and placeholder names, alternating.
        labels: labels of the judge's answers; the first says that the first answer is better.
        compares: whether the template has two answers.
        abstain: least distance from 1/2 at which a comparison counts.
        asked: further keys of the request, such as ``model``.
        address: settings of an ``HttpAddress``.
    """

    def __init__(
        self,
        *,
        pieces: Sequence[str],
        labels: Sequence[str],
        compares: bool,
        abstain: float,
        asked: dict[str, Any],
        **address: Any,
    ) -> None:
        self._pieces, self._labels, self._compares = pieces, labels, compares
        self._abstain, self._asked, self._address = abstain, asked, HttpAddress(**address)
        longest_first = sorted(labels, key=len, reverse=True)
        self._label = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")

    def __call__(self, prompts: Sequence[object], completions: Sequence[object]) -> list[object]:
        """Return a score, None or an exception for each row."""
        asked = [_text(each) for each in prompts]
        answers = [_text(each, is_answer=True) for each in completions]
        if not self._compares:
            bodies = [
                self._body({"prompt": prompt, "answer": answer})
                for prompt, answer in zip(asked, answers, strict=True)
            ]
            found = [self._read(reply) for reply in self._address.post_all(bodies)]
            return [float(each) if isinstance(each, str) else each for each in found]
        groups: dict[str, list[int]] = {}
        for place, each in enumerate(asked):
            groups.setdefault(each, []).append(place)
        pairs = [pair for group in groups.values() for pair in combinations(group, 2)]
        bodies = [
            self._body({"prompt": asked[i], "first": answers[first], "second": answers[second]})
            for i, j in pairs
            for first, second in ((i, j), (j, i))
        ]
        return self._standings(
            pairs, [self._read(reply) for reply in self._address.post_all(bodies)], len(asked)
        )

    def _standings(
        self, pairs: Sequence[tuple[int, int]], said: Sequence[str | Exception], rows: int
    ) -> list[object]:
        """Return each row's mean probability to win; an error if none of its comparisons was answered."""
        wins: list[list[float]] = [[] for _ in range(rows)]
        errors: dict[int, Exception] = {}
        for (i, j), one, other in zip(pairs, said[::2], said[1::2], strict=True):
            failed = next((each for each in (one, other) if isinstance(each, Exception)), None)
            if failed is not None:
                errors |= {i: failed, j: failed}
                continue
            likely = ((one == self._labels[0]) + (other == self._labels[1])) / 2
            if abs(likely - 0.5) >= self._abstain:
                wins[i].append(likely)
                wins[j].append(1 - likely)
        return [sum(found) / len(found) if found else errors.get(place) for place, found in enumerate(wins)]

    def _body(self, texts: dict[str, str]) -> dict[str, Any]:
        content = "".join(texts[piece] if place % 2 else piece for place, piece in enumerate(self._pieces))
        return {**self._asked, "messages": [{"role": "user", "content": content}]}

    def _read(self, reply: Any) -> str | Exception:
        """Return the last label in a reply, or why there is none."""
        if isinstance(reply, Exception):
            return reply
        try:
            content = str(reply["choices"][0]["message"]["content"] or "")
        except (LookupError, TypeError):
            return ValueError(f"{self._address.url} sent no chat completion: {str(reply)[:200]}")
        labels = self._label.findall(content)
        if not labels:
            return ValueError(
                f"the judge wrote none of the labels {', '.join(self._labels)}: {content[-200:]!r}"
            )
        return str(labels[-1])


def _text(value: Any, *, is_answer: bool = False) -> str:
    """Return a text, or the messages of a conversation, one line each; of an answer only the content."""
    if isinstance(value, str):
        return value
    turns = [(turn.get("role", ""), turn.get("content") or "") for turn in value]
    texts = [
        (role, content if isinstance(content, str) else "".join(part.get("text", "") for part in content))
        for role, content in turns
    ]
    if is_answer:
        return texts[-1][1]
    return "\n".join(f"{role}: {content}" for role, content in texts)
