"""Plugin: attach ``rillflow ask`` and ``rillflow evaluate``. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rillflow.app.plugins import PARTS, Command, Plugin
from rillflow_parts.answers import commands

if TYPE_CHECKING:
    from rillflow_parts.answers.ask import Respondent


def respondent(run: Path, **how: Any) -> Respondent:
    """Return the model of a run, ready to answer, for ``Run.ask``."""
    from rillflow_parts.answers.ask import Respondent

    return Respondent(run, **how)


HELP = PARTS["answers"]
PLUGIN = Plugin(
    commands={
        "ask": Command(
            help=HELP["ask"], run=commands.ask, add_arguments=commands.ask_arguments, last="prompt"
        ),
        "evaluate": Command(
            help=HELP["evaluate"], run=commands.evaluate, add_arguments=commands.evaluate_arguments
        ),
    },
    services={"answers": lambda: respondent},
)
