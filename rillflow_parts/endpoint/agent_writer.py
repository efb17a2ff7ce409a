"""AgentWriter: an agent as what writes the rows of a recipe.

[rollout.agent] ─> code, look: checks before a run
                └─ options, on the sampler's rank ─> AgentEngine
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

from rillflow.app.code_checks import execution_notes
from rillflow.app.row_writers import RowWriter, WriterCode, require_columns
from rillflow.errors import ConfigError, install_package
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import parse_files, parse_function, place_of
from rillflow.rewards.outcome import RETURNED
from rillflow.rewards.text_execution import is_shut_in
from rillflow.rewards.workers import RewardWorkers
from rillflow.tasks.encoded import Encoder
from rillflow_parts.endpoint.config import AgentConfig

if TYPE_CHECKING:
    from rillflow.app.check_report import Report
    from rillflow.app.facts import RecipeFacts
    from rillflow.models.language_model import LanguageModel
    from rillflow.roles.setting import RoleSetting

GIVEN = ("base_url", "api_key")
"""Arguments that an agent receives in addition to its row's columns."""
_SANDBOX = "rollout.agent.sandbox"


class AgentWriter(RowWriter):
    """The agent of a recipe; see RowWriter."""

    config: AgentConfig
    engine: ClassVar[str] = "rillflow_parts.endpoint.agents:AgentEngine"

    @cached_property
    def code(self) -> WriterCode:
        """The agent's function.

        Raises:
            RewardError: there is no such function.
            ConfigError: a package that serves the policy to the agent is not installed.
        """
        agent = self.config
        if not all(map(find_spec, ("starlette", "uvicorn"))):
            raise ConfigError(
                f"rollout.agent.function is {agent.function!r}, and starlette or uvicorn is not installed",
                why="an agent calls the policy over HTTP",
                fix=install_package("service"),
            )
        files = parse_files(agent.files, self.base, "rollout.agent.files")
        function = replace(parse_function(agent.function, self.base, "agent"), files=files)
        return WriterCode(function=function, named=str(function))

    def options(self, setting: RoleSetting, model: LanguageModel) -> Mapping[str, Any]:
        """See RowWriter."""
        encoder = Encoder.of(model.tokenizer, setting.task)
        return {"agent": self.config, "function": self.code.function, "encoder": encoder}

    def look(self, facts: RecipeFacts, report: Report) -> None:
        """Load the agent in a child process, and check that each row has the columns it needs.

        Raises:
            RewardError: a column is missing, or the function cannot be loaded.
        """
        function, agent = self.code.function, self.config
        if not facts.runs_code:
            report.notes += execution_notes(function, _SANDBOX, agent.sandbox, level=None)
            return
        is_shut = is_shut_in(function, agent.sandbox, unless_harmless=False)
        held = RewardConfig(workers=1, memory_bytes=agent.memory_bytes, sandbox=is_shut)
        with RewardWorkers(function, held) as workers:
            required = workers.load().required
            report.notes += execution_notes(function, _SANDBOX, agent.sandbox, workers.level)
        require_columns(facts.task, required, f"{place_of(function)}: the agent {function.name}", GIVEN)

    def columns(self, answer: str) -> Mapping[str, object]:
        """See RowWriter; a text stands for what the agent returns."""
        return {RETURNED: answer}

    def trial_note(self, failure: str) -> str:
        """See RowWriter."""
        return (
            f"failed where the column {RETURNED!r} held a text: {failure}. "
            "If it reads what the agent returns, only a run can try it"
        )
