"""EnvironmentWriter: an environment as what writes the rows of a recipe.

[rollout.environment] ─> source ─┬─ code, rows, look: checks before a run
                                 └─ wrap, on the sampler's rank ─> EnvironmentEngine
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

from rillflow.app.plugins import brought
from rillflow.app.row_writers import RowWriter, WriterCode, require_columns
from rillflow.errors import DataError, RewardError
from rillflow.rewards.function import FunctionPath, place_of
from rillflow.tasks.encoded import Encoder
from rillflow.tasks.example import Example, answer_text, shown
from rillflow_parts.environments.config import EnvironmentConfig
from rillflow_parts.environments.dataset import environment_rows
from rillflow_parts.environments.pool import EnvironmentPool, Told
from rillflow_parts.environments.source import (
    ENVIRONMENT_REWARD,
    METRICS,
    REWARD,
    TURNS,
    EnvironmentSource,
    parse_environment,
)

if TYPE_CHECKING:
    from rillflow.app.check_report import Report
    from rillflow.app.facts import RecipeFacts
    from rillflow.tasks.files import Rows

_TURNS = 2
_SAYS = "0"


class EnvironmentWriter(RowWriter):
    """The environment of a recipe; see RowWriter."""

    config: EnvironmentConfig
    reward: ClassVar[FunctionPath | None] = REWARD

    @cached_property
    def source(self) -> EnvironmentSource:
        """The class of the environment; see ``parse_environment``."""
        scheme = f"{self.config.source.partition(':')[0]}:"
        adapter = brought(lambda plugin: plugin.environments, "scheme of environments").get(scheme)
        return parse_environment(self.config, self.base, adapter)

    @property
    def code(self) -> WriterCode:
        """The class of the user's, or the adapter to a library; see ``source``."""
        source = self.source
        return WriterCode(
            function=source.path, named=str(source), is_own=source.is_own, modules=source.modules
        )

    def wrap(self, engine: Callable[..., Any], setting: Any, model: Any) -> Callable[..., Any]:
        """See RowWriter."""
        from rillflow_parts.environments.engine import EnvironmentEngine

        return partial(
            EnvironmentEngine,
            inner=engine,
            environment=self.config,
            source=self.source,
            encoder=Encoder.of(model.tokenizer, setting.task),
            stack=setting.site.stack,
        )

    def rows(self, facts: RecipeFacts) -> Rows | None:
        """Return the rows of the environment's own data set, if ``task.source`` names the environment.

        Raises:
            DataError: it has none, they cannot be listed, or code of the recipe is not run.
        """
        if facts.recipe.task.source != self.config.source:
            return None
        if not facts.runs_code:
            raise DataError(
                f"task.source is {self.config.source!r}, and code of the recipe is not run",
                why="only the environment's own code lists its rows",
                fix="run the check without --no-code",
            )
        return environment_rows(self.config, self.source)

    def columns(self, answer: str) -> Mapping[str, object]:
        """See RowWriter."""
        del answer
        return {ENVIRONMENT_REWARD: 0.0, METRICS: {}, TURNS: 1}

    def look(self, facts: RecipeFacts, report: Report) -> None:
        """Check that each row has the columns that ``reset`` needs; reset one environment, and step twice.

        Raises:
            RewardError: a column is missing, or the environment failed.
            RolloutError: the class cannot be loaded.
        """
        if not facts.runs_code:
            return
        source = self.source
        pool = EnvironmentPool(source, self.config)
        try:
            task, name = facts.task, f"{place_of(source.path)}: {source.path.name}.reset"
            require_columns(task, pool.load().required, name)
            report.say("environment", [f"{source}", *_played(pool, task.every_row[0])])
        finally:
            pool.close()


def _played(pool: EnvironmentPool, example: Example) -> list[str]:
    """Return what the environment said to the row's own answer, or to a text."""
    row, lines = pool.begin(json.loads(example.as_json())), list[str]()
    text = answer_text(example.completion or "") or _SAYS
    for turn in range(_TURNS + 1):
        told = _answer(pool, row)
        said = "nothing" if told.observation is None else shown(told.observation)
        if not turn:
            lines.append(f"reset: {said}")
        else:
            over = ", and the episode is over" if told.is_over else ""
            lines.append(f"step({shown(text)}): {said}, reward {told.reward:g}{over}")
        if told.is_over or turn == _TURNS:
            break
        pool.step(row, text, {"role": "assistant", "content": text})
    return lines


def _answer(pool: EnvironmentPool, row: int) -> Told:
    told: list[Told] = []
    while not told:
        told = [each for each in pool.turn(1.0) if each.row == row]
    failed: Any = told[0].failed
    if failed is not None:
        raise RewardError(
            f"{failed[1]}",
            why="it was tried on the first row, as a run does; such a row has no reward in a run",
            fix="fix the class; if the time was too short, raise rollout.environment.timeout_s",
        )
    return told[0]
