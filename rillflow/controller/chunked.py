"""ChunkedResult: one stage's result in chunks, so that rows of one chunk move on while others are made.

source ── rows in chunks ──> step_executor: a stage of each chunk ──> joined when it is used as a whole
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rillflow.workers.pending import Pending, Work, joined
from rillflow.workers.values import Facts


class ChunkedResult(Pending):
    """One stage's result in chunks, joined when it is used as a whole.

    Args:
        stage: name of the stage.
        count: number of chunks.
        submit: submits the chunks and appends their results to ``chunks``; called at the first use of the
            whole.
        is_partial: whether the chunks are partial sums to be added.
        worked: work of ranks before the result was requested.
    """

    def __init__(
        self,
        stage: str,
        count: int,
        submit: Callable[[], None],
        *,
        is_partial: bool = False,
        worked: Sequence[Facts] = (),
    ) -> None:
        super().__init__(stage, self._joined)
        self.count = count
        self.chunks: list[Pending] = []
        self._submit, self._is_partial, self._worked = submit, is_partial, worked

    @classmethod
    def of(cls, stage: str, chunks: Sequence[Pending], worked: Sequence[Facts] = ()) -> ChunkedResult:
        """Return the result that chunks make up which are submitted already."""
        made = cls(stage, len(chunks), lambda: None, worked=worked)
        made.chunks += chunks
        return made

    def _joined(self) -> Work:
        self._submit()
        return joined(self.stage, self.chunks, is_partial=self._is_partial, worked=self._worked).work
