"""Plugin: attach the training service to ``rillflow serve --train``. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rillflow.app.plugins import Plugin


class TrainingService:
    """Serves a model to training clients."""

    def serve(
        self,
        source: Path,
        *,
        port: int,
        token_file: Path | None,
        max_rows: int,
        checkpoints: Path | None,
        announce: Callable[[str], None],
    ) -> None:
        """Serve until a signal."""
        from rillflow_training_service.server import serve

        serve(
            source,
            port=port,
            token_file=token_file,
            max_rows=max_rows,
            checkpoints=checkpoints,
            announce=announce,
        )


PLUGIN = Plugin(services={"training": TrainingService})
