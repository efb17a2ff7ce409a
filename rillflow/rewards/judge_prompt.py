"""Frame: the prompt of a judge, a language model: a text with placeholders, and the tokens of its answers.

    {prompt}, {first}, {second} ─ two answers ─> the likelier label: the better answer
    {prompt}, {answer} ───────── one answer ──> the mean of the labels' numbers, weighted by probability

    template ─┬───────────────────────────────────┬─> pieces with placeholders between them ─ label
              └─ chat: as a user's message in the ┘
                 model's chat template, answered

A frame is a section of a recipe, and is saved in a judge's config.json: a loaded judge uses the frame of its
training.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from rillflow.config.load import validate
from rillflow.config.schema import Section
from rillflow.errors import ConfigError

KEPT = "judge_frame"
"""Key of the frame in a model's config.json."""
_PLACES = re.compile(r"\{([a-z]+)\}")
PAIR, ONE = ["prompt", "first", "second"], ["prompt", "answer"]
"""Placeholders of a frame that compares, and of one that rates."""


class FrameConfig(Section):
    """The text that a judge reads, and its answers."""

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
                f"the template has placeholders {places or 'none'}; it needs {PAIR} to compare, or {ONE} to "
                "rate, each once and in this order"
            )
        if self.compares and len(self.labels) != 2:
            raise ValueError(f"a template that compares needs two labels, not {len(self.labels)}")
        if not self.compares:
            self.ratings  # noqa: B018  a label that is not a number raises
        if len({*self.labels}) < max(len(self.labels), 2):
            raise ValueError(f"the labels {self.labels} are not at least two different labels")
        return self

    @property
    def compares(self) -> bool:
        """Whether the frame has two answers."""
        return self.places == PAIR

    @property
    def places(self) -> list[str]:
        """Names of the template's placeholders, in order."""
        return _PLACES.findall(self.template)

    @property
    def ratings(self) -> tuple[float, ...]:
        """Number that each label of a rating stands for.

        Raises:
            ValueError: a label is not a number.
        """
        return tuple(float(label) for label in self.labels)

    def split(self, text: str) -> list[str]:
        """Split a text that contains the template into alternating pieces and placeholder names."""
        return re.split(rf"\{{({'|'.join(self.places)})\}}", text)


RATING = FrameConfig(
    template="Question:\n{prompt}\n\nAnswer:\n{answer}\n\nRate the answer from 1 (wrong or useless) to 5 "
    "(correct and helpful). Reply with the number alone.",
    labels=("1", "2", "3", "4", "5"),
)
"""Frame of a judge over HTTP for which the recipe has none."""


class _Kept(Section):
    """The judge's part of a model's config.json."""

    judge_frame: FrameConfig


def kept_frame(config: Mapping[str, Any]) -> FrameConfig | None:
    """Return the frame in a model's config.json; None if there is none.

    Raises:
        ConfigError: the entry is not a frame.
    """
    found = config.get(KEPT)
    return None if found is None else validate(_Kept, {KEPT: found}, "config.json").judge_frame


def no_frame(model: str | None) -> ConfigError:
    """Return the error for a judge without a frame."""
    return ConfigError(
        f"reward.judge.model is {model!r}, and reward.judge.frame is not set",
        why="a judge that pairwise trained keeps in its directory how it is asked, and this one does not",
        fix='write reward.judge.frame = { template = "... {prompt} ... {answer} ...", labels = ["1", "2"] }',
    )
