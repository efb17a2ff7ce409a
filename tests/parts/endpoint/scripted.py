"""An engine that says given texts, for tests of what happens around an answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from rillflow.models.tokenizer import Tokenizer
from rillflow.records.rollout import Finish, Rollout
from rillflow.records.row import RowId
from rillflow.rollout.config import SamplingConfig
from rillflow.rollout.engine import Capability


class ScriptedEngine:
    """Answers the rows, in the order in which they are added, with ``answers`` and an end token.

    Args:
        tokenizer: tokeniser of the texts.
    """

    can: ClassVar = frozenset(Capability)

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.answers = deque[str]()
        """Texts of the next answers; special tokens in them are read as such."""
        self.added = list[Rollout]()
        """Every row as it was added."""
        self._tokenizer, self._version = tokenizer, 0
        self._rows: dict[RowId, tuple[Rollout, deque[int], int]] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._rows)

    def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        self._version = version

    def add(self, rollout: Rollout, sampling: SamplingConfig | None = None) -> None:
        assert sampling is not None
        self.added.append(rollout)
        text = self.answers.popleft()
        tokens = self._tokenizer.encode_more(text, is_rendered=True)
        left = deque([*tokens, min(self._tokenizer.stop_tokens)])
        self._rows[rollout.row] = (rollout, left, sampling.max_tokens)

    def step(self) -> list[Rollout]:
        ended = []
        for row, (rollout, left, room) in [*self._rows.items()]:
            token = left.popleft()
            finish = Finish.ABORTED if left else Finish.STOP
            made = rollout.sampled([token], [-0.5], self._version, finish)
            if left and sum(made.loss_mask) >= room:
                made = made.first(len(made.tokens), Finish.LENGTH)
            self._rows[row] = (made, left, room)
            if made.finish != Finish.ABORTED:
                ended.append(self._rows.pop(row)[0])
        return ended

    def abort(self, row: RowId) -> Rollout:
        return self._rows.pop(row)[0]

    def look(self, row: RowId) -> Rollout:
        return self._rows[row][0]
