"""The controller: stages are journalled, fields are matched by name, mistakes are named."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rillflow import formulas
from rillflow.controller.executor import GroupExecutor
from rillflow.controller.flow import Flow
from rillflow.errors import RecordError, RillflowError
from rillflow.placement.mesh import Mesh
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.workers.backend import Pool, Site
from rillflow.workers.endpoint import endpoint, endpoints_of
from rillflow.workers.group import Group
from rillflow.workers.inline import InlineBackend
from rillflow.workers.transfer import DP

IDS = row_ids([RowId(0, prompt, sample) for prompt in range(2) for sample in range(2)])


class Doubler:
    """A role with one endpoint and one method that is none."""

    def __init__(self, _: Site) -> None:
        pass

    @endpoint(DP, reads=("rewards",), writes=("tokens",))
    def double(self, batch: Batch) -> Batch:
        return batch.with_fields(tokens=Ragged.from_rows([[1, 2], [3], [], [4, 5, 6]]))

    def secret(self) -> int:
        return 1


@pytest.fixture
def flow() -> Iterator[Flow]:
    backend = InlineBackend()
    backend.open([Pool(name="main", size=1)])
    group = Group("doubler", endpoints_of(Doubler), mesh=Mesh.of(dp=1), pool="main", backend=backend)
    group.start(Doubler)
    yield Flow(GroupExecutor({"doubler": group}, backend))
    backend.close()


def scored(order: list[int]) -> Batch:
    batch = Batch(
        ids=IDS,
        fields={
            "rewards": torch.tensor([1.0, 0.0, 1.0, 1.0]),
            "valid": torch.ones(4, dtype=torch.bool),
        },
    )
    return batch.select(order)


def test_a_stage_is_journalled_with_what_is_known_of_it(flow: Flow) -> None:
    flow.begin()
    result = flow.doubler.double(scored([0, 1, 2, 3]))
    assert [(entry.stage, entry.result) for entry in flow.journal.stages] == [("doubler.double", result)]
    (facts,) = result.facts()
    assert (facts.rows, facts.tokens) == (4, 6)
    assert facts.began <= facts.ended
    flow.begin()
    assert not flow.journal.stages


def test_numbers_are_remembered_from_step_to_step(flow: Flow) -> None:
    def larger(rewards: Tensor, *, than: float) -> float:
        return float(rewards.sum()) + than

    for expected in (3.5, 6.5):
        flow.remember("floor", flow.number(larger, scored([0, 1, 2, 3]), than=flow.recall("floor", 0.5)))
        assert flow.state["floor"].read() == expected


def test_rows_are_filtered_by_a_field(flow: Flow) -> None:
    def good(rewards: Tensor) -> Tensor:
        return rewards > 0.5

    kept = flow.filter(flow.compute(good, scored([0, 1, 2, 3]), into="kept"), "kept").read()
    assert kept.ids.tolist() == [[0, 0, 0], [0, 1, 0], [0, 1, 1]]


def test_a_formula_reads_fields_by_its_parameters_names(flow: Flow) -> None:
    result = flow.compute(
        formulas.group_advantages, scored([0, 1, 2, 3]), into="advantages", scale="off"
    ).read()
    assert result.dense("advantages").tolist() == [0.5, -0.5, 0.0, 0.0]
    assert result.dense("rewards").tolist() == [1.0, 0.0, 1.0, 1.0]


def test_batches_are_joined_by_row_id_whatever_their_order(flow: Flow) -> None:
    def difference(rewards: Tensor, costs: Tensor) -> Tensor:
        return rewards - costs

    costs = Batch(ids=IDS, fields={"costs": torch.tensor([0.0, 1.0, 2.0, 3.0])}).select([3, 1, 0, 2])
    result = flow.compute(difference, scored([0, 1, 2, 3]), costs, into="gain").read()
    assert result.dense("gain").tolist() == [1.0, -1.0, -1.0, -2.0]


def test_a_field_that_is_missing_is_named_with_the_nearest(flow: Flow) -> None:
    def gain(rewrads: Tensor) -> Tensor:
        return rewrads

    with pytest.raises(RecordError, match=r"gain reads the field 'rewrads'.*(?s:.*)did you mean 'rewards'"):
        flow.compute(gain, scored([0, 1, 2, 3]), into="gain")


def test_unknown_roles_and_endpoints_are_named(flow: Flow) -> None:
    with pytest.raises(RillflowError, match=r"no role 'dubler'(?s:.*)did you mean 'doubler'"):
        _ = flow.dubler
    with pytest.raises(RillflowError, match="no endpoint 'secret'"):
        flow.doubler.secret()


def test_rows_are_filtered_by_a_field_of_another_batch_in_any_order(flow: Flow) -> None:
    flags = Batch(ids=IDS, fields={"kept": torch.tensor([True, False, False, True])}).select([2, 3, 0, 1])
    kept = flow.filter(scored([1, 0, 2, 3]), "kept", by=flags).read()
    assert kept.ids.tolist() == [[0, 0, 0], [0, 1, 1]]
    assert "kept" not in kept.fields


def test_a_field_that_two_batches_have_is_the_first_ones(flow: Flow) -> None:
    def sums(rewards: Tensor, costs: Tensor, valid: Tensor) -> Tensor:
        return (rewards + costs) * valid

    costs = Batch(ids=IDS, fields={"costs": torch.ones(4), "valid": torch.zeros(4, dtype=torch.bool)})
    assert flow.compute(sums, scored([0, 1, 2, 3]), costs, into="sums").read().dense("sums").tolist() == [
        2.0,
        1.0,
        2.0,
        2.0,
    ]


def test_ids_and_groups_follow_from_the_rows(flow: Flow) -> None:
    def places(ids: Tensor, groups: Tensor) -> Tensor:
        return ids[:, 2] + 10 * groups

    bare = Batch(ids=IDS, fields={}).select([3, 0, 1])
    assert flow.compute(places, bare, into="places").read().dense("places").tolist() == [11, 0, 1]
