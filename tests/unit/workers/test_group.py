"""A group's calls: results on its ranks are distributed anew for the next call."""

from __future__ import annotations

import pytest

from rillflow.errors import GraphError
from rillflow.placement.mesh import Mesh
from rillflow.records.batch import Batch, row_ids
from rillflow.records.metrics import Max, Metric
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.workers.backend import Pool, Site
from rillflow.workers.endpoint import endpoint, endpoints_of
from rillflow.workers.group import Group
from rillflow.workers.inline import InlineBackend
from rillflow.workers.transfer import DP, SPLIT_DP_REDUCE, SPLIT_PAIRS_REDUCE


class Trainer:
    """Returns the largest number of tokens of a rank."""

    def __init__(self, site: Site) -> None:
        del site

    @endpoint(DP)
    def same(self, batch: Batch) -> Batch:
        return batch

    @endpoint(SPLIT_DP_REDUCE)
    def update(self, batch: Batch) -> dict[str, Metric]:
        return {"tokens/rank/max": Max(value=float(batch.ragged("tokens").lengths.sum()))}

    @endpoint(SPLIT_PAIRS_REDUCE)
    def update_on_pairs(self, batch: Batch) -> dict[str, Metric]:
        return self.update(batch)


@pytest.mark.parametrize("name", ["update", "update_on_pairs"])
def test_ranks_that_train_get_as_many_tokens_though_their_rows_lie_elsewhere(name: str) -> None:
    """Two rows of six tokens and twelve of one: one rank gets the two, the other the twelve."""
    rows = [[1] * 6] * 2 + [[1]] * 12
    batch = Batch(
        ids=row_ids([RowId(0, row, 0) for row in range(len(rows))]),
        fields={"tokens": Ragged.from_rows(rows)},
    )
    backend = InlineBackend()
    backend.open([Pool(name="main", size=2)])
    group = Group("policy", endpoints_of(Trainer), mesh=Mesh.of(dp=2), pool="main", backend=backend)
    group.start(Trainer)
    lying = group.call("same", batch)
    assert [facts.rows for facts in lying.facts(10.0)] == [7, 7]
    assert group.call(name, lying).read(10.0) == {"tokens/rank/max": Max(value=12.0)}
    backend.close()


def test_an_endpoint_with_a_measure_names_what_it_writes() -> None:
    """Otherwise the controller would not know that its result has rows, and would omit its metrics."""
    with pytest.raises(GraphError) as caught:

        class Verifier:
            @endpoint(DP, reads=("tokens",), measures=lambda _: {})
            def verify(self, batch: Batch) -> Batch:
                return batch

    error = caught.value
    assert "endpoint 'verify' has a measure" in error.what and error.why and "writes=" in error.fix
