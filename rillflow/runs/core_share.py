"""Core share: tell the user when a run gets less than its cores, because other programs use them.

    /proc/PID/task/*/schedstat of the driver and its children ── every LOOK_S ──> time on a core, time in wait
                                                                  └─> a note once it lasts, and one at the end

More threads than cores wait for each other, which is no other program's doing: a note needs cores that the
run did not get.

consumes      the kernel's counters
waits for     LOOK_S, or the end of the run
unblocked by  ``__exit__``
produces      notes. A run ends without waiting for the thread's next look; after a crash nothing is left
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

PROCESSES = Path("/proc")
LOOK_S = 5.0
"""Seconds between two looks."""
LOOKS = 2
"""Looks in a row with too few cores before the first note."""
WAITING = 0.25
"""Share of the time that threads could run and had no core, above which a note is due."""


@dataclass(frozen=True, kw_only=True)
class CoreTime:
    """Seconds that threads ran, and seconds that they were ready to run and had no core."""

    ran_s: float = 0.0
    """Seconds on a core."""
    waited_s: float = 0.0
    """Seconds in the queue of a core."""

    def __add__(self, other: CoreTime) -> CoreTime:
        return CoreTime(ran_s=self.ran_s + other.ran_s, waited_s=self.waited_s + other.waited_s)

    def lacks_cores(self, core_s: float) -> bool:
        """Return whether threads waited for cores of other programs.

        They waited for more than ``WAITING`` of their time, and left half of that of the run's cores unused.

        Args:
            core_s: seconds of the run's cores meanwhile: cores times seconds.
        """
        has_waited = self.waited_s > WAITING * (self.ran_s + self.waited_s)
        return has_waited and min(self.waited_s, core_s - self.ran_s) > WAITING / 2 * core_s


def thread_times(process: int, folder: Path = PROCESSES) -> dict[str, CoreTime]:
    """Return the times of all threads of a process and its descendants, by thread; empty without Linux."""
    children: dict[int, list[int]] = defaultdict(list)
    for status in folder.glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):  # it has ended
            children[int(status.read_text().rpartition(")")[2].split()[1])].append(int(status.parent.name))
    times, left = dict[str, CoreTime](), [process]
    while left:
        process = left.pop()
        left += children[process]
        for counters in (folder / str(process) / "task").glob("*/schedstat"):
            with suppress(OSError, ValueError):
                ran, waited = counters.read_text().split()[:2]
                times[counters.parent.name] = CoreTime(ran_s=int(ran) / 1e9, waited_s=int(waited) / 1e9)
    return times


def between(before: Mapping[str, CoreTime], after: Mapping[str, CoreTime]) -> CoreTime:
    """Return the time between two looks, of the threads that both saw."""
    total = CoreTime()
    for thread in before.keys() & after.keys():
        one, other = before[thread], after[thread]
        total += CoreTime(
            ran_s=max(0.0, other.ran_s - one.ran_s), waited_s=max(0.0, other.waited_s - one.waited_s)
        )
    return total


class CoreShare:
    """Watch on the threads of this process and its children. Use it in a ``with`` statement.

    Args:
        say: shows a note.
        cores: cores that the run may use.
        look_s: seconds between two looks.
    """

    def __init__(self, say: Callable[[str], None], cores: float, look_s: float = LOOK_S) -> None:
        self._say, self._cores, self._look_s = say, cores, look_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="core share", daemon=True)
        self._whole, self._whole_s = CoreTime(), 0.0
        self._in_a_row, self._is_said = 0, False

    def __enter__(self) -> CoreShare:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._is_said:
            self._say(f"note: the run had {self._of_cores(self._whole, self._whole_s)} on average")

    def _watch(self) -> None:
        before, began = thread_times(os.getpid()), time.monotonic()
        while not self._ended.wait(self._look_s):
            now, ended = thread_times(os.getpid()), time.monotonic()
            self._saw(between(before, now), ended - began)
            before, began = now, ended

    def _saw(self, used: CoreTime, seconds: float) -> None:
        self._whole, self._whole_s = self._whole + used, self._whole_s + seconds
        self._in_a_row = self._in_a_row + 1 if used.lacks_cores(self._cores * seconds) else 0
        if self._in_a_row == LOOKS and not self._is_said:
            self._is_said = True
            self._say(
                f"note: the run has {self._of_cores(used, seconds)}, as other programs use the rest; "
                "its steps take longer, and their results stay the same"
            )

    def _of_cores(self, used: CoreTime, seconds: float) -> str:
        return f"{used.ran_s / seconds:.1f} of its {self._cores:g} cores"
