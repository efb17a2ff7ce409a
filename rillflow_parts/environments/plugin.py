"""Plugin: bring adapters to the environments of verifiers and OpenEnv. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path

from rillflow.app.plugins import Plugin
from rillflow_parts.environments.adapter import EnvironmentAdapter

_FOLDER = Path(__file__).resolve().parent
PLUGIN = Plugin(
    sections={"rollout.environment": "rillflow_parts.environments.config:EnvironmentConfig"},
    writers={"rollout.environment": "rillflow_parts.environments.writer:EnvironmentWriter"},
    environments={
        "verifiers:": EnvironmentAdapter(
            file=_FOLDER / "verifiers_adapter.py",
            name="VerifiersEnvironment",
            argument="name",
            module="verifiers",
            package="verifiers",
            example="verifiers:wordle",
            has_rows=True,
            names_module=True,
        ),
        "openenv:": EnvironmentAdapter(
            file=_FOLDER / "openenv_adapter.py",
            name="OpenEnvironment",
            argument="url",
            module="openenv",
            package="openenv-core",
            example="openenv:http://127.0.0.1:8000",
        ),
    },
)
