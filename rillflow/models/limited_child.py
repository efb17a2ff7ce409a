"""Limited child: process an untrusted file in a child with limits before this process uses it.

driver ─ JSON ─> python -m MODULE: limit(processor time, address space), work ─> "" | the limit exceeded
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from typing import Any

TOO_MUCH = 3
"""Exit code of a child whose file needs more memory or produces more output than allowed."""
_WAIT_S = 60.0


def run_limited(module: str, asked: Any, cpu_s: int) -> str:
    """Run a module with JSON on its standard input.

    Args:
        module: module for ``python -m``; it calls ``limit`` first.
        asked: its input.
        cpu_s: its limit of processor time in seconds, for the message.

    Returns:
        Name of the limit that it exceeded; empty if it ended within its limits.
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
        return "the limit of memory or text length"
    return f"{cpu_s} s of processor time" if ended.returncode < 0 else ""


def limit(cpu_s: int, address_bytes: int) -> None:
    """Limit the further processor time and the address space of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent = int(used.ru_utime + used.ru_stime)
    resource.setrlimit(resource.RLIMIT_CPU, (spent + cpu_s, spent + cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (address_bytes, address_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
