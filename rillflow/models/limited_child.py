"""Limited child: run a stranger's file in a process with bounds before this process uses it.

driver ─ JSON ─> python -m MODULE: limit(processor time, address space), work ─> "" | what it exceeded
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from typing import Any

TOO_MUCH = 3
"""The exit code of a child whose file needs more memory or makes more output than is allowed."""
_WAIT_S = 60.0


def run_limited(module: str, asked: Any, cpu_s: int) -> str:
    """Run a module with JSON on its standard input.

    Args:
        module: run as ``python -m``; it calls ``limit`` first.
        asked: what it is told.
        cpu_s: its limit, for the words.

    Returns:
        What it exceeded, in words; empty where it ended within its bounds.
    """
    command = [sys.executable, "-m", module]
    one_thread = {**os.environ, "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        ended = subprocess.run(
            command,
            input=json.dumps(asked).encode(),
            capture_output=True,
            timeout=_WAIT_S,
            check=False,
            env=one_thread,
        )
    except subprocess.TimeoutExpired:
        return f"{cpu_s} s of processor time"
    if ended.returncode == TOO_MUCH or b"memory allocation" in ended.stderr:
        return "its memory or the length of its text"
    return f"{cpu_s} s of processor time" if ended.returncode < 0 else ""


def limit(cpu_s: int, address_bytes: int) -> None:
    """Limit what this process may use from here on."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent = int(used.ru_utime + used.ru_stime)
    resource.setrlimit(resource.RLIMIT_CPU, (spent + cpu_s, spent + cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (address_bytes, address_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
