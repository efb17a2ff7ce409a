"""Plugin: bring math-verify, code-tests, rewards and judges over HTTP, and notes on rewards.

    reward.function, .functions, .url ─ scorers ─> a file of this folder, or text that asks a server
    reward.judge.url ─ service "reward.judge" ───> text that asks a chat endpoint
    settings ─ needs ─> contradictions           rewards, rows ─ look ─> notes of ``check``

Imports nothing heavy. A reward's child loads the file or the text, and nothing else of the part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rillflow.app.plugins import Plugin
from rillflow.errors import RewardError, install_package
from rillflow.rewards.function import FunctionPath

if TYPE_CHECKING:
    from rillflow.app.any_recipe import AnyRecipe
    from rillflow.app.check_report import Report
    from rillflow.app.facts import RecipeFacts
    from rillflow.app.resolved import Resolved
    from rillflow.errors import ConfigError
    from rillflow.rewards.config import JudgeConfig, RewardConfig

CODE_TESTS = FunctionPath(file=Path(__file__).with_name("code_tests.py"), name="code_tests")
"""The function ``code-tests``."""


def math_verify(text: str, _reward: RewardConfig) -> FunctionPath:
    """Return the function ``math-verify``.

    Raises:
        RewardError: the package that it calls is not installed.
    """
    if find_spec("math_verify") is None:
        raise RewardError(
            f"reward.function is {text!r}, and math_verify is not installed",
            why="the function calls it",
            fix=install_package("math"),
        )
    return FunctionPath(file=CODE_TESTS.file.with_name("math_answers.py"), name="math_verify")


def server(text: str, reward: RewardConfig) -> FunctionPath:
    """Return the function that asks the server at an address."""
    from rillflow_parts.scorers.remote import remote_scores

    return remote_scores(text, reward)


def judge() -> Callable[[RewardConfig, JudgeConfig], FunctionPath]:
    """Return the function that makes a judge over HTTP."""
    from rillflow_parts.scorers.remote import remote_judge

    return remote_judge


def needs(resolved: Resolved) -> Iterable[ConfigError]:
    """Yield contradictions between the settings of servers."""
    from rillflow_parts.scorers.server_needs import server_needs

    return server_needs(resolved.recipe)


def look(facts: RecipeFacts | AnyRecipe, report: Report) -> None:
    """Add notes on rewards that compare rows, and on tests that an answer can cheat."""
    from rillflow_parts.scorers.notes import note_scorers

    note_scorers(facts, report)


PLUGIN = Plugin(
    scorers={
        "math-verify": math_verify,
        "code-tests": lambda _text, _reward: CODE_TESTS,
        "http:": server,
        "https:": server,
    },
    services={"reward.judge": judge},
    needs=needs,
    look=look,
)
