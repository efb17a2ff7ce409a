"""Supervised: the plan of a supervisor on its command line, and how to start it. Standard library only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from rillflow.rewards.sandbox import Visible, clean_environment

RUNNER = "RILLFLOW_PROGRAM_RUNNER"
"""Environment variable with the descriptor of the sandbox's runner, in the process that has it."""

REFUSED = "could not be sandboxed"
"""Beginning of a status that explains why a sandbox is not available."""

_PACKAGE_ROOT = Path(__file__).parents[2]
_BOOT = "import sys; sys.path.append(sys.argv[1]); from rillflow.rewards import supervisor; supervisor.main()"
_INTERPRETER = (sys.executable, "-I", "-u", "-c", _BOOT)


class Containment(StrEnum):
    """Containment of a reward function's processes, strongest first."""

    SANDBOX = "sandbox"
    """Namespaces of every kind, a new root and further users, or an error; see rewards/sandbox.py."""
    SHARED_USER = "shared user"
    """The sandbox without further users, even if they are available."""
    NAMESPACE = "namespace"
    """A pid namespace: the kernel ends every process in it at once."""
    DESCENDANTS = "descendants"
    """Adopted orphans and the descendants in /proc; without a /proc, only the process group."""

    @property
    def is_sandbox(self) -> bool:
        """Whether the function is isolated in a sandbox."""
        return self in (Containment.SANDBOX, Containment.SHARED_USER)


@dataclass(frozen=True, kw_only=True)
class Supervised:
    """The plan of one supervisor."""

    containment: Containment
    """Strongest containment to try; a sandbox is provided or refused."""
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

    def start(self, printed: int | None = None) -> subprocess.Popen[bytes]:
        """Start the supervisor in a new session.

        Args:
            printed: descriptor for its output; None: discard it.

        Raises:
            OSError: the system cannot start another process.
        """
        told = asdict(self) | {"driver": os.getpid()}
        passed = [self.status, self.requests, self.answers, self.programs, self.door]
        output = subprocess.DEVNULL if printed is None else printed
        return subprocess.Popen(
            [*_INTERPRETER, str(_PACKAGE_ROOT), json.dumps(told)],
            env=clean_environment() if self.containment.is_sandbox else None,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[descriptor for descriptor in passed if descriptor >= 0],
            start_new_session=True,
        )

    @staticmethod
    def told(text: str) -> Supervised:
        """Parse the plan from a command line."""
        known = json.loads(text)
        return Supervised(
            **known
            | {"containment": Containment(known["containment"]), "visible": Visible(**known["visible"])}
        )
