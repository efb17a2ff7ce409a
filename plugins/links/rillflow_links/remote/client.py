"""RunClient: the requests of a remote sampler, with the run's refusals as errors of their own classes.

200 ─> the answer        204 ─> None        401 WrongToken      409 LeaseEnded
410 on rows ─> RunEnded                     410 on weights ─> WeightsGone
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rillflow.errors import RillflowError, StreamError, WeightError
from rillflow_links.remote.transport import RunAnswer, Transport, Unreachable


class WrongToken(StreamError):
    """The run refused the token."""


class LeaseEnded(StreamError):
    """The lease, or its rows, are not this client's any more."""


class RunEnded(StreamError):
    """The run takes no more rows."""


class WeightsGone(WeightError):
    """The requested file of the weights is not kept any more."""


@dataclass(frozen=True, kw_only=True)
class RowToSample:
    """A leased row."""

    row: int
    """Number of the row in the run."""
    id: tuple[int, int, int]
    """Epoch, prompt and sample."""
    tokens: Sequence[int]
    """The prompt, or everything so far."""
    max_tokens: int
    """Most tokens to sample."""
    temperature: float
    """Temperature; 0 takes the likeliest token."""
    seed: int
    """Seed of its random numbers."""
    oldest_version: int
    """Oldest version of the weights that may sample it."""


@dataclass(frozen=True, kw_only=True)
class LeasedRows:
    """Rows of one lease."""

    lease: str
    """Name of the lease; it begins with the run's session."""
    rows: Sequence[RowToSample]
    """The rows."""

    @property
    def session(self) -> str:
        """Name of the run's life that gave the lease."""
        return self.lease.partition(".")[0]


class RunClient:
    """Requests to a run.

    Args:
        transport: carries them.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def model(self) -> dict[str, Any]:
        """Return the model's config, vocabulary, context, stop tokens, and the run's session."""
        return self._json(self._ask("GET", "model"))

    def manifest(self, newer_than: int, wait_s: float) -> dict[str, Any] | None:
        """Return files of the newest weights; None if none are newer in time."""
        path = f"weights?newer_than={newer_than}&wait_s={int(wait_s)}"
        answer = self._ask("GET", path, wait_s=wait_s)
        return self._json(answer) if answer.body else None

    def file(self, version: int, name: str) -> bytes:
        """Return a file of the weights.

        Raises:
            WeightsGone: it is not kept any more.
        """
        return self._ask("GET", f"weights/{version}/{name}").body

    def take(self, count: int, *, lease_s: float, wait_s: float) -> LeasedRows | None:
        """Lease up to ``count`` rows; None if no row is ready in time.

        Raises:
            RunEnded: the run is over.
        """
        said = {"count": count, "lease_s": lease_s, "wait_s": wait_s}
        answer = self._ask("POST", "rows/take", said, wait_s=wait_s)
        if not answer.body:
            return None
        found = self._json(answer)
        try:
            rows = [
                RowToSample(**{**each, "id": tuple(each["id"]), "tokens": tuple(each["tokens"])})
                for each in found["rows"]
            ]
            return LeasedRows(lease=str(found["lease"]), rows=rows)
        except (KeyError, TypeError) as error:
            raise StreamError(
                "the run sent rows in another form", why=str(error), fix="use one version of Rillflow"
            ) from None

    def put(self, lease: str, rows: Sequence[dict[str, Any]]) -> None:
        """Send sampled rows of a lease.

        Raises:
            LeaseEnded: the rows went to other clients.
            StreamError: a row breaks a rule.
        """
        self._ask("POST", "rows/put", {"lease": lease, "rows": list(rows)}, wait_s=60.0)

    def renew(self, lease: str, lease_s: float) -> None:
        """Move the deadline of a lease.

        Raises:
            LeaseEnded: it has ended.
        """
        self._ask("POST", "rows/renew", {"lease": lease, "lease_s": lease_s})

    def give_back(self, lease: str) -> None:
        """Give the rows of a lease back."""
        self._ask("POST", "rows/return", {"lease": lease})

    def close(self) -> None:
        """End the transport."""
        self._transport.close()

    def _ask(self, method: str, path: str, says: Any = None, wait_s: float = 0.0) -> RunAnswer:
        body = None if says is None else json.dumps(says).encode()
        answer = self._transport.ask(method, path, body, wait_s)
        if answer.status >= 400:
            raise _refusal(answer, path)
        return answer

    def _json(self, answer: RunAnswer) -> dict[str, Any]:
        try:
            found = json.loads(answer.body)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            why = f"it begins with {answer.body[:40]!r}, which is no JSON object"
            raise Unreachable("an answer is not the run's", why=why)
        return found


def _refusal(answer: RunAnswer, path: str) -> RillflowError:
    """Return the error of an answer with a status from 400 on."""
    try:
        said = json.loads(answer.body)
        what, why, fix = str(said["what"]), str(said["why"]), str(said["fix"])
    except (ValueError, KeyError, TypeError):
        return Unreachable(f"status {answer.status} of {path}", why=f"{answer.body[:80]!r}")
    is_rows = path.startswith("rows/")
    kinds: dict[int, type[RillflowError]] = {
        401: WrongToken,
        409: LeaseEnded,
        410: RunEnded if is_rows else WeightsGone,
    }
    if answer.status >= 500:
        return Unreachable(what, why, fix)
    if answer.status == 401:
        fix = "give --token-file the file that rollout.service.token_file of the run names"
    return kinds.get(answer.status, StreamError)(what, why, fix)
