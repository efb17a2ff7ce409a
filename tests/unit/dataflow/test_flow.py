"""The controller: stages are timed and journalled, fields are matched by name, mistakes are named."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from rillflow import formulas
from rillflow.dataflow.flow import Flow
from rillflow.errors import RecordError, RillflowError
from rillflow.observe.spans import Span, Spans
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId

IDS = row_ids([RowId(0, prompt, sample) for prompt in range(2) for sample in range(2)])


class Doubler:
    """A role with one endpoint and one method that is none."""

    endpoints: tuple[str, ...] = ("double",)

    def double(self, batch: Batch) -> Batch:
        return batch.with_fields(tokens=Ragged.from_rows([[1, 2], [3], [], [4, 5, 6]]))

    def secret(self) -> int:
        return 1


@pytest.fixture
def spans() -> list[Span]:
    return []


@pytest.fixture
def flow(spans: list[Span]) -> Flow:
    return Flow({"doubler": Doubler()}, Spans(clock=time.monotonic, write=spans.append))


def scored(order: list[int]) -> Batch:
    batch = Batch(
        ids=IDS,
        fields={
            "rewards": torch.tensor([1.0, 0.0, 1.0, 1.0]),
            "groups": torch.tensor([0, 0, 1, 1]),
            "valid": torch.ones(4, dtype=torch.bool),
        },
    )
    return batch.select(order)


def test_a_stage_is_timed_and_journalled(flow: Flow, spans: list[Span]) -> None:
    flow.begin(7)
    result = flow.doubler.double(scored([0, 1, 2, 3]))
    assert flow.journal("doubler.double") == [result]
    assert flow.batches() == [result]
    assert [(span.stage, span.step, span.rows, span.tokens) for span in spans] == [
        ("doubler.double", 7, 4, 6)
    ]
    flow.begin(8)
    assert flow.batches() == []


def test_a_formula_reads_fields_by_its_parameters_names(flow: Flow) -> None:
    result = flow.compute(formulas.group_advantages, scored([0, 1, 2, 3]), into="advantages", scale="off")
    assert result.dense("advantages").tolist() == [0.5, -0.5, 0.0, 0.0]
    assert result.dense("rewards").tolist() == [1.0, 0.0, 1.0, 1.0]


def test_batches_are_joined_by_row_id_whatever_their_order(flow: Flow) -> None:
    def difference(rewards: Tensor, costs: Tensor) -> Tensor:
        return rewards - costs

    costs = Batch(ids=IDS, fields={"costs": torch.tensor([0.0, 1.0, 2.0, 3.0])}).select([3, 1, 0, 2])
    result = flow.compute(difference, scored([0, 1, 2, 3]), costs, into="gain")
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
        _ = flow.doubler.secret
