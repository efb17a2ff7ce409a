"""FusedCalls: hold back the first of two updates until the second is called, and submit both as one call.

    critic.update ─ held ─ formulas, other models ─ policy.update ──────> one call of both on their ranks
    critic.update ─ held ─ critic.values, which needs the new weights ──> critic.update alone, then values

The held update has a result at once. Whoever needs its value first has it submitted alone. So a step without
the second update, or one that reads the first one's report before it, runs as without fusion.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rillflow.controller.step_executor import StepCalls
from rillflow.graph.handle import Options
from rillflow.records.metrics import Metric
from rillflow.runs.passes import PassesRecord
from rillflow.workers.collectives import Stranded
from rillflow.workers.group import Group, PreparedCall
from rillflow.workers.pending import Pending, Submission
from rillflow_parts.fusion.gains import fused_metrics, unfused_note
from rillflow_parts.fusion.joined_call import submit_joined

UPDATE = "update"
"""Endpoint that is fused."""


class FusedCalls(StepCalls):
    """Updates of two roles that run together.

    Args:
        roles: the two roles.
        trained: the roles that the phase trains; a call of one of them reads no other one's weights.
        say: shows a note to the user.
    """

    def __init__(self, roles: Sequence[str], trained: Collection[str], say: Callable[[str], None]) -> None:
        self._roles, self._trained, self._say = roles, trained, say
        self._held: _HeldUpdate | None = None
        self._has_told = False

    def _takes(self, group: Group, endpoint: str) -> bool:
        """Return whether a call is one of the two updates."""
        return endpoint == UPDATE and group.role in self._roles

    def call(self, group: Group, endpoint: str, args: Sequence[Any], options: Options) -> Pending:
        """Hold an update back, or submit it together with the held one of the other role."""
        if not self._takes(group, endpoint):
            return super().call(group, endpoint, args, options)
        made = group.prepared(UPDATE, *args, **options)  # an argument may need the held one's result
        held = self._held
        if held is None or held.group is group:
            self.release()
            self._held = _HeldUpdate(group, made, self)
            return self._held.result
        self._held = None
        first, second = submit_joined(held.call, made)
        held.submission = first.work
        return second

    def before(self, group: Group, endpoint: str) -> None:
        """Submit the held update if a call of this group may read the weights that it changes.

        Roles that are not trained may read any role of their ranks: a reference follows the policy.
        """
        held = self._held
        if held is None or self._takes(group, endpoint):
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

    def metrics(self, passes: Sequence[PassesRecord]) -> Mapping[str, Metric]:
        """Return the gains of a step's fused updates; say once if they ran one after the other."""
        if not self._has_told and (note := unfused_note(passes)):
            self._has_told = True
            self._say(note)
        return fused_metrics(passes)


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
