"""Flow: the controller's side of an algorithm. The executor decides how each line runs.

    algorithm line                       meaning
    flow.policy.generate(prompts)        a stage of the role "policy"
    flow.compute(formula, batch, ...)    a formula over fields: its parameter names are the fields
    flow.number(formula, batch, ...)     a formula that returns one number
    flow.filter(batch, field, by=other)  the rows whose field (of another batch) is true
    flow.recall(name, initial)           a number that persists from step to step
    flow.remember(name, number)          set the number for the next steps
    flow.collect(name, rows)             the rows of all steps so far, and these
    flow.refill(draw, data, groups=n)    a round over the data, and over more of it until n groups are kept
    flow.publish(flow.policy)            the sampler uses the trained weights from now on

Results are handles: symbols in a trace (graph.trace), pending results on groups (executor). A step's
journal holds every stage's result, so an algorithm needs no lines to record or measure rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Protocol

from rillflow.controller import handles
from rillflow.errors import GraphError, nearest
from rillflow.graph.graph import CONTROLLER
from rillflow.graph.handle import Formula, Handle, Options
from rillflow.graph.loss import laid_flat
from rillflow.records.metrics import Mean, Metric, Sum

REFILLED = f"{CONTROLLER}.refill"
"""Stage that concatenates the rows of several rounds."""


class Executor(Protocol):
    """Executor of stages: it returns handles of their results."""

    @property
    def endpoints(self) -> Mapping[str, Collection[str]]:
        """Endpoints of every role, by name."""

    def call(self, role: str, endpoint: str, args: Sequence[Any], options: Options) -> Any:
        """Run one stage of a role."""

    def compute(self, formula: Formula, batches: Sequence[Any], into: str | None, options: Options) -> Any:
        """Apply a formula; return the first batch with the field ``into``, or a number if it is None."""

    def filter(self, batch: Any, field: str, by: Any = None) -> Any:
        """Return the rows of a batch whose field is true; ``by`` has the field if the batch does not."""

    def collect(self, name: str, batches: Sequence[Any]) -> Any:
        """Return the concatenated rows of batches of one kind."""


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """The result of one stage of a step."""

    stage: str
    """``role.endpoint`` or ``controller.formula``."""
    result: Any
    """Handle of the result."""
    is_number: bool = False
    """Whether the result is one number of a formula, not a field of rows."""
    into: str = ""
    """Field of rows that a formula wrote."""


@dataclass(frozen=True, kw_only=True)
class Supply:
    """Source of more data for a step; a traced step has none."""

    take: Callable[[int], Any]
    """Returns the next rows of the step's data."""
    gather: Callable[[Sequence[Any], int], Any]
    """Returns the first rows, up to a number, of several concatenated batches."""
    count: Callable[[Any, Sequence[Any]], int]
    """Waits for the results of stages and returns the number of rows of one of them."""


@dataclass(kw_only=True, eq=False)
class Journal:
    """The record of the current step."""

    supply: Supply | None = None
    """Source of more data for ``refill``."""
    stages: list[StageResult] = field(default_factory=list)
    """Stages of the step, in order."""
    measured: dict[str, Metric] = field(default_factory=dict)
    """Metrics of the controller."""
    published: Any = None
    """Handle of the published version; None before the step publishes."""


class RoleHandle:
    """A role as the controller sees it; each call of an endpoint is one stage."""

    def __init__(self, name: str, flow: Flow) -> None:
        self._name = name
        self._flow = flow

    def __getattr__(self, endpoint: str) -> Callable[..., Any]:
        return lambda *args, **options: self._flow.stage(self._name, endpoint, args, options)


class Flow:
    """Roles by name, and the stages of the current step.

    Args:
        executor: returns handles of stages.
        state: numbers that earlier steps remembered.
        rows: rows that earlier steps collected.
        seed: seed of the run, for formulas that draw random numbers.
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
        """Journal of the current step."""
        self.state: dict[str, Any] = dict(state or {})
        """Remembered values by name: numbers, or handles of numbers."""
        self.rows: dict[str, Any] = dict(rows or {})
        """Collected rows by name: handles."""
        self.seed = seed
        """Seed of the run, for formulas that draw random numbers."""

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
        """Start a step with a new journal; ``refill`` takes more data from ``supply``."""
        self.journal = Journal(supply=supply)

    def stage(self, role: str, endpoint: str, args: Sequence[Any], options: Options) -> Any:
        """Run one stage of a role."""
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
        """Apply a formula to fields and numbers; return a handle of its number."""
        result = self._executor.compute(formula, batches, None, options)
        return self._noted(f"{CONTROLLER}.{formula.__name__}", result, is_number=True)

    def filter(self, batch: Any, field: str, by: Any = None) -> Handle:
        """Return the rows whose boolean field is true.

        Args:
            batch: the rows.
            field: name of the field.
            by: the batch that has the field, matched by row id; None for ``batch`` itself.
        """
        return self._noted(f"{CONTROLLER}.where {field}", self._executor.filter(batch, field, by))

    def refill(
        self, draw: Callable[[Any], Sequence[Any]], data: Any, *, groups: int, samples: int, rounds: int
    ) -> Sequence[Any]:
        """Repeat a round over further data until enough groups of rows are kept.

        This is the only loop that depends on values: after each round the controller counts the kept rows.
        The next round draws as many prompts as the share kept so far predicts to be enough, at most
        ``groups``. The first ``groups`` x ``samples`` rows of all rounds are returned; the surplus is
        dropped. Without a supply, as in a trace, there is one round.

        Args:
            draw: runs one round on data; returns batches of the rows to keep, with the same whole groups.
            data: data of the first round.
            groups: number of groups to keep.
            samples: rows per group.
            rounds: largest number of rounds.
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
        """Return the number of groups that a round kept."""
        supply = self.journal.supply
        assert supply is not None
        return supply.count(kept[0], [entry.result for entry in self.journal.stages]) // samples

    def recall(self, name: str, initial: float) -> Any:
        """Return a number that an earlier step remembered; ``initial`` if no step did."""
        return self.state.get(name, initial)

    def remember(self, name: str, number: Any) -> None:
        """Store a number for the next step to recall; checkpoints keep it."""
        self.state[name] = number

    def collect(self, name: str, rows: Any) -> Handle:
        """Return the rows that earlier steps collected under this name, then these.

        They stay on one rank. Checkpoints keep them, and they are dropped when the phase ends.
        """
        earlier = [self.rows[name]] if name in self.rows else []
        self.rows[name] = self._executor.collect(name, [*earlier, rows])
        return self._noted(f"{CONTROLLER}.collect {name}", self.rows[name])

    def publish(self, role: handles.PolicyHandle) -> Handle:
        """Publish the role's trained weights; the sampler uses them next."""
        self.journal.published = version = role.publish()
        return version

    def _noted(self, stage: str, result: Handle, **kind: Any) -> Handle:
        self.journal.stages.append(StageResult(stage=stage, result=result, **kind))
        return result
