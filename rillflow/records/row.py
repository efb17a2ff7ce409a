"""Row: the stable identity of one training sample."""

from __future__ import annotations

from typing import NamedTuple

HELD_OUT_EPOCH = -1
"""Epoch in the row ids of held-out prompts; it separates their random numbers from training rows'."""


class RowId(NamedTuple):
    """(epoch, prompt, sample): the same row has the same id in every process and after every resume.

    Example:
        RowId(epoch=0, prompt=17, sample=3)
    """

    epoch: int
    """Number of passes over the task before the row was drawn; see HELD_OUT_EPOCH."""
    prompt: int
    """Index of the prompt in its task."""
    sample: int
    """Index of the sample among the prompt's samples, from 0."""

    @property
    def group(self) -> tuple[int, int]:
        """Sample group of the row: its epoch and its prompt."""
        return self.epoch, self.prompt

    def __str__(self) -> str:
        return f"epoch {self.epoch} prompt {self.prompt} sample {self.sample}"
