"""Flow: the controller's side of an algorithm.

    algorithm line                     what happens here
    flow.policy.generate(prompts)      one stage of the role "policy": timed, its result journalled
    flow.compute(formula, batch, ...)  the formula's parameters are the fields it reads
    flow.publish(flow.policy)          the trained weights become those that are sampled

The journal holds every stage's result of the present step, so that recording rollouts and
measuring them is nobody's line in an algorithm.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rillflow.errors import RecordError, RillflowError, nearest
from rillflow.observe.spans import Spans
from rillflow.records.batch import Batch, Field, joined


class Role(Protocol):
    """A model with a job; ``endpoints`` names the methods a controller may call."""

    endpoints: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """What one stage of the present step returned."""

    stage: str
    """``role.endpoint`` or ``compute.formula``."""
    result: Any
    """A batch, metrics, or a version."""


class RoleHandle:
    """A role as the controller sees it: its endpoints, each call one stage."""

    def __init__(self, name: str, role: Role, flow: Flow) -> None:
        self._name = name
        self._role = role
        self._flow = flow

    def __getattr__(self, endpoint: str) -> Callable[..., Any]:
        if endpoint not in self._role.endpoints:
            raise RillflowError(
                f"role {self._name!r} has no endpoint {endpoint!r}",
                fix=nearest(endpoint, self._role.endpoints),
            )
        method: Callable[..., Any] = getattr(self._role, endpoint)
        stage = f"{self._name}.{endpoint}"
        return lambda *args, **options: self._flow.run_stage(stage, method, *args, **options)


class Flow:
    """Roles by name, run in this process, one stage after the other.

    Args:
        roles: the roles an algorithm may call.
        spans: where the time of every stage is recorded.
    """

    def __init__(self, roles: Mapping[str, Role], spans: Spans) -> None:
        self._handles = {name: RoleHandle(name, role, self) for name, role in roles.items()}
        self._spans = spans
        self._journal: list[StageResult] = []
        self.step = 0

    def __getattr__(self, role: str) -> RoleHandle:
        handles: dict[str, RoleHandle] = self.__dict__["_handles"]
        if role not in handles:
            raise RillflowError(f"the flow has no role {role!r}", fix=nearest(role, handles))
        return handles[role]

    def begin(self, step: int) -> None:
        """Start a step: its spans carry this number and the journal is empty."""
        self.step = step
        self._journal = []

    def journal(self, stage: str) -> list[Any]:
        """What a stage returned in this step, in order."""
        return [entry.result for entry in self._journal if entry.stage == stage]

    def batches(self) -> list[Batch]:
        """Every batch a stage returned in this step, in order."""
        return [entry.result for entry in self._journal if isinstance(entry.result, Batch)]

    def compute(self, formula: Callable[..., Field], *batches: Batch, into: str, **options: Any) -> Batch:
        """Apply a formula to fields of the joined batches; the formula's parameter names are the fields.

        Returns:
            The first batch with the formula's result added (or replaced) as the field ``into``.
        """
        stage = f"compute.{formula.__name__}"
        result: Batch = self.run_stage(stage, _apply, formula, batches, into, options)
        return result

    def publish(self, role: RoleHandle) -> None:
        """Make the role's trained weights those that are sampled next."""
        role.publish()

    def run_stage(self, stage: str, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run one stage under a span and journal its result."""
        with self._spans.span(stage, step=self.step) as span:
            result = method(*args, **options)
            if isinstance(result, Batch):
                span.rows = len(result)
                span.tokens = int(result.ragged("tokens").lengths.sum()) if "tokens" in result.fields else 0
        self._journal.append(StageResult(stage=stage, result=result))
        return result


def _apply(
    formula: Callable[..., Field], batches: tuple[Batch, ...], into: str, options: Mapping[str, Any]
) -> Batch:
    rows = joined(batches)
    names = [name for name in inspect.signature(formula).parameters if name not in options]
    missing = [name for name in names if name not in rows.fields]
    if missing:
        raise RecordError(
            f"formula {formula.__name__} reads the field {missing[0]!r}, which no batch it is given has",
            why=f"the fields are {', '.join(sorted(rows.fields))}",
            fix=nearest(missing[0], rows.fields),
        )
    return batches[0].with_fields(**{into: formula(**{name: rows.fields[name] for name in names}, **options)})
