"""MLflow: one MLflow run for a run directory, on a tracking server or in a local store.

Only this module imports ``mlflow``. A metric's time is that of its step, so sending it again adds no point.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rillflow.errors import install_package
from rillflow.runs.json_lines import JSON
from rillflow.runs.observers import End
from rillflow_parts.trackers.tracker import TrackedRun, TrackerError

_STATUS: Mapping[End, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_REFUSED = re.compile(r"[^\w\-./ ]")
"""Characters that a name of MLflow cannot have."""
_METRICS_AT_ONCE, _PARAMS_AT_ONCE, _VALUE_CHARACTERS = 500, 100, 500


class MlflowTracker:
    """An MLflow run.

    Args:
        settings: see MlflowConfig.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._client: Any = None
        self._id, self._began = "", 0.0

    def start(self, run: TrackedRun) -> Mapping[str, JSON]:
        """See Tracker."""
        try:
            from mlflow.tracking import MlflowClient
        except ModuleNotFoundError as error:
            if error.name != "mlflow":
                raise
            raise TrackerError("mlflow is not installed", fix=install_package("mlflow")) from None
        self._client, self._began = MlflowClient(tracking_uri=self._settings["uri"]), run.started
        known = run.kept.get("id")
        if isinstance(known, str):
            self._id = known
            self._client.update_run(known, status="RUNNING")
        else:
            self._id = self._created(run)
        return {"id": self._id}

    def _created(self, run: TrackedRun) -> str:
        from mlflow.entities import Param, RunTag
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME

        name = self._settings["experiment"] or MLFLOW_EXPERIMENT_NAME.get() or "Default"
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(name)
        made = self._client.create_run(
            experiment,
            start_time=int(1000 * run.started),
            tags={"rillflow.run": run.id},
            run_name=self._settings["name"] or run.name,
        )
        identity: str = made.info.run_id
        tags = [RunTag(_named(each), "true") for each in run.tags]
        params = [Param(_named(key), value[:_VALUE_CHARACTERS]) for key, value in flat(run.config)]
        for place in range(0, max(1, len(params)), _PARAMS_AT_ONCE):
            chunk = params[place : place + _PARAMS_AT_ONCE]
            self._client.log_batch(identity, params=chunk, tags=tags if place == 0 else [])
        return identity

    def log(self, step: int, values: Mapping[str, float], time_s: float) -> None:
        """See Tracker."""
        from mlflow.entities import Metric

        at = int(1000 * (self._began + time_s))
        found = [Metric(_named(name), value, at, step) for name, value in values.items()]
        for place in range(0, len(found), _METRICS_AT_ONCE):
            self._client.log_batch(self._id, metrics=found[place : place + _METRICS_AT_ONCE])

    def samples(self, step: int, rows: Sequence[Mapping[str, JSON]]) -> None:
        """See Tracker."""
        text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
        self._client.log_text(self._id, text, f"rollouts/step-{step:06d}.jsonl")

    def finish(self, state: End) -> None:
        """See Tracker."""
        self._client.set_terminated(self._id, status=_STATUS[state])


def _named(name: str) -> str:
    return _REFUSED.sub("_", name)


def flat(config: Mapping[str, JSON], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the settings as dotted keys and texts."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)
