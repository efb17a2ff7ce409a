"""The first of two fused updates waits for the second; whatever needs it before has it run alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest

from rillflow.controller.executor import GroupExecutor
from rillflow.controller.source import Source
from rillflow.controller.step_executor import StepExecutor
from rillflow.errors import TrainingError
from rillflow.formulas import seeing
from rillflow.placement.mesh import Mesh
from rillflow.records.batch import Batch
from rillflow.records.metrics import Mean, Metric
from rillflow.workers.arguments import Pipelined, PipelineRun
from rillflow.workers.backend import Pool
from rillflow.workers.endpoint import endpoint, endpoints_of
from rillflow.workers.group import Group
from rillflow.workers.inline import InlineBackend
from rillflow.workers.transfer import BROADCAST, DP, SPLIT_DP_REDUCE
from rillflow_parts.fusion.alternating_calls import BatonSide
from rillflow_parts.fusion.fused_calls import FusedCalls
from rillflow_parts.fusion.shared_pipeline import SharedPipeline
from tests.unit.controller.test_async_rollout import prompts
from tests.unit.controller.test_source import stream

CALLS: list[str] = []
"""Calls of the ranks, in order."""
NOTES: list[str] = []
"""Notes to the user."""


class Trained(Pipelined):
    """A role that is updated."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pipeline = SimpleNamespace(run_passes=None, groups=None)
        self.runs = [PipelineRun(stage=0, passes=())]

    @property
    def side(self) -> BatonSide | None:
        shared = self.pipeline.run_passes
        return shared.side if isinstance(shared, SharedPipeline) else None

    def taken_runs(self) -> Sequence[PipelineRun]:
        taken, self.runs = self.runs, []
        return taken

    @endpoint(SPLIT_DP_REDUCE)
    def update(self, rows: Batch, fails: bool = False, after: object = None) -> dict[str, Metric]:
        CALLS.append(f"{self.name}.update{' beside' if self.side is not None else ''}")
        if self.side is not None:
            met = self.side.meet(self.name, lambda one, other: (f"{one} {other}", f"{other} {one}"))
            CALLS.append(f"{self.name} after {met}")
        if fails:
            raise TrainingError("the loss is inf")
        return {f"{self.name}/rows/mean": Mean(total=len(rows), count=1)}

    @endpoint(DP, reads=("tokens",), writes=("values",))
    def values(self, rows: Batch) -> Batch:
        CALLS.append(f"{self.name}.values")
        return rows.only().with_fields(values=rows.ids[:, 1].double())

    @endpoint(BROADCAST)
    def publish(self) -> int:
        CALLS.append(f"{self.name}.publish")
        return 1


@seeing("row")
def doubled(values: object) -> object:
    CALLS.append("formula")
    return values


@pytest.fixture
def steps() -> Iterator[StepExecutor]:
    backend = InlineBackend()
    backend.open([Pool(name="main", size=1), Pool(name="other", size=1)])
    made = {}
    names = {"policy": "main", "critic": "main", "cost_critic": "main", "reference": "main", "far": "other"}
    for name, pool in names.items():
        made[name] = Group(
            name, endpoints_of(Trained), mesh=Mesh.of(dp=1, pp=1, tp=1), pool=pool, backend=backend
        )
        made[name].start(lambda _, name=name: Trained(name))
    CALLS.clear()
    executor = GroupExecutor(made, backend)
    fused = FusedCalls(("policy", "critic"), ("policy", "critic", "cost_critic"), NOTES.append)
    yield StepExecutor(executor, Source(executor, stream()), fused)
    backend.close()


FUSED = [
    "critic.update beside",
    "policy.update beside",
    "critic after critic policy",
    "policy after policy critic",
]


def ran(steps: StepExecutor) -> list[str]:
    """The calls so far; those of pools that run in threads have ended."""
    for role in ("critic", "far"):
        steps.on_first_rank(role, named).read()
    return list(CALLS)


def named(role: Trained) -> str:
    return role.name


def test_two_updates_run_as_one_call_and_give_their_own_results(steps: StepExecutor) -> None:
    critic = steps.call("critic", "update", [prompts(0, 4)], {})
    assert CALLS == []
    policy = steps.call("policy", "update", [prompts(0, 3)], {})
    assert policy.read() == {"policy/rows/mean": Mean(total=3, count=1)}
    assert critic.read() == {"critic/rows/mean": Mean(total=4, count=1)}
    assert ran(steps) == FUSED
    facts = [each.facts()[0] for each in (critic, policy)]
    assert facts[0].began <= facts[1].began and facts[1].began <= facts[0].ended
    assert [len(each.runs) for each in facts] == [1, 1]


def test_stages_between_that_touch_neither_role_go_on(steps: StepExecutor) -> None:
    steps.call("critic", "update", [prompts(0, 4)], {})
    values = steps.call("cost_critic", "values", [prompts(0, 4)], {})
    steps.compute(doubled, [values], "values", {})
    steps.call("policy", "values", [prompts(0, 4)], {})
    steps.call("far", "values", [prompts(0, 4)], {})
    steps.call("policy", "update", [prompts(0, 4)], {})
    found = [each for each in ran(steps) if each != "far.values"]
    assert found == ["cost_critic.values", "formula", "policy.values", *FUSED]


@pytest.mark.parametrize("reader", ["critic.values", "reference.values", "critic.publish"])
def test_a_call_that_may_read_the_weights_has_the_update_run_before(steps: StepExecutor, reader: str) -> None:
    steps.call("critic", "update", [prompts(0, 4)], {})
    role, name = reader.split(".")
    steps.call(role, name, [prompts(0, 4)] if name == "values" else [], {})
    steps.call("policy", "update", [prompts(0, 4)], {})
    assert ran(steps) == ["critic.update", reader, "policy.update"]


def test_who_waits_for_the_held_report_has_it_run(steps: StepExecutor) -> None:
    critic = steps.call("critic", "update", [prompts(0, 4)], {})
    assert critic.read() == {"critic/rows/mean": Mean(total=4, count=1)}
    steps.call("policy", "update", [prompts(0, 4)], {})
    assert ran(steps) == ["critic.update", "policy.update"]


def test_an_update_whose_argument_needs_the_other_one_runs_after_it(steps: StepExecutor) -> None:
    critic = steps.call("critic", "update", [prompts(0, 4)], {})
    steps.call("policy", "update", [prompts(0, 4)], {"after": critic}).wait()
    assert ran(steps) == ["critic.update", "policy.update"]


def test_a_step_with_one_update_runs_it(steps: StepExecutor) -> None:
    steps.call("critic", "update", [prompts(0, 4)], {})
    steps.call("critic", "update", [prompts(0, 4)], {})
    assert ran(steps) == ["critic.update", "critic.update"]


@pytest.mark.parametrize("failing", ["critic", "policy"])
def test_an_error_of_one_update_is_told_with_its_place(steps: StepExecutor, failing: str) -> None:
    critic = steps.call("critic", "update", [prompts(0, 4)], {"fails": failing == "critic"})
    policy = steps.call("policy", "update", [prompts(0, 4)], {"fails": failing == "policy"})
    for each in (critic, policy):
        with pytest.raises(TrainingError, match="the loss is inf") as found:
            each.read()
        assert any(f"in {failing}.update" in note for note in found.value.__notes__)


def test_a_stopped_step_does_not_submit_the_held_update(steps: StepExecutor) -> None:
    steps.call("critic", "update", [prompts(0, 4)], {})
    steps.abandon()
    assert ran(steps) == []
