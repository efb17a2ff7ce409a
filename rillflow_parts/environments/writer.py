"""EnvironmentWriter: an environment as what writes the rows of a recipe.

[rollout.environment] ─> code, rows, look: checks before a run
                      └─ options, on the sampler's rank ─> EnvironmentEngine
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from rillflow.app.plugins import brought
from rillflow.app.row_writers import RowWriter, require_columns
from rillflow.errors import DataError, RewardError
from rillflow.isolation.sandbox import Level
from rillflow.rewards.child import Child, State, next_answers
from rillflow.rewards.function import FunctionPath, place_of
from rillflow.rewards.outcome import Score
from rillflow.tasks.encoded import Encoder
from rillflow.tasks.example import Example, answer_text, shown
from rillflow_parts.environments.config import EnvironmentConfig
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
    from rillflow.models.language_model import LanguageModel
    from rillflow.roles.setting import RoleSetting
    from rillflow.tasks.files import Rows

_TURNS = 2
_SAYS = "0"
_LIST_LIMIT_S = 3600.0  # a data set may be downloaded


class EnvironmentWriter(RowWriter):
    """The environment of a recipe; see RowWriter."""

    config: EnvironmentConfig
    engine: ClassVar[str] = "rillflow_parts.environments.engine:EnvironmentEngine"
    reward: ClassVar[FunctionPath | None] = REWARD

    @cached_property
    def code(self) -> EnvironmentSource:
        """The class of the user's, or the adapter to a library; see ``parse_environment``."""
        scheme = f"{self.config.source.partition(':')[0]}:"
        adapter = brought(lambda plugin: plugin.environments, "scheme of environments").get(scheme)
        return parse_environment(self.config, self.base, adapter)

    def options(self, setting: RoleSetting, model: LanguageModel) -> Mapping[str, Any]:
        """See RowWriter."""
        encoder = Encoder.of(model.tokenizer, setting.task)
        return {"environment": self.config, "source": self.code, "encoder": encoder}

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
        if not self.code.has_rows:
            raise DataError(
                f"task.source is {self.config.source!r}",
                why="only verifiers environments have rows of their own",
                fix="set task.source to a file of prompts",
            )
        return _listed(self.config, self.code)

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
        task, function = facts.task, self.code.function
        with closing(EnvironmentPool(self.code, self.config)) as pool:
            require_columns(task, pool.load().required, f"{place_of(function)}: {function.name}.reset")
            report.say("environment", [self.code.named, *_played(pool, task.every_row[0])])


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


def _listed(config: EnvironmentConfig, source: EnvironmentSource) -> Rows:
    """Return the rows that the adapter's function ``rows`` lists in a child process."""
    rows = FunctionPath(file=source.function.file, name="rows")
    child = Child(rows, memory_bytes=config.memory_bytes, level=Level.NONE)
    try:
        while child.state is State.STARTING:
            next_answers([child])
        with TemporaryDirectory() as folder:
            file = Path(folder) / "rows.jsonl"
            given = {"name": source.named.partition(":")[2], "arguments": config.arguments, "file": str(file)}
            child.send({"type": "run", "rows": 1, "columns": given}, limit_s=_LIST_LIMIT_S)
            answers: list[Any] = []
            while not answers:
                answers = next_answers([child])
            if isinstance(answers[0][1], Score):
                raise DataError(
                    f"the rows of {config.source} cannot be listed",
                    why=answers[0][1].message,
                    fix="name an environment that verifiers can load; rollout.environment.arguments is its "
                    "config",
                )
            return [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    finally:
        child.stop()
