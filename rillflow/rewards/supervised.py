"""Supervised: the plan of a supervisor on its command line, and how to start it. Standard library only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rillflow.isolation.child_process import ChildProcess
from rillflow.isolation.sandbox import Level, Visible, clean_environment

RUNNER = "RILLFLOW_PROGRAM_RUNNER"
"""Environment variable with the descriptor of the sandbox's runner, in the process that has it."""

REFUSED = "could not be sandboxed"
"""Beginning of a status that explains why a sandbox is not available."""

_PACKAGE_ROOT = Path(__file__).parents[2]
_BOOT = "import sys; sys.path.append(sys.argv[1]); from rillflow.rewards import supervisor; supervisor.main()"
_INTERPRETER = (sys.executable, "-I", "-u", "-c", _BOOT)


@dataclass(frozen=True, kw_only=True)
class Supervised:
    """The plan of one supervisor."""

    level: Level
    """Strongest level to try; a sandbox is provided or refused."""
    visible: Visible
    """User files that a sandbox shows."""
    status: int
    """Descriptor that receives how it ended."""
    requests: int = -1
    """Descriptor of the request pipe; -1: no function is loaded."""
    answers: int = -1
    """Descriptor of the answer pipe."""
    programs: int = -1
    """Socket with program requests, if no function is loaded."""
    door: int = -1
    """Socket through which a sandbox sends a listening socket of its network; -1: none."""
    memory_bytes: int = 0
    """Memory limit of a sandbox's memory group in bytes; 0: no limit."""
    driver: int = 0
    """Process id of the driver."""

    @property
    def passed(self) -> set[int]:
        """Descriptors that the supervisor inherits from the driver, besides its output."""
        return {self.status, self.requests, self.answers, self.programs, self.door} - {-1}

    def start(self, printed: int | None = None) -> ChildProcess:
        """Start the supervisor in a new session.

        Args:
            printed: descriptor for its output; None: discard it.

        Raises:
            OSError: the system cannot start another process.
        """
        told = asdict(self) | {"driver": os.getpid()}
        return ChildProcess(
            [*_INTERPRETER, str(_PACKAGE_ROOT), json.dumps(told)],
            descriptors=[*self.passed],
            output=subprocess.DEVNULL if printed is None else printed,
            environment=clean_environment() if self.level.is_sandbox else None,
        )

    @staticmethod
    def told(text: str) -> Supervised:
        """Parse the plan from a command line."""
        known = json.loads(text)
        typed = {"level": Level(known["level"]), "visible": Visible(**known["visible"])}
        return Supervised(**known | typed)
