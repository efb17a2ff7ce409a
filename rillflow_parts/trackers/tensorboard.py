"""TensorBoard: event files below the run directory, so ``tensorboard --logdir runs`` shows all runs.

Only this module imports ``tensorboard``; it needs neither TensorFlow nor torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rillflow.errors import install_package
from rillflow.runs import layout
from rillflow.runs.json_lines import JSON
from rillflow.runs.observers import End
from rillflow_parts.trackers.tracker import TrackedRun, TrackerError


class TensorBoardTracker:
    """Event files of a run; each start writes another file in the same folder.

    Args:
        settings: see TensorBoardConfig.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._folder: str | None = settings["folder"]
        self._writer: Any = None
        self._began = 0.0

    def start(self, run: TrackedRun) -> Mapping[str, JSON]:
        """See Tracker."""
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ModuleNotFoundError:
            raise TrackerError("tensorboard is not installed", fix=install_package("tensorboard")) from None
        folder = self._folder or str(run.path / layout.TRACKERS / "tensorboard")
        self._writer, self._began = EventFileWriter(folder), run.started
        if not run.kept:
            told = json.dumps(run.config, indent=1, ensure_ascii=False, default=str)
            self._text("config", "    " + told.replace("\n", "\n    "), 0, run.started)
            self._text("tags", ", ".join(run.tags) or "none", 0, run.started)
        return {"folder": folder}

    def log(self, step: int, values: Mapping[str, float], time_s: float) -> None:
        """See Tracker."""
        from tensorboard.compat.proto import event_pb2, summary_pb2

        found = [summary_pb2.Summary.Value(tag=name, simple_value=one) for name, one in values.items()]
        summary = summary_pb2.Summary(value=found)
        event = event_pb2.Event(wall_time=self._began + time_s, step=step, summary=summary)
        self._writer.add_event(event)
        self._writer.flush()

    def samples(self, step: int, rows: Sequence[Mapping[str, JSON]]) -> None:
        """See Tracker."""
        names = list(rows[0]) if rows else []
        lines = [names, ["---"] * len(names), *([_cell(each) for each in row.values()] for row in rows)]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        self._text("rollouts", table, step, self._began)

    def finish(self, state: End) -> None:
        """See Tracker; TensorBoard shows no state."""
        del state
        self._writer.close()

    def _text(self, name: str, text: str, step: int, wall_time: float) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
        from tensorboard.plugins.text import metadata

        shape = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)])
        tensor = tensor_pb2.TensorProto(
            dtype=types_pb2.DT_STRING, string_val=[text.encode()], tensor_shape=shape
        )
        value = summary_pb2.Summary.Value(
            tag=name, metadata=metadata.create_summary_metadata("", ""), tensor=tensor
        )
        summary = summary_pb2.Summary(value=[value])
        self._writer.add_event(event_pb2.Event(wall_time=wall_time, step=step, summary=summary))


def _cell(value: JSON) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")
