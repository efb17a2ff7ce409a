"""Indexing: a process of low priority that keeps the indexes of some runs up to date.

    every look: rollouts/ ─ steps that are new ─> Writer.add        steps written again, or gone ─> Writer.cut

Consumes: rollout files of the runs. Waits for: LOOK_S between two looks, longer if a look takes long.
Produces: indexes in the cache directory. Ends: when its standard input closes, so also when the server was
killed; the next process continues after the last whole block.

The server starts ``python -m rillflow_parts.watch.indexing`` and writes a JSON line for each run: its path
and its folder in the cache.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import cast

from rillflow.errors import RunDirectoryError
from rillflow.runs import layout
from rillflow.runs.json_lines import read_json
from rillflow_parts.watch.index import Writer, read_step, remove, run_of, stamp_of

LOOK_S = 2.0
"""Seconds between two looks at a run."""
SHARE = 0.01
"""Largest share of time that looks take if there is nothing to index."""
BATCH_S = 1.0
"""Processor seconds of indexing one run before the next run has its turn."""
NICE = 19
"""Added to the process's niceness: it runs when nothing else wants the processor."""

logger = logging.getLogger(__name__)


class RunIndexer:
    """Keeps the index of one run up to date.

    Args:
        run: the run directory; only read.
        folder: folder of its index.
    """

    def __init__(self, run: Path, folder: Path) -> None:
        self._run, self._folder = run, folder
        self._writer: Writer | None = None
        self._seen: object = None
        self._token_texts: Sequence[str] | None = None
        self._pending = deque[tuple[int, tuple[Path, ...]]]()
        self._damaged = dict[int, int]()

    def advance(self, limit_s: float) -> bool:
        """Index for at most ``limit_s`` processor seconds; return whether there is more to index now."""
        if not self._pending:
            seen = [_mtime(self._run / name) for name in (layout.ROLLOUTS, layout.ENVIRONMENT)]
            if seen == self._seen or not self._is_writer():
                return False
            self._list()
            self._seen = seen  # of before the list: what changes meanwhile is found by the next one
        began = time.process_time()
        while self._pending:
            if time.process_time() - began > limit_s:
                return True
            self._add(*self._pending.popleft())
        return False

    def _list(self) -> None:
        """Compare the index with the run's files, and note the steps that are missing in it."""
        assert self._writer is not None
        steps = _complete_steps(self._run)
        self._damaged = {
            step: stamp for step, stamp in self._damaged.items() if stamp == _stamp_of(steps.get(step, ()))
        }
        self._cut_changed(steps)
        known = {*self._writer.blocks["step"].tolist(), *self._damaged}
        self._pending.extend((step, files) for step, files in steps.items() if step not in known)

    def close(self) -> None:
        """Release the index."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _is_writer(self) -> bool:
        """Return whether this process writes the index, and not another server's."""
        if self._writer is None:
            with contextlib.suppress(BlockingIOError):
                self._writer = Writer(self._folder, self._run)
        return self._writer is not None

    def _cut_changed(self, steps: Mapping[int, tuple[Path, ...]]) -> None:
        """Drop the blocks from the first one that was written again, removed, or preceded by a new step."""
        assert self._writer is not None
        blocks = self._writer.blocks
        order = [step for step in steps if step not in self._damaged]
        for place, block in enumerate(blocks):
            step = int(block["step"])
            is_there = place < len(order) and order[place] == step
            if not is_there or _stamp_of(steps[step]) != block["stamp"]:
                self._writer.cut(place)
                return

    def _add(self, step: int, files: tuple[Path, ...]) -> None:
        assert self._writer is not None
        stamp = _stamp_of(files)
        try:
            told = read_step(files, self._texts(), self._writer.known_prompts)
        except RunDirectoryError as error:
            logger.warning("step %d of %s is not searched: %s", step, self._run, error)
            self._damaged[step] = stamp
        else:
            self._writer.add(step, told, stamp)

    def _texts(self) -> Sequence[str]:
        if self._token_texts is None:
            try:
                self._token_texts = cast(list[str], read_json(self._run / layout.TOKENS).get("texts", []))
            except RunDirectoryError:
                return ()
        return self._token_texts


def _complete_steps(run: Path) -> dict[int, tuple[Path, ...]]:
    """Return the steps in columns with all their files, up to the first step that lacks one."""
    whole = layout.rollout_files(run)
    found = dict[int, tuple[Path, ...]]()
    for step, files in layout.written_rollouts(run).items():
        if step not in whole:
            break
        if files[0].suffix == ".safetensors":
            found[step] = files
    return found


def _stamp_of(files: Sequence[Path]) -> int:
    """Return the stamp of some files; 0 if one was removed."""
    try:
        return stamp_of(files)
    except OSError:
        return 0


def _mtime(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def main() -> None:
    """Index the runs that standard input names, until it closes."""
    lower_priority()
    runs, told, wait_s = dict[str, RunIndexer](), b"", 0.0
    while True:
        if select.select([0], [], [], wait_s)[0]:
            data = os.read(0, 2**16)
            if not data:
                return
            *lines, told = (told + data).split(b"\n")
            for line in map(json.loads, lines):
                if line["run"] in runs:
                    runs[line["run"]].close()
                runs[line["run"]] = RunIndexer(Path(line["run"]), Path(line["folder"]))
        began = time.monotonic()
        is_more = False
        for run in runs.values():
            try:
                is_more |= run.advance(BATCH_S)
            except OSError as error:  # a full disk, or a run that is being deleted; the next look tries again
                logger.warning("%s", error)
        wait_s = 0.0 if is_more else max(LOOK_S, (time.monotonic() - began) / SHARE)


def lower_priority() -> None:
    """Let every other process have the processor and the disk first."""
    os.nice(NICE)
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # no Linux, or no ionice
        subprocess.run(["ionice", "-c3", "-p", str(os.getpid())], check=False, capture_output=True)


class IndexingProcess:
    """The child process that indexes; started at the first run, ended by ``close``.

    Args:
        cache: folder of all indexes.
    """

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        """Folder of all indexes."""
        self._lock = Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._known = dict[str, Path]()

    def folder(self, run: Path, identity: str) -> Path:
        """Return the folder of a run's index, and have the run indexed."""
        folder = self.cache / identity
        with self._lock:
            if self._known.get(str(run)) != folder:
                self._known[str(run)] = folder
                self._tell(run, folder)
            elif self._child is not None and self._child.poll() is not None:  # it was killed
                self._child = None
                for known, its in self._known.items():
                    self._tell(Path(known), its)
        return folder

    def _tell(self, run: Path, folder: Path) -> None:
        if self._child is None:
            command = [sys.executable, "-m", "rillflow_parts.watch.indexing"]
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert self._child.stdin is not None
        with contextlib.suppress(OSError):
            self._child.stdin.write(json.dumps({"run": str(run), "folder": str(folder)}).encode() + b"\n")
            self._child.stdin.flush()

    def clear(self) -> None:
        """Delete the indexes of runs that no longer exist."""
        for head in self.cache.glob("*/head.json"):
            run = run_of(head.parent)
            if run is not None and not run.exists():
                remove(head.parent)

    def close(self) -> None:
        """End the child process."""
        with self._lock:
            if self._child is not None and self._child.stdin is not None:
                with contextlib.suppress(OSError):
                    self._child.stdin.close()
                self._child.terminate()
                self._child.wait()
                self._child = None


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    main()
