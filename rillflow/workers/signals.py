"""Signals: the driver handles SIGTERM, also while Ray runs.

``ray.init`` replaces the driver's handler of SIGTERM, and starts daemons that end on SIGTERM. Slurm sends
SIGTERM to all processes of a job at once, and ``kill`` can send it to a whole process group. Without this
module, the ranks would be gone before the driver has saved their state.

    driver       keeps its handler
    daemons      start with SIGTERM blocked; ``ray.shutdown`` and the watchdog end them
    ranks        ignore SIGTERM; programs that they start do not
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rillflow.errors import ClusterError

ENVIRONMENT = {"RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1"}
"""Disables Ray's C++ handler, which would abort the driver on SIGTERM; Ray reads it in ``ray.init``."""


@contextmanager
def kept_by_driver() -> Iterator[None]:
    """Keep the driver's SIGTERM handler across ``ray.init``; processes started inside have SIGTERM blocked.

    A signal that arrives in between is handled afterwards.

    Raises:
        ClusterError: a signal ended Ray's start, and the driver's handler returned.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handler, is_ended = signal.getsignal(signal.SIGTERM), False
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    except SystemExit:  # Ray's own handler: a thread without blocked SIGTERM took the signal
        is_ended = True
    finally:
        if is_main and handler is not None:
            signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if is_ended:
        signal.raise_signal(signal.SIGTERM)
        raise ClusterError(
            "Ray did not start", why="a SIGTERM arrived during the start", fix="run the command again"
        )


def left_to_driver() -> None:
    """Make this process, a rank, ignore SIGTERM; programs that it starts get the default again."""
    signal.signal(signal.SIGTERM, _ignore)  # exec resets a Python handler to the default, but keeps SIG_IGN
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _ignore(number: int, frame: FrameType | None) -> None:
    """Ignore the signal: the driver has received it too, and ends the ranks."""
