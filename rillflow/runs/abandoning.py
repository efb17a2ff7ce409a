"""Abandoning: the signal that ends a call of a stopped run, and sections of a call that it does not break.

stop is over ─ ABANDON ─> main thread ─┬─ waits, computes: Signalled ends the call
                                       └─ in ``whole``: the section ends first
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

ABANDON = signal.SIGURG
"""Signal that a process sends to its own main thread. No scheduler sends it."""


@contextmanager
def whole() -> Iterator[None]:
    """Hold ABANDON back while weights change in place, so that they change completely or not at all."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {ABANDON})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
