"""Training server: the protocol of the service ``training``, which ``rillflow serve --train`` asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol


class TrainingServer(Protocol):
    """A service whose clients train."""

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
        """Serve a model to training clients until a signal ends it, for ``serve --train``.

        Args:
            source: a model's directory.
            port: port on the loopback device; 0 for a free one.
            token_file: file of the token that requests carry; made if it is missing.
            max_rows: rows that are sampled at once.
            checkpoints: directory of the clients' checkpoints; None for the service's own choice.
            announce: receives lines about the address and the token.
        """
        ...
