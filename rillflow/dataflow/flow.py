"""Flow: the controller's side of an algorithm. What its lines do is the executor's business.

    algorithm line                       what it is
    flow.policy.generate(prompts)        a stage of the role "policy"
    flow.compute(formula, batch, ...)    a formula over fields: its parameters name what it reads
    flow.number(formula, batch, ...)     the same, giving one number
    flow.filter(batch, field, by=other)  the rows whose field (of another batch) is true
    flow.recall(name, initial)           a number that lives from step to step ...
    flow.remember(name, number)          ... and what it is from now on
    flow.collect(name, rows)             the rows of all steps so far, and these
    flow.refill(draw, data, groups=n)    a round over the data, and over more of it until n groups are kept
    flow.publish(flow.policy)            the trained weights become those that are sampled

Results are handles: traced (graph.trace) they are symbols, on groups (dataflow.executor) they are
pending. A step's journal holds every stage's result, so that recording rollouts and measuring them is
nobody's line in an algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Protocol

from rillflow.dataflow import handles
from rillflow.errors import GraphError, nearest
from rillflow.graph.graph import CONTROLLER
from rillflow.graph.handle import Formula, Handle, Options
from rillflow.graph.loss import laid_flat
from rillflow.records.metrics import Mean, Metric, Sum

REFILLED = f"{CONTROLLER}.refill"
"""The stage that lays the rows of several rounds end to end."""


class Executor(Protocol):
    """Makes handles of stages."""

    @property
    def endpoints(self) -> Mapping[str, Collection[str]]:
        """The endpoints of every role, by name."""

    def call(self, role: str, endpoint: str, args: Sequence[Any], options: Options) -> Any:
        """One stage of a role."""

    def compute(self, formula: Formula, batches: Sequence[Any], into: str | None, options: Options) -> Any:
        """A formula; the first batch with its result as the field ``into``, or a number for None."""

    def filter(self, batch: Any, field: str, by: Any = None) -> Any:
        """The rows of a batch whose field is true; ``by`` has the field where the batch has not."""

    def collect(self, name: str, batches: Sequence[Any]) -> Any:
        """The rows of batches of one kind, laid end to end."""


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """What one stage of a step returned."""

    stage: str
    """``role.endpoint`` or ``controller.formula``."""
    result: Any
    """Its handle."""
    is_number: bool = False
    """Whether a formula made one number, not a field of rows."""
    into: str = ""
    """The field of rows that a formula made."""


@dataclass(frozen=True, kw_only=True)
class Supply:
    """What a step asks for more data; a traced step has none."""

    take: Callable[[int], Any]
    """The next rows of the step's data."""
    gather: Callable[[Sequence[Any], int], Any]
    """The first so many rows of several batches laid end to end."""
    deadline_s: float
    """Longest wait for a round's rows to be counted."""


@dataclass(kw_only=True, eq=False)
class Journal:
    """What a step has done so far."""

    supply: Supply | None = None
    """Where ``refill`` finds more."""
    stages: list[StageResult] = field(default_factory=list)
    """Its stages, in order."""
    measured: dict[str, Metric] = field(default_factory=dict)
    """What the controller itself measured of it."""
    published: Any = None
    """The handle of the version that it published; None before it does."""


class RoleHandle:
    """A role as the controller sees it: its endpoints, each call one stage."""

    def __init__(self, name: str, flow: Flow) -> None:
        self._name = name
        self._flow = flow

    def __getattr__(self, endpoint: str) -> Callable[..., Any]:
        return lambda *args, **options: self._flow.stage(self._name, endpoint, args, options)


class Flow:
    """Roles by name, and a step's stages one after the other.

    Args:
        executor: makes handles of stages.
        state: numbers that earlier steps remembered.
        rows: what earlier steps collected.
        seed: the run's, for formulas that draw.
    """

    policy: handles.PolicyHandle
    reference: handles.ReferenceHandle
    critic: handles.CriticHandle
    cost_critic: handles.CriticHandle
    reward: handles.ScorerHandle
    cost: handles.ScorerHandle
    reward_model: handles.PreferenceHandle
    judge: handles.PreferenceHandle

    def __init__(
        self,
        executor: Executor,
        state: Mapping[str, Any] | None = None,
        rows: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        self._executor = executor
        self.journal = Journal()
        """Of the present step."""
        self.state: dict[str, Any] = dict(state or {})
        """What was remembered, by name: numbers, or handles of numbers."""
        self.rows: dict[str, Any] = dict(rows or {})
        """What was collected, by name: handles of rows."""
        self.seed = seed
        """The run's, for formulas that draw."""

    def __getattr__(self, role: str) -> RoleHandle:
        roles = self.__dict__["_executor"].endpoints
        if role not in roles:
            raise GraphError(
                f"the flow has no role {role!r}",
                why=f"it has {', '.join(sorted(roles)) or 'none'}",
                fix=nearest(role, roles),
            )
        return RoleHandle(role, self)

    def begin(self, supply: Supply | None = None) -> None:
        """Start a step, with a new journal; ``supply`` is where ``refill`` finds more."""
        self.journal = Journal(supply=supply)

    def stage(self, role: str, endpoint: str, args: Sequence[Any], options: Options) -> Any:
        """One stage of a role."""
        known = self._executor.endpoints[role]
        if endpoint not in known:
            raise GraphError(
                f"role {role!r} has no endpoint {endpoint!r}",
                why=f"it has {', '.join(sorted(known))}",
                fix=nearest(endpoint, known),
            )
        args, options = laid_flat(f"{role}.{endpoint}", args, options)
        return self._noted(f"{role}.{endpoint}", self._executor.call(role, endpoint, args, options))

    def compute(self, formula: Callable[..., Any], *batches: Any, into: str, **options: Any) -> Handle:
        """Apply a formula to fields of the joined batches; the formula's parameter names are the fields.

        Returns:
            The first batch with the formula's result added (or replaced) as the field ``into``.
        """
        result = self._executor.compute(formula, batches, into, options)
        return self._noted(f"{CONTROLLER}.{formula.__name__}", result, into=into)

    def number(self, formula: Callable[..., Any], *batches: Any, **options: Any) -> Handle:
        """Apply a formula to fields and numbers; its result is a number, a handle as all results are."""
        result = self._executor.compute(formula, batches, None, options)
        return self._noted(f"{CONTROLLER}.{formula.__name__}", result, is_number=True)

    def filter(self, batch: Any, field: str, by: Any = None) -> Handle:
        """The rows whose boolean field is true.

        Args:
            batch: some rows.
            field: its name.
            by: the batch that has it, matched by row id; None for ``batch`` itself.
        """
        return self._noted(f"{CONTROLLER}.where {field}", self._executor.filter(batch, field, by))

    def refill(
        self, draw: Callable[[Any], Sequence[Any]], data: Any, *, groups: int, samples: int, rounds: int
    ) -> Sequence[Any]:
        """Repeat a round over further data until enough groups of rows are kept.

        The one loop that depends on values: after each round the controller counts the rows kept. A further
        round draws as many prompts as the share kept so far lets expect to be enough, at most ``groups``.
        Of the rows kept in all rounds the first ``groups`` x ``samples`` are returned, the surplus is not.
        Where there is no supply, as in a trace, there is one round.

        Args:
            draw: one round; given data, returns batches of the rows to keep, whole groups, alike in rows.
            data: of the first round.
            groups: how many are wanted.
            samples: rows of a group.
            rounds: the most that are made.
        """
        found, supply = [draw(data)], self.journal.supply
        if supply is None:
            return found[0]
        drawn, kept = len(data), self._groups(found[0], samples)
        while kept < groups and len(found) < rounds:
            more = supply.take(min(groups, ceil((groups - kept) * drawn / max(kept, 1))))
            found.append(draw(more))
            drawn, kept = drawn + len(more), kept + self._groups(found[-1], samples)
        trained = min(kept, groups)
        self.journal.measured |= {
            "refill/rounds/mean": Mean(total=len(found), count=1),
            "refill/groups/sum": Sum(value=drawn),
            "refill/kept/share": Mean(total=trained, count=drawn),
            "refill/surplus/sum": Sum(value=kept - trained),
        }
        if len(found) == 1:
            return found[0]
        columns = zip(*found, strict=True)
        return [self._noted(REFILLED, supply.gather(parts, groups * samples)) for parts in columns]

    def _groups(self, kept: Sequence[Any], samples: int) -> int:
        """The groups that a round kept."""
        from rillflow.workers.pending import wait_for

        supply = self.journal.supply
        assert supply is not None
        wait_for([entry.result for entry in self.journal.stages], supply.deadline_s)
        return int(sum(each.rows for each in kept[0].facts(supply.deadline_s))) // samples

    def recall(self, name: str, initial: float) -> Any:
        """A number as an earlier step left it; ``initial`` where none did."""
        return self.state.get(name, initial)

    def remember(self, name: str, number: Any) -> None:
        """What the next step recalls; checkpoints keep it."""
        self.state[name] = number

    def collect(self, name: str, rows: Any) -> Handle:
        """The rows that earlier steps collected under this name, then these.

        They lie on one rank; checkpoints keep them, and they go with the phase.
        """
        earlier = [self.rows[name]] if name in self.rows else []
        self.rows[name] = self._executor.collect(name, [*earlier, rows])
        return self._noted(f"{CONTROLLER}.collect {name}", self.rows[name])

    def publish(self, role: handles.PolicyHandle) -> Handle:
        """Make the role's trained weights those that are sampled next."""
        self.journal.published = version = role.publish()
        return version

    def _noted(self, stage: str, result: Handle, **kind: Any) -> Handle:
        self.journal.stages.append(StageResult(stage=stage, result=result, **kind))
        return result
