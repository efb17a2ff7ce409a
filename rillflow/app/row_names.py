"""Row names: replace row ids in an error by lines of the user's file.

    row (epoch -1 prompt 197 sample 0) ──> row (prompts.jsonl line 198, held out, sample 0)

Ranks have row ids only. The task, which stays with the controller, has each row's place in the data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from rillflow.errors import RillflowError
from rillflow.records.row import HELD_OUT_EPOCH
from rillflow.tasks.task import Task

_ID = re.compile(r"epoch (-?\d+) prompt (\d+) sample (-?\d+)")


@contextmanager
def rows_named(task: Task) -> Iterator[None]:
    """Replace row ids by places in the data, in errors that leave this context."""
    try:
        yield
    except RillflowError as error:
        error.what, error.why = (
            _ID.sub(lambda found: _name(found, task), text) for text in (error.what, error.why)
        )
        raise


def _name(found: re.Match[str], task: Task) -> str:
    epoch, prompt, sample = map(int, found.groups())
    rows = task.held_out if epoch == HELD_OUT_EPOCH else task.train
    place = next((row.place for row in rows if row.index == prompt), "")
    which = "held out" if epoch == HELD_OUT_EPOCH else f"epoch {epoch}"
    return f"{place}, {which}, sample {sample}" if place else found[0]
