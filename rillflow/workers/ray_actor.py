"""RankActor: the actor that Ray starts for a rank; it sets the process up, then imports the rank.

    Ray ─> RankActor: module search path, variables ─> import of torch and ``ray_rank`` ─> RankProcess

Libraries read many variables when they are imported, and Ray imports the class of an actor before it makes
the actor. So this module imports nothing heavy.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rillflow.runs.busy_machine import share_cores

LOG_LEVEL = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Without it, each connection on a node without a name service prints a warning."""


class RankActor:
    """One rank; see ``ray_rank.RankProcess`` for its methods.

    Args:
        paths: module search path of the driver.
        variables: environment variables of the driver that the rank gets.
    """

    def __init__(self, paths: Sequence[str], variables: Mapping[str, str]) -> None:
        os.environ.update({**LOG_LEVEL, **os.environ, **variables})
        share_cores()
        sys.path += [path for path in paths if path not in sys.path]
        from rillflow.workers.ray_rank import RankProcess

        self._rank = RankProcess()

    def seat(self, driver: Mapping[str, str]) -> Any:
        """See RankProcess."""
        return self._rank.seat(driver)

    def time(self) -> float:
        """See RankProcess."""
        return self._rank.time()

    def ask(self, sent: Any) -> Any:
        """See RankProcess."""
        return self._rank.ask(sent)

    def run(self, sent: Any, *own: Any) -> Any:
        """See RankProcess."""
        return self._rank.run(sent, *own)
