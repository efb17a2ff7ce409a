"""EngineThread: the one thread that runs the model, and the fair order of its jobs.

    any thread ── put(job) ──> inbox ─┬─ quick: done at once, also between two passes of sampling
                                      └─ others: a queue for each owner, in order
                                                  │ one job of each owner in turn
    sampling: one turn of each batch of rows <────┤
    OpenAI's paths: one pass of their queue  <────┘

consumes      jobs of owners (a trained model, or a sampling session), and rows of sampling
waits for     nothing while there is a job; otherwise for a byte in its pipe, or in that of OpenAI's queue
produces      the result of each job, given to its ``tell``
shuts down    with the process; after a failure of the thread every job gets an error

A job that fails with an unexpected error fails alone: its client gets a server error.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from rillflow.errors import RillflowError, StreamError
from rillflow.serving.http_body import Declined
from rillflow_parts.endpoint.engine_queue import EngineQueue
from rillflow_training_service.sampling import SLICE_S, SnapshotSampler
from rillflow_training_service.shared_base import SharedBase

logger = logging.getLogger(__name__)


class ServerError(StreamError):
    """An error that the client did not cause."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientJob:
    """Something that the thread does for a client."""

    owner: str
    """Client that the job belongs to; the jobs of one owner run in order."""
    run: Callable[[], Any]
    """Function that does the job."""
    tell: Callable[[Any], None]
    """Receives the result, or a RillflowError."""
    is_sampling: bool = False
    """Whether the job begins rows. Such jobs of one owner run together, so that their rows share passes."""
    is_quick: bool = False
    """Whether the job runs no pass of the model. It is then done at once, also between sampling passes."""


class EngineThread:
    """The thread's loop.

    Args:
        base: the base model.
        sampler: sampling with adapters.
        door: queue of OpenAI's paths, which sample the base alone.
    """

    def __init__(self, base: SharedBase, sampler: SnapshotSampler, door: EngineQueue) -> None:
        self._base, self._sampler, self._door = base, sampler, door
        self._inbox = deque[ClientJob]()
        self._queues: dict[str, deque[ClientJob]] = {}
        self.failure: ServerError | None = None
        """Error that ended the loop."""
        self._woken, self._wake = os.pipe()
        for descriptor in (self._woken, self._wake):
            os.set_blocking(descriptor, False)

    def put(self, job: ClientJob) -> None:
        """Queue a job; from any thread."""
        if self.failure is not None:
            job.tell(self.failure)
            return
        self._inbox.append(job)
        self.wake()

    def wake(self) -> None:
        """Make the thread look at its inbox; from any thread."""
        with suppress(BlockingIOError):
            os.write(self._wake, b".")

    def run(self, ended: Callable[[], None] = lambda: None) -> None:
        """Do jobs for as long as the process lives; an error of the loop ends it.

        Args:
            ended: called when the loop has failed and every client has received an error.
        """
        try:
            while True:
                if not self.turn():
                    wait([self._woken, self._door.woken], 10.0)
        except BaseException as error:
            logger.exception("the engine thread failed")
            self.failure = ServerError(
                "the engine failed, and the server stopped",
                why=f"{type(error).__name__}: {error}",
                fix="read the log, and start the command again; checkpoints remain",
            )
            self._door.fail(Declined(503, self.failure.what, self.failure.why, "try again later"))
            for jobs in (*self._queues.values(), self._inbox):
                for job in jobs:
                    job.tell(self.failure)
            self._sampler.fail(self.failure)
            ended()

    def turn(self) -> bool:
        """Do jobs of each owner, and one turn of each batch of rows; return whether there was any."""
        with suppress(BlockingIOError):
            os.read(self._woken, 1 << 16)
        self._sort()
        is_busy = False
        for owner in [*self._queues]:
            is_busy = True
            self._serve(owner)
        for key in self._sampler.busy:
            is_busy = True
            try:
                self._sampler.turn(key, self._sort)
            except Exception:  # one client's engine failed; the others go on
                logger.exception("an engine failed; its requests were ended")
        return self._serve_door() or is_busy

    def _sort(self) -> None:
        """Empty the inbox: do quick jobs, and queue the others."""
        while self._inbox:
            job = self._inbox.popleft()
            if job.is_quick:
                self._do(job)
            else:
                self._queues.setdefault(job.owner, deque()).append(job)

    def _serve(self, owner: str) -> None:
        """Do an owner's next job, and those after it that begin rows, for at most ``SLICE_S``."""
        queue, until = self._queues[owner], time.monotonic() + SLICE_S
        self._do(queue.popleft())
        while queue and queue[0].is_sampling and time.monotonic() < until:
            self._do(queue.popleft())
        if not queue:
            del self._queues[owner]

    def _do(self, job: ClientJob) -> None:
        try:
            found = job.run()
        except RillflowError as error:
            found = error
        except Exception as error:  # the boundary: a fault in one job must not end the other clients
            logger.exception("a job of %s failed", job.owner)
            why = f"{type(error).__name__}: {error}"
            found = ServerError("the server failed on this request", why=why, fix="read the server's log")
        except BaseException:
            job.tell(ServerError("the engine stopped during this request", fix="read the server's log"))
            raise
        job.tell(found)

    def _serve_door(self) -> bool:
        self._base.enter(None, None, {})
        try:
            return self._door.turn()
        except RillflowError as error:
            logger.warning("%s", error)
            return True
        except Exception:  # the engine of OpenAI's paths is apart from training, which goes on
            logger.exception("the engine of OpenAI's paths failed")
            return False
