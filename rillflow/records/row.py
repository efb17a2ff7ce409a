"""The stable identity of one training sample."""

from __future__ import annotations

from typing import NamedTuple

HELD_OUT_EPOCH = -1
"""The epoch in the row ids of held-out prompts: their random numbers are no training row's."""


class RowId(NamedTuple):
    """(epoch, prompt, sample): the same row has the same id in every process and after every resume.

    Example:
        RowId(epoch=0, prompt=17, sample=3)
    """

    epoch: int
    """How many times the task had been gone through when the row was drawn; see HELD_OUT_EPOCH."""
    prompt: int
    """The prompt's index in its task."""
    sample: int
    """Which of the prompt's samples this is, from 0."""

    @property
    def group(self) -> tuple[int, int]:
        """The sample group of the row: its epoch and its prompt."""
        return self.epoch, self.prompt

    def __str__(self) -> str:
        return f"epoch {self.epoch} prompt {self.prompt} sample {self.sample}"
