"""Settings of the trackers: shipped ones by name, and your own with ``class``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from rillflow.config.load import validate
from rillflow.config.schema import Section
from rillflow.errors import ConfigError, nearest

CLASS = "class"
"""Setting that names the class of a tracker of your own."""


class TrackerConfig(Section):
    """Settings that every tracker has."""

    wait_s: float = Field(
        60.0,
        ge=0,
        description="Longest wait at the end of the run, in seconds, until the tracker has everything.",
    )
    samples: int = Field(
        0, ge=0, description="Rollouts of each recorded step that are sent as a table; 0 for none."
    )


class WandbConfig(TrackerConfig):
    """Weights & Biases."""

    project: str | None = Field(None, min_length=1, description="Project; left out, WANDB_PROJECT.")
    entity: str | None = Field(None, min_length=1, description="User or team; left out, the key's.")
    name: str | None = Field(None, min_length=1, description="Run name; left out, the run directory's.")
    group: str | None = Field(None, min_length=1, description="Group, such as the runs of a sweep.")
    mode: Literal["online", "offline"] = Field(
        "online", description="offline writes files below the run directory, for wandb sync."
    )


class TensorBoardConfig(TrackerConfig):
    """TensorBoard."""

    folder: str | None = Field(
        None, min_length=1, description="Folder of the event files; left out, RUN/trackers/tensorboard."
    )


class MlflowConfig(TrackerConfig):
    """MLflow."""

    uri: str | None = Field(
        None,
        min_length=1,
        description="Tracking server, or store such as sqlite:///mlflow.db; left out, MLFLOW_TRACKING_URI.",
    )
    experiment: str | None = Field(
        None, min_length=1, description="Experiment; left out, MLFLOW_EXPERIMENT_NAME, else Default."
    )
    name: str | None = Field(None, min_length=1, description="Run name; left out, the run directory's.")

    @field_validator("uri")
    @classmethod
    def _keeps_no_password(cls, uri: str | None) -> str | None:
        if uri is not None and "@" in uri.partition("://")[2].partition("/")[0]:
            raise ConfigError(
                "run.trackers.mlflow.uri has a user or a password",
                why="the run directory keeps every setting, and no secret",
                fix="leave uri out and set MLFLOW_TRACKING_URI, or MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD",
            )
        return uri


class TrackersConfig(Section):
    """Trackers by name; a name of your own has ``class``, and its other keys are arguments of the class."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Any]

    wandb: WandbConfig | None = Field(None, description="Weights & Biases; needs the extra wandb.")
    tensorboard: TensorBoardConfig | None = Field(
        None, description="TensorBoard; needs the extra tensorboard."
    )
    mlflow: MlflowConfig | None = Field(None, description="MLflow; needs the extra mlflow.")

    @model_validator(mode="before")
    @classmethod
    def _names(cls, data: object) -> object:
        if not isinstance(data, Mapping):
            return data
        data = {name: each for name, each in data.items() if each is not None}
        for name in data.keys() - cls.model_fields.keys():
            found = data[name]
            if not re.fullmatch(r"[\w-]{1,60}", name):
                raise ConfigError(
                    f"a tracker is called {name!r}", why="its files have this name", fix="use letters"
                )
            if not isinstance(found, Mapping) or not isinstance(found.get(CLASS), str):
                raise ConfigError(
                    f"run.trackers.{name} has no {CLASS!r}",
                    why=f"the shipped trackers are {', '.join(cls.model_fields)}; any other needs a class",
                    fix=f'{nearest(name, cls.model_fields)}; or add class = "file.py:Class"',
                )
            common = {key: found[key] for key in found.keys() & TrackerConfig.model_fields.keys()}
            validate(TrackerConfig, common, f"run.trackers.{name}")
        return data

    @property
    def named(self) -> Mapping[str, Mapping[str, Any]]:
        """Settings of each tracker that the recipe names."""
        return {name: one for name, one in self.model_dump(mode="json").items() if one is not None}
