"""FusedCalls: hold back the first of two updates until the second is called, and submit both as one call.

    critic.update ─ held ─ formulas, other models ─ policy.update ──────> one call of both on their ranks
    critic.update ─ held ─ critic.values, which needs the new weights ──> critic.update alone, then values

The held update has a result at once. Whoever needs its value first has it submitted alone. So a step without
the second update, or one that reads the first one's report before it, runs as without fusion.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rillflow.workers.collectives import Stranded
from rillflow.workers.group import Group, PreparedCall, call_fused
from rillflow.workers.pending import Pending, Submission

UPDATE = "update"
"""Endpoint that is fused."""


class FusedCalls:
    """Updates of two roles that run together.

    Args:
        roles: the two roles; without any, nothing is fused.
        trained: the roles that the phase trains; a call of one of them reads no other one's weights.
    """

    def __init__(self, roles: Sequence[str] = (), trained: Collection[str] = ()) -> None:
        self._roles, self._trained = roles, trained
        self._held: _HeldUpdate | None = None

    def takes(self, group: Group, endpoint: str) -> bool:
        """Return whether a call is one of the two updates."""
        return endpoint == UPDATE and group.role in self._roles

    def call(self, group: Group, args: Sequence[Any], options: Mapping[str, Any]) -> Pending:
        """Hold an update back, or submit it together with the held one of the other role."""
        made = group.prepared(UPDATE, *args, **options)  # an argument may need the held one's result
        held = self._held
        if held is None or held.group is group:
            self.release()
            self._held = _HeldUpdate(group, made, self)
            return self._held.result
        self._held = None
        first, second = call_fused(held.call, made)
        held.submission = first.work
        return second

    def before(self, group: Group) -> None:
        """Submit the held update if a call of this group may read the weights that it changes.

        Roles that are not trained may read any role of their ranks: a reference follows the policy.
        """
        held = self._held
        if held is None:
            return
        is_near = group.places[0].pool == held.group.places[0].pool
        if held.group.role in (group.role, group.of) or (is_near and group.role not in self._trained):
            self.release()

    def release(self) -> None:
        """Submit the held update alone."""
        held, self._held = self._held, None
        if held is not None:
            held.submission = held.call.submit().work

    def drop(self) -> None:
        """Forget the held update, because the run is stopped."""
        self._held = None


class _HeldUpdate:
    """An update that is not submitted yet."""

    def __init__(self, group: Group, call: PreparedCall, calls: FusedCalls) -> None:
        self.group, self.call, self._calls = group, call, calls
        self.submission: Submission | None = None
        self.result = Pending(call.stage, self._submitted)

    def _submitted(self) -> Submission:
        if self.submission is None:
            self._calls.release()
        if self.submission is None:
            raise Stranded(f"{self.call.stage} was abandoned", why="the run was stopped")
        return self.submission
