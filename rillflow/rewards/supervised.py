"""Supervised: what a supervisor is told on its command line, and how it is started. Standard library only."""

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
"""The variable with the descriptor of the sandbox's runner, in the process that has it."""

REFUSED = "could not be shut in"
"""How a status begins that says why a sandbox is not to be had."""

_PACKAGE_ROOT = Path(__file__).parents[2]
_BOOT = "import sys; sys.path.append(sys.argv[1]); from rillflow.rewards import supervisor; supervisor.main()"
_INTERPRETER = (sys.executable, "-I", "-u", "-c", _BOOT)


class Containment(StrEnum):
    """How the processes of a reward function are held together, the strongest first."""

    SANDBOX = "sandbox"
    """Namespaces of every kind, a root of its own and further users, or an error; see rewards/sandbox.py."""
    SHARED_USER = "shared user"
    """The sandbox without further users, also where they could be had."""
    NAMESPACE = "namespace"
    """A pid namespace: the kernel ends every process in it at once."""
    DESCENDANTS = "descendants"
    """Orphans are adopted, and what /proc shows below; without a /proc, the process group alone."""

    @property
    def is_sandbox(self) -> bool:
        """Whether the function is shut in."""
        return self in (Containment.SANDBOX, Containment.SHARED_USER)


@dataclass(frozen=True, kw_only=True)
class Supervised:
    """What one supervisor runs."""

    containment: Containment
    """The strongest way to hold processes together that is tried; a sandbox is had or refused."""
    visible: Visible
    """What of the user's files a sandbox shows."""
    status: int
    """The descriptor that says how it ended."""
    requests: int = -1
    """The descriptor that frames come from; -1: no function is loaded."""
    answers: int = -1
    """The descriptor that answers go to."""
    programs: int = -1
    """A socket whose programs it runs, where no function is loaded."""
    door: int = -1
    """A socket over which a sandbox hands out a listening socket of its network; -1: it hands out none."""
    memory_bytes: int = 0
    """What the memory group of a sandbox is bounded by; 0: by nothing."""
    driver: int = 0
    """The process that started it."""

    def start(self, printed: int | None = None) -> subprocess.Popen[bytes]:
        """Start the supervisor in a session of its own.

        Args:
            printed: where its output goes; None: nowhere.

        Raises:
            OSError: the system starts no more processes.
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
        """What a command line says."""
        known = json.loads(text)
        return Supervised(
            **known
            | {"containment": Containment(known["containment"]), "visible": Visible(**known["visible"])}
        )
