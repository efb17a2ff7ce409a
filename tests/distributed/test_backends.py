"""Groups behave alike on all backends: rows return in order, reports are reduced, errors name their rank."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from rillflow.controller.executor import GroupExecutor
from rillflow.controller.flow import Flow
from rillflow.errors import ClusterError, GraphError, PlacementError, RecordError, RillflowError
from rillflow.formulas import group_advantages
from rillflow.placement.mesh import Mesh
from rillflow.placement.sbp import Partial, Split
from rillflow.records.batch import Batch, row_ids
from rillflow.records.metrics import Max, Mean
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.workers.backend import Backend, Pool, Site, places
from rillflow.workers.endpoint import endpoint, endpoints_of
from rillflow.workers.group import Group
from rillflow.workers.inline import InlineBackend
from rillflow.workers.pending import MANY, joined
from rillflow.workers.processes import ProcessBackend
from rillflow.workers.start import ray_backend
from rillflow.workers.transfer import Transfer

sys.path.insert(0, str(Path(__file__).parent))
from programs import Unmakeable, Worker, half_of, leave_open, overwriting

POOLS = [Pool(name="one", size=1), Pool(name="two", size=2), Pool(name="four", size=4)]
WAIT_S = 60.0

Groups = Callable[..., Group]


def backend_of(kind: str, deadline_s: float = WAIT_S) -> Backend:
    if kind == "inline":
        return InlineBackend(deadline_s)
    if kind == "process":
        return ProcessBackend(deadline_s)
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    return ray_backend(deadline_s)


@pytest.fixture(scope="module", params=["inline", "process", "ray"])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    """Yield a backend with an open resource on every rank, which must close with the backend, not before."""
    made, closed = backend_of(request.param), tmp_path_factory.mktemp("closed")
    made.open(POOLS)
    for place in places(POOLS):
        made.read_all(made.submit(place, leave_open, closed), WAIT_S)
    yield made
    assert not list(closed.iterdir())
    made.close()
    assert len(list(closed.iterdir())) == sum(pool.size for pool in POOLS)


@pytest.fixture(scope="module")
def groups(backend: Backend) -> dict[int, Group]:
    """Return a group of workers by size."""
    found = {}
    for pool in POOLS:
        group = Group(
            f"worker{pool.size}",
            endpoints_of(Worker),
            mesh=Mesh.of(dp=pool.size),
            pool=pool.name,
            backend=backend,
        )
        group.start(Worker)
        found[pool.size] = group
    return found


def rows(count: int, **fields: Any) -> Batch:
    ids = row_ids([RowId(0, index, 0) for index in range(count)])
    return Batch(ids=ids, fields={"x": torch.arange(float(count)), **fields})


@pytest.mark.parametrize("count", [1, 3, 10])
@pytest.mark.parametrize(("first", "second"), [(1, 4), (2, 4), (4, 2), (4, 4), (4, 1)])
def test_rows_pass_from_group_to_group_in_order(
    count: int, first: int, second: int, groups: dict[int, Group]
) -> None:
    """Includes numbers of rows that the ranks do not divide, and ranks without a row."""
    batch = rows(count)
    doubled = groups[first].call("double", batch)
    found = groups[second].call("join", doubled, batch).read(WAIT_S)
    assert torch.equal(found.ids, batch.ids)
    assert torch.equal(found.dense("y"), 2 * batch.dense("x"))
    assert torch.equal(found.dense("x"), batch.dense("x"))
    assert found.dense("rank").tolist() == sorted(found.dense("rank").tolist())


def test_ranks_that_train_under_one_mesh_generate_under_another(backend: Backend) -> None:
    """Training has tp 4; generation has tp 2 with the groups 0, 2 and 1, 3: two replicas.

    The second group is another object on the same ranks, and its stages carry the first group's name.
    """
    meshes = {
        "trained": Mesh.of(dp=1, pp=1, tp=4),
        "generated": Mesh.of(ranks=[0, 2, 1, 3], dp=1, micro_dp=2, pp=1, tp=2),
    }
    groups = {
        name: Group(name, endpoints_of(Worker), mesh=mesh, pool="four", backend=backend, of="regrouped")
        for name, mesh in meshes.items()
    }
    batch = rows(5)
    for group in groups.values():
        group.start(Worker)
    trained = groups["trained"].call("by_data_rank", batch)
    generated = groups["generated"].call("by_replica", batch)
    assert trained.stage == "regrouped.by_data_rank" and generated.stage == "regrouped.by_replica"
    assert torch.equal(trained.read(WAIT_S).ids, batch.ids)
    assert torch.equal(generated.read(WAIT_S).ids, batch.ids)
    assert trained.read(WAIT_S).dense("rank").tolist() == [0, 0, 0, 0, 0]
    assert generated.read(WAIT_S).dense("rank").tolist() == [0, 0, 0, 1, 1]


def test_results_of_uneven_lengths_are_shared_out_again(groups: dict[int, Group]) -> None:
    batch = rows(13)
    part = groups[4].call("first_half", batch)
    kept = part.read(WAIT_S)
    doubled = groups[2].call("double", part).read(WAIT_S)
    assert 0 < len(kept) < 13
    assert torch.equal(doubled.ids, kept.ids)
    assert torch.equal(doubled.dense("y"), kept.dense("x") * 2)


def test_rows_in_many_parts_are_shared_out_by_a_table(groups: dict[int, Group]) -> None:
    """With more parts than fit in a message, one rank gathers their descriptions for the others."""
    batches = [rows(3 + index % 2) for index in range(18)]
    parts = joined("worker2.same", [groups[2].call("same", batch) for batch in batches])
    assert len(parts.holders) > MANY
    doubled = groups[4].call("double", parts).read(WAIT_S)
    assert torch.equal(doubled.ids, torch.cat([batch.ids for batch in batches]))
    assert groups[2].call("measure", parts).read(WAIT_S)["x/all/mean"].count == sum(map(len, batches))
    assert torch.equal(parts.read(WAIT_S).ids, doubled.ids)


def test_the_fields_that_an_endpoint_reads_travel_and_no_others(
    backend: Backend, groups: dict[int, Group]
) -> None:
    """Four ranks hold two fields of 4 MiB each; four ranks, then two, read only one of them."""
    made = groups[4].call("make_two", rows(4), numbers=2**20)
    for ranks, parts in ((4, 1), (2, 2)):
        before = groups[ranks].call("weigh", groups[ranks].call("scale", rows(4), by=1.0))
        first = before.read(WAIT_S).dense("fetched")
        after = groups[ranks].call("weigh", made).read(WAIT_S).dense("fetched")
        more = [int(after[-1]) - int(first[-1]), parts * 4 * 2**20]
        more[1] = 0 if isinstance(backend, ProcessBackend) else more[1]  # fields are mapped, not fetched
        assert isinstance(backend, InlineBackend) or more[1] <= more[0] < 1.1 * more[1] + 2**16


def test_every_kind_of_field_travels_unchanged(groups: dict[int, Group]) -> None:
    batch = rows(
        5,
        half=torch.randn(5, 3).bfloat16(),
        flag=torch.tensor([True, False, True, True, False]),
        text=Ragged.from_text(["", "å", "two words", "x", "y"]),
        tokens=Ragged.from_rows([[1], [2, 3], [], [4, 5, 6], [7]], torch.int64),
    )
    found = groups[2].call("same", groups[4].call("same", batch)).read(WAIT_S)
    assert torch.equal(found.dense("half"), batch.dense("half"))
    assert torch.equal(found.dense("flag"), batch.dense("flag"))
    assert found.ragged("text").to_text() == batch.ragged("text").to_text()
    assert torch.equal(found.ragged("tokens").values, batch.ragged("tokens").values)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shares_of_a_report_become_one(size: int, groups: dict[int, Group]) -> None:
    report = groups[size].call("measure", rows(10)).read(WAIT_S)
    assert report == {"x/all/mean": Mean(total=45.0, count=10), "x/all/max": Max(value=9.0)}


def test_sums_have_the_bits_of_adding_in_the_order_of_ranks(groups: dict[int, Group]) -> None:
    """Both backends are compared with the same sum, so they agree."""
    parts = [torch.randn(1000, generator=torch.Generator().manual_seed(7 + rank)) for rank in range(4)]
    total, exact = parts[0].clone(), parts[0].double()
    for part in parts[1:]:
        total += part
        exact += part.double()
    found = groups[4].call("add_up", seed=7).read(WAIT_S)
    assert torch.equal(found, torch.cat([total.double(), exact]))


def test_every_rank_hears_from_all(groups: dict[int, Group]) -> None:
    heard = [[], [1.0], [2.0, 2.0], [3.0, 3.0, 3.0]]
    assert groups[4].call("gather").read(WAIT_S) == [heard] * 4


def test_three_axes(backend: Backend, groups: dict[int, Group]) -> None:
    """Over a mesh of pipeline, data and tensor ranks, results come from the last stage's first ranks."""
    mesh = Mesh.of(pp=2, dp=2, tp=1)
    group = Group("worker4", endpoints_of(Worker), mesh=mesh, pool="four", backend=backend)
    assert group.call("by_data_rank", rows(6)).read(WAIT_S).dense("rank").tolist() == [2, 2, 2, 3, 3, 3]


def test_pools_run_side_by_side_and_ranks_in_turn(groups: dict[int, Group], tmp_path: Path) -> None:
    batch, mine, other = rows(4), tmp_path / "mine", tmp_path / "other"
    first = groups[2].call("meet", batch, mine=mine, other=other)
    beside = groups[4].call("meet", batch, mine=other, other=mine)
    after = groups[2].call("sleep", batch, seconds=0.1)
    ranks = [pending.facts(WAIT_S) for pending in (first, beside, after)]
    began = [min(each.began for each in facts) for facts in ranks]  # any rank of a call lets the other end
    ended = [max(each.ended for each in facts) for facts in ranks]
    assert began[1] < ended[0] and began[0] < ended[1]
    assert ranks[2][0].began >= ranks[0][0].ended


def test_the_controller_weighs_what_passes_through_it(backend: Backend, groups: dict[int, Group]) -> None:
    """Counts the bytes that are sent and read, and also a small result that returns without a read."""
    traffic, mib = backend.traffic, 2**20
    before = traffic.sent_bytes, traffic.read_bytes
    large = groups[2].call("same", rows(64, big=torch.ones(64, 2**14)))
    large.wait(WAIT_S)
    sent, unread = traffic.sent_bytes - before[0], traffic.read_bytes - before[1]
    large.read(WAIT_S)
    read = traffic.read_bytes - before[1]
    groups[2].call("same", rows(64, little=torch.ones(64, 2**8))).wait(WAIT_S)
    beside = traffic.read_bytes - before[1] - read
    if isinstance(backend, InlineBackend):
        assert (sent, unread, read, beside) == (0, 0, 0, 0)
    else:
        assert 4 * mib < sent < 4.1 * mib
        assert unread < 0.01 * mib
        assert 4 * mib < read < 4.1 * mib
        is_mapped = isinstance(backend, ProcessBackend)  # two arrays of 32 KiB stay in shared memory
        assert (0 < beside < mib / 100) if is_mapped else (mib / 16 < beside < mib / 12)


def test_a_small_part_that_a_rank_takes_as_it_lies_is_weighed_on_its_way_there_too(
    backend: Backend, groups: dict[int, Group]
) -> None:
    """Ray sends it with the call: 64 KiB return with one call, leave with the next, and return again."""
    if isinstance(backend, InlineBackend | ProcessBackend):
        pytest.skip("nothing travels in one process or between processes of one machine")
    doubled = groups[2].call("double", rows(64, x=torch.ones(64, 2**8)))
    doubled.wait(WAIT_S)
    before = backend.traffic.read_bytes
    groups[2].call("same", doubled).wait(WAIT_S)
    assert 2**17 < backend.traffic.read_bytes - before < 1.1 * 2**17


def test_batches_do_not_pass_through_the_controller(backend: Backend, groups: dict[int, Group]) -> None:
    """The controller counts less than 1 of 64 MiB that pass from group to group."""
    before = backend.traffic.sent_bytes + backend.traffic.read_bytes
    made = groups[2].call("make", rows(64), numbers=2**18)
    groups[4].call("same", made).wait(WAIT_S)
    assert sum(facts.rows for facts in made.facts(WAIT_S)) == 64
    assert backend.traffic.sent_bytes + backend.traffic.read_bytes - before < 2**20


def test_no_bytes_through_the_controller_in_a_step_of_ppo(backend: Backend) -> None:
    """no-bytes-through-the-controller: every edge of PPO's graph moves, between pools of unequal sizes."""
    if find_spec("ray") is None:
        pytest.skip("the roles stand in a benchmark that needs Ray")
    from controller import scripted_step

    passed = scripted_step(backend, {"two": 2, "four": 4}, rollout_bytes=16 * 2**20)()
    assert passed.rollout_bytes >= 16 * 2**20
    share = 16 if isinstance(backend, ProcessBackend) else 64  # Ray's ranks fetch facts from each other
    assert passed.counted_bytes < passed.rollout_bytes / share
    if not isinstance(backend, InlineBackend):
        assert passed.counted_bytes > 2**10, "the count counts"
        assert passed.socket_bytes < passed.rollout_bytes / 16
        assert passed.mapped_bytes < passed.rollout_bytes / 16


def test_references_among_options_arrive(backend: Backend, groups: dict[int, Group]) -> None:
    """A pending passed by keyword is the same for every rank."""
    number = GroupExecutor({"worker4": groups[4]}, backend).compute(half_of, [rows(3)], None, {})
    found = groups[4].call("scale", rows(6), by=number).read(WAIT_S)
    assert torch.equal(found.dense("x"), rows(6).dense("x") * 1.5)


def test_a_rank_that_raises_is_named(groups: dict[int, Group]) -> None:
    with pytest.raises(ClusterError) as caught:
        groups[4].call("fail", rows(8), rank=2).read(WAIT_S)
    for word in (
        "ValueError",
        "worker4.fail",
        "rank 2 of pool 'four', given 2 rows",
        "one divided by none",
        "programs.py:",
        'in fail: raise ValueError("one divided by none")',
    ):
        assert word in str(caught.value)


def test_an_error_is_raised_while_other_ranks_still_work(groups: dict[int, Group], tmp_path: Path) -> None:
    """If the caller waited for the other ranks, the error would be the deadline."""
    end = tmp_path / "end"
    try:
        with pytest.raises(ClusterError, match=r"ValueError in worker2\.fail_alone on rank 1"):
            groups[2].call("fail_alone", rows(4), until=end).read(WAIT_S / 2)
    finally:
        end.touch()


def test_an_error_reaches_whoever_waits_further_down(groups: dict[int, Group]) -> None:
    broken = groups[2].call("fail", rows(8), rank=1)
    with pytest.raises(ClusterError, match=r"ValueError in worker2\.fail on rank 1"):
        groups[4].call("double", broken).read(WAIT_S)


def test_an_error_reaches_whoever_takes_parts_as_they_lie(groups: dict[int, Group]) -> None:
    broken = groups[2].call("double", Batch(ids=rows(4).ids, fields={}))
    for waiting in (groups[2].call("same", broken), groups[2].call("same", groups[2].call("double", broken))):
        with pytest.raises(RecordError, match=r"worker2\.double reads the field 'x'"):
            waiting.read(WAIT_S)


def test_an_error_a_user_can_mend_keeps_its_words(groups: dict[int, Group]) -> None:
    with pytest.raises(RecordError, match="no field 'z'") as caught:
        groups[2].call("complain", rows(2)).read(WAIT_S)
    assert caught.value.fix == "add it"


def test_an_unknown_endpoint_is_refused(groups: dict[int, Group]) -> None:
    with pytest.raises(ClusterError, match="no endpoint 'dubble'") as caught:
        groups[2].call("dubble", rows(1))
    assert "double" in caught.value.fix


def test_what_is_to_be_cut_by_rows_is_a_batch(groups: dict[int, Group]) -> None:
    with pytest.raises(ClusterError, match="is not a batch"):
        groups[4].call("double", groups[2].call("measure", rows(4))).read(WAIT_S)


def test_a_result_that_is_looked_at_says_where_values_are(groups: dict[int, Group]) -> None:
    doubled = groups[1].call("double", rows(2))
    for look, asked in (
        (bool, "the truth value"),
        (lambda it: it.dense("y"), "'dense'"),
        (len, "the length"),
    ):
        with pytest.raises(GraphError, match=f"reads {asked} of the result of worker1.double"):
            look(doubled)  # type: ignore[operator]


def test_a_batch_that_is_written_to_is_refused(group: Group, flow: Flow) -> None:
    """On Ray, the batch lies in the object store, which all ranks of the machine share."""
    words = ("overwriting wrote into the field 'x' of a batch it was given", "values.clone()")
    for batch in (rows(4), rows(4, x=torch.ones(4, 2**14))):
        made = group.call("same", batch)
        refused(RecordError, lambda made=made: flow.compute(overwriting, made, into="y").read(WAIT_S), *words)


# Invalid values: the error names them, and the ranks keep working.

LOCK = threading.Lock()
"""A value that cannot be pickled."""


class Misplaced:
    """A transfer with an invalid placement of arguments."""

    def __init__(self, _: Site) -> None:
        pass

    @endpoint(Transfer(name="ODD", send={"data": Split(0)}, receive={"dp": Split(0)}))
    def double(self, batch: Batch) -> Batch:
        return batch


class Misread(Misplaced):
    """A transfer with an invalid placement of results."""

    @endpoint(Transfer(name="ODD", send={"dp": Split(0)}, receive={"dps": Partial()}))
    def double(self, batch: Batch) -> Batch:
        return batch


@pytest.fixture
def group(groups: dict[int, Group]) -> Iterator[Group]:
    """Yield two workers that must still work after every refusal."""
    yield groups[2]
    doubled = groups[2].call("double", rows(4)).read(WAIT_S)
    assert doubled.dense("y").tolist() == [0.0, 2.0, 4.0, 6.0]


@pytest.fixture
def flow(group: Group, backend: Backend) -> Flow:
    return Flow(GroupExecutor({"worker": group}, backend))


def cast(backend: Backend, *, kind: type = Worker, pool: str = "two", ranks: int = 2) -> Group:
    """Return a group for a role called critic that is not started."""
    return Group("critic", endpoints_of(kind), mesh=Mesh.of(dp=ranks), pool=pool, backend=backend)


def refused(kind: type[RillflowError], run: Callable[[], object], *words: str) -> None:
    """Check that the error has this kind, all three parts, and the words."""
    with pytest.raises(kind) as caught:
        run()
    error = caught.value
    assert error.what and error.why and error.fix
    for word in words:
        assert word in str(error)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["given", "on other ranks"])
def test_a_field_that_is_missing_is_named(elsewhere: bool, group: Group) -> None:
    batch = Batch(ids=rows(4).ids, fields={"xs": torch.arange(4.0)})
    given = group.call("same", batch) if elsewhere else batch
    words = ("worker2.double reads the field 'x'", "the fields are xs", "did you mean 'xs'?")
    refused(RecordError, lambda: group.call("double", given).read(WAIT_S), *words)


def test_a_role_without_a_pool(group: Group, backend: Backend) -> None:
    words = ("role 'critic' is on pool 'tow'", "one of 1, two of 2, four of 4", "did you mean 'two'?")
    refused(ClusterError, lambda: cast(backend, pool="tow"), *words)


def test_a_mesh_larger_than_its_pool(group: Group, backend: Backend) -> None:
    words = ("role 'critic' needs rank 2 of pool 'two'", "the pool has 2 ranks")
    refused(ClusterError, lambda: cast(backend, ranks=3), *words)


def test_a_mesh_without_ranks(group: Group, backend: Backend) -> None:
    with pytest.raises(PlacementError, match="axis 'dp' has size 0"):
        cast(backend, ranks=0)


def test_two_roles_of_one_name(group: Group, backend: Backend) -> None:
    second = Group("worker2", endpoints_of(Worker), mesh=Mesh.of(dp=2), pool="two", backend=backend)
    words = ("two roles are called 'worker2' on rank", "of pool 'two'", "its own name")
    refused(ClusterError, lambda: second.start(Worker), *words)


@pytest.mark.parametrize(("kind", "axis"), [(Misplaced, "data"), (Misread, "dps")])
def test_an_axis_that_the_mesh_has_not(kind: type, axis: str, group: Group, backend: Backend) -> None:
    words = (f"critic.double places values along the axis '{axis}'", "its axes are dp")
    refused(PlacementError, lambda: cast(backend, kind=kind), *words)


def test_what_cannot_become_bytes(group: Group, flow: Flow, backend: Backend) -> None:
    if isinstance(backend, InlineBackend):
        pytest.skip("nothing becomes bytes in one process")
    calls: dict[str, Callable[[], object]] = {
        "option of worker2.sleep: 'seconds'": lambda: group.call("sleep", rows(2), seconds=LOCK),
        "an argument of worker2.same, lock,": lambda: group.call("same", LOCK),
        "the factory of critic": lambda: cast(backend).start(lambda site: (LOCK, site)),
        "an argument of <lambda>": lambda: flow.compute(lambda x: (LOCK, x)[1], rows(2), into="y"),
        "option of group_advantages: 'scale'": lambda: flow.compute(
            group_advantages, rows(2), into="y", scale=LOCK
        ),
    }
    for named, call in calls.items():
        refused(ClusterError, call, f"{named} cannot be serialised: cannot pickle '_thread.lock' object")


def test_a_result_that_cannot_become_bytes(group: Group, backend: Backend) -> None:
    if isinstance(backend, InlineBackend):
        pytest.skip("nothing becomes bytes")
    words = ("the result of worker2.lock on rank", "of pool 'two' cannot be serialised", "pass plain values")
    refused(ClusterError, lambda: group.call("lock").read(WAIT_S), *words)


def test_what_is_too_large_for_an_argument(group: Group, backend: Backend) -> None:
    if isinstance(backend, InlineBackend | ProcessBackend):
        pytest.skip("options do not travel, or through shared memory")
    large = b"0" * (17 * 2**20)
    calls: dict[str, Callable[[], object]] = {
        "option of worker2.sleep: 'seconds'": lambda: group.call("sleep", rows(2), seconds=large, rank=0),
        "an argument of worker2.same, bytes,": lambda: group.call("same", large),
    }
    for named, call in calls.items():
        refused(
            ClusterError, call, f"{named} takes 17 MiB", "the limit is 16 MiB", "put large data into a batch"
        )


def test_a_role_that_raises_in_its_constructor(group: Group, backend: Backend) -> None:
    words = ("OSError in making critic on rank", "of pool 'two'", "no weights on rank")
    refused(ClusterError, lambda: cast(backend, kind=Unmakeable).start(Unmakeable), *words)


def test_a_batch_without_rows_is_refused(group: Group) -> None:
    words = ("worker2.double was called with a batch of 0 rows", "the mean of no rows")
    refused(ClusterError, lambda: group.call("double", rows(0)), *words)


def test_a_filter_that_leaves_no_row_stops_nothing(group: Group, flow: Flow) -> None:
    """If all rows of a step are dropped, the step learns nothing and continues: the mean has the count 0."""
    kept = flow.filter(flow.compute(lambda x: x < 0, rows(5), into="kept"), "kept")
    assert len(group.call("double", kept).read(WAIT_S)) == 0
    assert group.call("measure", kept).read(WAIT_S)["x/all/mean"] == Mean(total=0.0, count=0)
