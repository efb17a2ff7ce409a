"""Frame: how a judge that is a language model is asked: a text with places, and the tokens it answers with.

    {prompt}, {first}, {second} ─ two answers ─> which label is likelier: which answer is better
    {prompt}, {answer} ───────── one answer ──> the labels' numbers, weighed by how likely they are

    template ─┬─────────────────────────────────────┬─> pieces with places between them ─ label
              └─ chat: as a user's message, by the ─┘
                 model's chat template, answered

A frame is a recipe's section, and what a judge's config.json keeps: whoever loads it asks as in training.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from rillflow.config.load import validate
from rillflow.config.section import Section

KEPT = "judge_frame"
"""What a model's config.json calls its frame."""
_PLACES = re.compile(r"\{([a-z]+)\}")
PAIR, ONE = ["prompt", "first", "second"], ["prompt", "answer"]
"""The places of a frame that compares, and of one that rates."""


class FrameConfig(Section):
    """The text a judge reads, and its answers."""

    template: str = Field(
        "[CONTEXT] {prompt} [RESPONSE A] {first} [RESPONSE B] {second} [BETTER] ",
        description="Text with {prompt}, {first} and {second}, or with {prompt} and {answer}; the judge "
        "continues it with a label.",
    )
    labels: tuple[str, ...] = Field(
        ("A", "B"), description="Labels of one token each: which answer is better, or numbers for a rating."
    )

    chat: bool = Field(
        False,
        description="Whether to send the template as a user message of the chat template; the assistant's "
        "message begins with a label.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        places = _PLACES.findall(self.template)
        if places not in (PAIR, ONE):
            raise ValueError(
                f"the template has the places {places or 'none'}; it has {PAIR} to compare, or {ONE} to "
                "rate, in this order and each once"
            )
        if self.compares and len(self.labels) != 2:
            raise ValueError(f"a template that compares has two labels, not {len(self.labels)}")
        if not self.compares:
            self.ratings  # noqa: B018  a label that is no number raises
        if len({*self.labels}) < max(len(self.labels), 2):
            raise ValueError(f"the labels {self.labels} are not two different ones at least")
        return self

    @property
    def compares(self) -> bool:
        """Whether two answers are read at once."""
        return self.places == PAIR

    @property
    def places(self) -> list[str]:
        """The names of the template's places, in their order."""
        return _PLACES.findall(self.template)

    @property
    def ratings(self) -> tuple[float, ...]:
        """What each label of a rating is worth.

        Raises:
            ValueError: a label is no number.
        """
        return tuple(float(label) for label in self.labels)

    def split(self, text: str) -> list[str]:
        """The pieces of a text that has the template in it, and the names of the places between, by turns."""
        return re.split(rf"\{{({'|'.join(self.places)})\}}", text)


class _Kept(Section):
    """What of a model's config.json is the judge's."""

    judge_frame: FrameConfig


def kept_frame(config: Mapping[str, Any]) -> FrameConfig | None:
    """The frame that a model's config.json keeps; None where there is none.

    Raises:
        ConfigError: there is something else.
    """
    found = config.get(KEPT)
    return None if found is None else validate(_Kept, {KEPT: found}, "config.json").judge_frame
