"""Columns: turn the columns of a data set into those of a task, by the recipe's settings.

{"question": "6 * 7?", "answer": "#### 42"}
  ─ task.columns = { prompt = "question" } ─> {"prompt": "6 * 7?", "answer": "#### 42"}
{"prompt": "6 * 7?", "model": {"truth": 42}}
  ─ { answer = "model.truth" } ─────────────> {"prompt": "6 * 7?", "answer": 42, "model": {"truth": 42}}
  ─ task.template = "{prompt} Think." ──────> {"prompt": "6 * 7? Think.", ...}
  ─ task.system = "Be brief." ──────────────> {"prompt": [system message, user message], ...}
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rillflow.errors import DataError, nearest
from rillflow.tasks.example import require_column, shown, value_text
from rillflow.tasks.formats import FORMATS

PLACES = re.compile(r"\{\{|\}\}|\{(\w+)\}")
"""Placeholders of a template; two braces stand for one."""


@dataclass(frozen=True, kw_only=True)
class ColumnPlan:
    """How a row's columns are made.

    Example:
        ColumnPlan(named={"prompt": "question"}).applied({"question": "6 * 7?"}) == {"prompt": "6 * 7?"}
    """

    named: Mapping[str, str] = field(default_factory=dict)
    """Column of the data, or a field of one, by column of the task; other columns keep their names."""
    template: str | None = None
    """Text of the prompt, with columns in braces; None: the column ``prompt``."""
    system: str | None = None
    """System message before the prompt, which becomes a conversation; None: there is none."""
    chat: bool = False
    """Whether a prompt that is text becomes a user's message."""
    format: str | None = None
    """Layout of the data, by its name in ``FORMATS``; None: the columns are those of a task."""

    def applied(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a row with the columns of the task.

        Raises:
            DataError: a column that a setting names is missing.
        """
        values = {name: _field(row, given) for name, given in self.named.items()}
        used = set(self.named.values())
        made = {name: value for name, value in row.items() if name not in used} | values
        if self.format is not None:
            made = FORMATS[self.format](made)
        if self.template is not None:
            made["prompt"] = self._filled({**row, **made})
        key = "prompt" if "prompt" in made else "messages"
        prompt = made.get(key)
        if key == "prompt" and isinstance(prompt, str) and prompt and (self.chat or self.system is not None):
            made[key] = prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, list) and self.system is not None:
            made[key] = [{"role": "system", "content": self.system}, *prompt]
        return made

    def given(self, names: Iterable[str]) -> frozenset[str]:
        """Return the data's names of columns that the task has under these names."""
        return frozenset(self.named.get(name, name) for name in names)

    def _filled(self, row: Mapping[str, Any]) -> str:
        """Return the template with the row's values; the items of a list stand on lines of their own."""

        def value(found: re.Match[str]) -> str:
            name = found[1]
            if name is None:
                return found[0][0]
            require_column(row, name)
            here = row[name]
            parts = here if isinstance(here, list) else ["" if here is None else here]
            return "\n".join(map(value_text, parts))

        return PLACES.sub(value, self.template or "")


def _field(row: Mapping[str, Any], name: str) -> Any:
    """Return a column, or a field of it: ``reward_model.ground_truth``."""
    column, *fields = [name] if name in row else name.split(".")
    require_column(row, column)
    value = row[column]
    for number, each in enumerate(fields):
        if value is None:
            return None
        if not isinstance(value, dict) or each not in value:
            raise DataError(
                f"there is no field {each!r} in {'.'.join([column, *fields[:number]])!r}",
                why=f"it has {shown(value)}",
                fix=nearest(each, value) if isinstance(value, dict) else "",
            )
        value = value[each]
    return value
