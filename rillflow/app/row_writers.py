"""Row writers: what writes rows together with the policy, and the columns that plugins add to rows.

    section of ``Plugin.writers`` ─> RowWriter ─┬─ look, rows, code, reward ─> checks, facts, digests of a run
                                                ├─ columns ──────────────────> trials of reward functions
                                                └─ wrap ─────────────────────> the sampler's engine
    ``Plugin.columns`` ─> RowColumn ─> a value for each row that the sampler returns

A batch has the columns as JSON in its field ``columns``. The run directory records them, and reward functions
get them by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rillflow.app.plugin_sections import section_of
from rillflow.app.plugins import RowColumn, brought, imported
from rillflow.config.schema import Section
from rillflow.errors import DataError, RewardError, nearest
from rillflow.rewards.function import FunctionPath

if TYPE_CHECKING:
    from rillflow.app.check_report import Report
    from rillflow.app.facts import RecipeFacts
    from rillflow.models.language_model import LanguageModel
    from rillflow.roles.setting import RoleSetting
    from rillflow.tasks.files import Rows
    from rillflow.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class WriterCode:
    """The code with which rows are written."""

    function: FunctionPath
    """Function or class, which child processes load."""
    named: str
    """The code as the recipe names it."""
    is_own: bool = True
    """Whether its file is the user's; a run keeps a copy of the source, and a resume compares it."""
    modules: Sequence[str] = ()
    """Further modules that every node must have."""


class RowWriter(ABC):
    """An agent, an environment or another thing that writes rows in turns with the policy.

    Args:
        config: the section of the recipe that turns it on.
        base: the recipe's folder.

    The columns ``FAILED`` and ``LOGGED`` of ``rewards.outcome`` hold a row's failure and its metrics.
    """

    engine: ClassVar[str]
    """``package.module:Class`` of an ``EngineWrapper``, which the sampler's rank imports."""
    reward: ClassVar[FunctionPath | None] = None
    """Reward function of its rows, which is added to the recipe's; None for none."""

    def __init__(self, config: Any, base: Path) -> None:
        self.config, self.base = config, base

    @property
    @abstractmethod
    def code(self) -> WriterCode:
        """The code, found without running it.

        Raises:
            RillflowError: it is not there.
        """

    @abstractmethod
    def options(self, setting: RoleSetting, model: LanguageModel) -> Mapping[str, Any]:
        """Return further arguments of the engine; called on the sampler's rank with the policy's model."""

    def wrap(
        self, inner: Callable[..., Any], setting: RoleSetting, model: LanguageModel
    ) -> Callable[..., Any]:
        """Return what makes its engine around the one that ``inner`` makes; see ``RoleSetting.wraps``."""
        engine = imported(self.engine, f"the engine of {type(self).__name__}")
        return partial(engine, inner=inner, stack=setting.site.stack, **self.options(setting, model))

    @abstractmethod
    def look(self, facts: RecipeFacts, report: Report) -> None:
        """Check the code before a run; see ``Plugin.look``. Run it only if ``facts.runs_code``."""

    def rows(self, facts: RecipeFacts) -> Rows | None:
        """Return the rows that it brings if ``task.source`` names them, else None."""
        del facts
        return None

    def columns(self, answer: str) -> Mapping[str, object]:
        """Return the columns that it adds to a row with this answer, for a trial of a reward function."""
        del answer
        return {}

    def trial_note(self, failure: str) -> str | None:
        """Return a note on a reward function that failed on ``columns``; None to refuse the function."""
        del failure
        return None


def row_writers(recipe: Section, base: Path) -> Mapping[str, RowWriter]:
    """Return what writes the rows of a recipe besides the policy, by the key of its section.

    Args:
        recipe: the settings.
        base: the recipe's folder.

    Raises:
        ConfigError: two plugins bring one key, or the class cannot be imported.
    """
    writers = dict[str, RowWriter]()
    for key, path in sorted(brought(lambda plugin: plugin.writers, "writer of rows").items()):
        section = section_of(recipe, key, Section)
        if section is not None:
            writers[key] = imported(path, f"the writer of rows {key}")(section, base.absolute())
    return writers


def row_columns() -> Mapping[str, RowColumn]:
    """Return the columns that plugins add to rows, by name.

    Raises:
        ConfigError: two plugins bring one name.
    """
    return brought(lambda plugin: plugin.columns, "column of rows")


def require_columns(task: Task, names: Sequence[str], who: str, more: Sequence[str] = ()) -> None:
    """Refuse rows that lack a column which a function needs.

    Args:
        task: the rows.
        names: the columns that it needs.
        who: the function, for the error.
        more: arguments that it gets besides the row's columns.

    Raises:
        RewardError: a row lacks a column.
    """
    for name, row in ((name, row) for name in names for row in task.every_row):
        if name not in row.columns and name not in ("prompt", *more):
            known = sorted({"prompt", *row.columns, *more})
            raise RewardError(
                f"{who} needs {name!r}",
                why=f"{row} provides {', '.join(known)}",
                fix=f"{nearest(name, known)}; or give the parameter a default",
            )


def require_free_columns(task: Task) -> None:
    """Refuse rows that already have a column of a plugin.

    Raises:
        DataError: a row has one.
    """
    added = row_columns()
    for row in task.every_row if added else ():
        taken = sorted(added.keys() & row.columns.keys())
        if taken:
            raise DataError(
                f"{row} has the column {taken[0]!r}",
                why="an installed plugin adds a column of this name to every row that is sampled",
                fix="rename the column of the data, or uninstall the plugin",
            )
