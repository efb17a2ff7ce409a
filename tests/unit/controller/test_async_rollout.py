"""Ready first: in whatever order ranks answer, no token is too old, and every group is trained once."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from fractions import Fraction
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from torch import Tensor

from rillflow.controller import replicas
from rillflow.controller.admission import CapacityBound, StalenessBound
from rillflow.controller.async_rollout import AsyncRollout
from rillflow.controller.decisions import Decisions, Event
from rillflow.controller.executor import GroupExecutor
from rillflow.controller.flight import GroupInFlight
from rillflow.controller.source import ChunkedResult, DataStream, GroupSampling
from rillflow.controller.weight_sync import PackedWeights, WeightSync
from rillflow.errors import ClusterError, RolloutError, RunDirectoryError
from rillflow.placement.mesh import Mesh
from rillflow.records.batch import Batch, concatenate, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.rollout import Finish, Rollout
from rillflow.records.row import RowId
from rillflow.roles.sampler import Sampler
from rillflow.rollout.config import RolloutConfig, SamplingConfig
from rillflow.rollout.engine import Capability
from rillflow.workers.backend import Place, Pool, RankCall
from rillflow.workers.endpoint import endpoints_of
from rillflow.workers.group import Group
from rillflow.workers.inline import InlineBackend, _Part
from rillflow.workers.pending import Pending

SAMPLES = 2


@pytest.fixture(autouse=True)
def _short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """No clock decides how long a call is."""
    monkeypatch.setattr(replicas, "MOST_PASSES", 4)


class Shuffled(InlineBackend):
    """Ranks do what they are asked in order; whose turn it is, chance decides, and some are slow."""

    def __init__(self, chance: Random) -> None:
        super().__init__()
        self._chance = chance
        self._calls: dict[Place, deque[tuple[Future[Any], RankCall, tuple[Any, ...]]]] = defaultdict(deque)
        self._speeds: dict[Place, float] = {}
        self._inside = set[Place]()
        self.stuck = False

    def submit(self, place: Place, work: RankCall, *arguments: Any, results: int = 1) -> tuple[Any, ...]:
        whole: Future[Any] = Future()
        self._calls[place].append((whole, work, arguments))
        return (whole,) if results == 1 else tuple(_Part(whole, index) for index in range(results))

    def wait_for_any(self, references: Sequence[Any], deadline_s: float) -> bool:
        while not any(each.done() for each in references) and self._turn():
            pass
        return any(each.done() for each in references)

    def read_all(self, references: Sequence[Any], deadline_s: float) -> list[Any]:
        while not all(each.done() for each in references) and self._turn():
            pass
        return super().read_all(references, 0)

    def _turn(self) -> bool:
        waiting = {place: calls for place, calls in self._calls.items() if place not in self._inside}
        busy = [place for place, calls in waiting.items() if calls and not self._is_stuck(calls[0][2])]
        for place in busy:
            self._speeds.setdefault(place, self._chance.choice([1, 1, 8]))
        if busy:
            (place,) = self._chance.choices(busy, [self._speeds[each] for each in busy])
            whole, work, arguments = self._calls[place].popleft()
            self._inside.add(place)  # a call that waits for another rank keeps its own
            whole.set_result(work(self._sites[place], *arguments))
            self._inside.remove(place)
        return bool(busy)

    def _is_stuck(self, arguments: Sequence[Any]) -> bool:
        """Whether a rank never comes to do this."""
        return self.stuck and arguments[0] == "sampler.take"


class Tailed:
    """An engine whose rows end after a number of tokens that is their own, some of them late."""

    can: ClassVar = frozenset({Capability.ROWS})

    def __init__(self, module: object, config: RolloutConfig, **_: object) -> None:
        self.version = 0
        self._most, self._rows = config.max_rows, dict[RowId, Rollout]()

    @property
    def has_work(self) -> bool:
        return bool(self._rows)

    def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        self.version = version

    def add(self, rollout: Rollout, sampling: SamplingConfig | None = None) -> None:
        assert rollout.row not in self._rows
        self._rows[rollout.row] = rollout

    def abort(self, row: RowId) -> Rollout:
        return self._rows.pop(row)

    def step(self) -> list[Rollout]:
        ended = []
        for row, rollout in list(self._rows.items())[: self._most]:
            grown = rollout.sampled([7], [-1.0], self.version)
            self._rows[row] = grown
            if len(grown.tokens) > 1 + min(60, Random(str(row)).paretovariate(0.8)):
                ended.append(grown.sampled([0], [-1.0], self.version, Finish.STOP))
                del self._rows[row]
        return ended

    def wake(self) -> None: ...

    def sleep(self) -> None: ...


class Log:
    """The file of decisions."""

    def __init__(self) -> None:
        self.events = list[Event]()

    def log_decisions(self, events: Sequence[Event]) -> None:
        self.events += events

    def cut_decisions(self, count: int) -> None:
        del self.events[count:]


class Weights:
    """Weights that are a number."""

    def __init__(self) -> None:
        self.version, self.canary, self.tp = 0, (), None
        self.module = SimpleNamespace(named_parameters=dict)

    def turn_to_generation(self, asleep: Callable[[], None]) -> None: ...


def take(sampler: Sampler, version: int) -> None:
    cast(Weights, sampler.weights).version = version


class Numbered:
    """A delivery of weights that are a number."""

    initial = PackedWeights(digests=cast(Pending, 0), buckets=())

    def __init__(self, executor: GroupExecutor) -> None:
        self._executor = executor

    def install(self, parcel: PackedWeights, ranks: Sequence[int]) -> list[Pending]:
        return [self._executor.on_ranks("sampler", ranks, take, parcel.digests)]

    def arrived(self, moved: Sequence[Pending]) -> None: ...

    def take(self) -> list[PackedWeights]:
        return []


class Trainer:
    """What trains: it takes its time."""


def train(_: Trainer) -> None: ...


def prompts(first: int, count: int) -> Batch:
    ids = row_ids([RowId(0, first + place, 0) for place in range(count)])
    columns = Ragged.from_text(["{}"] * count)
    return Batch(ids=ids, fields={"tokens": Ragged.from_rows([[5]] * count), "columns": columns})


@dataclass
class Found:
    """What a schedule came to."""

    trained: list[list[tuple[int, tuple[int, ...]]]]
    """Of each step its rows: the prompt, and the versions of the tokens."""
    given_up: list[tuple[int, str]]
    """Prompts whose rows were given up, with reasons."""
    left: list[int]
    """Prompts that were drawn and not trained."""
    drawn: int
    """Prompts that were drawn."""


class Scene:
    """Replicas, a trainer and what samples ready first."""

    def __init__(
        self,
        seed: int,
        k: int,
        groups: int,
        replicas: int,
        *,
        tp: int = 1,
        steps: int = 12,
        drops: bool = False,
        again: Batch | None = None,
        publishes: int = 1,
        chunks: int = 1,
        rows: int = 6,
        decisions: Decisions | None = None,
    ) -> None:
        self.chance, self.steps, self.groups, self.drawn = Random(seed), steps, groups, 0
        self.backend = backend = Shuffled(self.chance)
        mesh = Mesh.of(dp=replicas, tp=tp)
        backend.open([Pool(name="answers", size=replicas * tp), Pool(name="main", size=1)])
        made = {
            "sampler": Group("sampler", endpoints_of(Sampler), mesh=mesh, pool="answers", backend=backend),
            "policy": Group("policy", {}, mesh=Mesh.of(dp=1), pool="main", backend=backend),
        }
        config = RolloutConfig(max_rows=rows)
        made["sampler"].start(lambda _: sampler(config))
        made["policy"].start(lambda _: Trainer())
        self.executor = GroupExecutor(made, backend)
        rule: type[StalenessBound[GroupInFlight]] = CapacityBound if drops else StalenessBound
        self.ready = AsyncRollout(
            self.executor,
            DataStream(take=self._take, state=dict),
            cast(WeightSync, Numbered(self.executor)),
            rule=rule(freshness=k, prompts=groups, published=Fraction(1, publishes)),
            how=GroupSampling(
                groups=steps * groups,
                samples=SAMPLES,
                sampling=None,
                replicas=mesh.groups("tp"),
                deadline_s=5,
            ),
            step_groups=groups,
            parts=publishes,
            chunks=chunks,
            most_rows=rows,
            decisions=decisions,
            again=again,
        )
        self._times = publishes
        self.trained: deque[Pending] = deque()
        self.published = 0
        self.ready.begin(self._idle, 0)

    def run(self, publishes: bool = True) -> Found:
        """All steps, as the loop makes them."""
        found, given_up = [], []
        self._publishes = publishes
        for step in range(self.steps):
            self.ready.until(lambda: len(self.trained) < 3 * self._times)
            data = self.ready.take(step + 1, self.groups)
            made = self.ready.rows(self.executor.groups["sampler"], "generate", [data], {})
            assert made is not None
            rows: Batch = made.read()
            self.trained += [self.executor.on_first_rank("policy", train) for _ in range(self._times)]
            given_up += [(group[1], reason) for group, reason in self.ready.opened().given_up]
            assert rows.ids[:, 1].tolist() == [row for row in data.ids[:, 1].tolist() for _ in range(SAMPLES)]
            versions = rows.ragged("versions").lists()
            found.append(
                [
                    (row.prompt, tuple(version for version in each if version >= 0))
                    for row, each in zip(rows.row_ids(), versions, strict=True)
                ]
            )
        left = untrained(self)
        return Found(found, given_up, left.ids[:, 1].tolist() if left is not None else [], self.drawn)

    def _take(self, count: int) -> Batch:
        self.drawn += count
        return prompts(self.drawn - count, count)

    def _idle(self) -> list[Pending] | None:
        if not self.trained or not self.trained[0].is_ready:
            return [self.trained[0]] if self.trained else []
        self.trained.popleft()
        self.published += 1
        if self._publishes:
            self.ready.deliver(PackedWeights(digests=cast(Pending, self.published), buckets=()))
        return None


def untrained(scene: Scene) -> Batch | None:
    left = [*scene.ready._flight.table.left.values()]
    return concatenate(left) if left else None


def sampler(config: RolloutConfig) -> Sampler:
    model = SimpleNamespace(tokenizer=SimpleNamespace(stop_tokens=frozenset()), context=64)
    return Sampler(
        cast(Any, Weights()), model=cast(Any, model), rollout=config, seed=0, engine=cast(Any, Tailed)
    )


def check(found: Found, k: int, groups: int, before: Found | None = None) -> None:
    """The bound for every token, versions that only rise in a row, and every group once, whole."""
    seen = [prompt for rows in before.trained for prompt, _ in rows] if before is not None else []
    for step, rows in enumerate(found.trained):
        for prompt, versions in rows:
            assert step - k <= versions[0] and versions[-1] <= step and list(versions) == sorted(versions)
            seen.append(prompt)
        assert len(rows) == groups * SAMPLES
    counts = {prompt: seen.count(prompt) for prompt in seen}
    assert set(counts.values()) == {SAMPLES}
    assert sorted([*counts, *found.left]) == list(range(found.drawn))


def schedules(count: int) -> None:
    """Random bounds, sizes, replicas and speeds; a third drops what is late, a third dies in the middle."""
    interrupted = reordered = dropped = 0
    for seed in range(count):
        chance = Random(seed)
        k, groups, replicas = chance.randint(1, 4), chance.randint(1, 4), chance.randint(1, 3)
        rows, drops = chance.choice([2, 6, 40]), seed % 3 == 0
        scene = Scene(seed, k, groups, replicas, drops=drops, rows=rows)
        scene.steps = chance.randint(1, 11) if seed % 3 == 1 else 12
        found = scene.run()
        check(found, k, groups)
        if scene.steps < 12:
            again = Scene(
                seed,
                k,
                groups,
                replicas,
                steps=12 - scene.steps,
                again=untrained(scene),
                rows=rows,
            )
            again.drawn = found.drawn
            after = again.run()
            check(after, k, groups, before=found)
            assert not after.left
        order = [prompt for rows in found.trained for prompt, _ in rows]
        reordered += order != sorted(order)
        interrupted += any(versions[0] != versions[-1] for rows in found.trained for _, versions in rows)
        dropped += len(found.given_up)
        assert drops or not found.given_up
    assert interrupted > count / 4 and reordered > count / 4 and dropped


def test_bounded_staleness_in_random_schedules() -> None:
    schedules(30)


@pytest.mark.slow
def test_bounded_staleness_in_a_thousand_random_schedules() -> None:
    schedules(1000)


def test_dropped_groups_say_how_old_they_were_and_no_group_is_begun_in_vain() -> None:
    ages = list[int]()
    for seed in range(4):
        found = Scene(seed, 2, 3, 2, drops=True).run()
        ages += [int(reason.removeprefix("sampled ").split()[0]) for _, reason in found.given_up]
        assert not found.left
    assert ages and min(ages) > 2


@pytest.mark.parametrize("publishes", [2, 3])
def test_bounded_staleness_where_a_step_publishes_several_times(publishes: int) -> None:
    """The last rows of a step are trained by the version before its last publish."""
    newer = 0
    for seed in range(10):
        k = 2 * publishes
        scene = Scene(seed, k, 2 * publishes, 2, publishes=publishes)
        found = scene.run()
        for step, rows in enumerate(found.trained):
            part = len(rows) // publishes
            for place, (_, versions) in enumerate(rows):
                trains = step * publishes + place // part
                assert trains - k <= versions[0] and versions[-1] <= step * publishes + publishes - 1
                newer += versions[0] % publishes > 0
    assert newer


def test_the_ranks_of_a_replica_are_asked_the_same() -> None:
    check(Scene(3, 2, 3, 2, tp=2).run(), 2, 3)


def test_weights_that_are_never_published_end_in_an_error() -> None:
    with pytest.raises(RolloutError, match="none may start before version 1 of the phase is published"):
        Scene(1, 1, 2, 1).run(publishes=False)


def test_a_sampler_that_never_takes_new_weights_is_named() -> None:
    scene = Scene(1, 2, 2, 1)
    scene.backend.stuck = True
    with pytest.raises(ClusterError, match=r"sampler\.take has not answered on rank 0 of pool 'answers'"):
        scene.run()


def test_one_replica_takes_new_weights_at_a_time() -> None:
    scene, most, lags = Scene(2, 4, 4, 3), 0, list[int]()

    def watched() -> Sequence[Pending] | None:
        nonlocal most
        flight = scene.ready._flight
        most = max(most, sum(bool(each.arriving) for each in flight.replicas))
        versions = {each.received for each in flight.replicas}
        if flight.newest in versions and len(versions) > 1:
            lags.append(flight.lag)
        return scene._idle()

    scene.ready.begin(watched, 0)
    scene.run()
    assert most == 1
    assert lags and min(lags) > 0, "the replica that waits the longest counts, not one that is up to date"


@pytest.mark.parametrize(("advance_s", "passes"), [(0.0, 1), (1e9, 4)])
def test_a_call_is_as_long_as_earlier_calls_allow(
    monkeypatch: pytest.MonkeyPatch, advance_s: float, passes: int
) -> None:
    """A call adds one token where the shortest takes too long, and never more than ``MOST_PASSES``."""
    monkeypatch.setattr(replicas, "ADVANCE_S", advance_s)
    scene = Scene(5, 2, 2, 2)
    scene.run()
    assert {each.passes for each in scene.ready._flight.replicas} == {passes}


def test_a_step_that_asks_for_more_gets_other_groups_of_the_same_age() -> None:
    scene = Scene(4, 2, 2, 2)
    scene._publishes = True
    first, more = scene.ready.take(1, 2), scene.ready.more(3)
    assert (len(first), len(more)) == (2, 3)
    assert not {*first.ids[:, 1].tolist()} & {*more.ids[:, 1].tolist()}


def test_a_step_in_chunks_has_every_group_of_its_prompts_once() -> None:
    log, reordered = Log(), 0
    decisions = Decisions(log)
    scene = Scene(6, 0, 6, 2, chunks=3, decisions=decisions)
    scene._publishes = True
    for step in range(4):
        data = scene.ready.take(step + 1, 6)
        assert len(log.events) == decisions.position, "a process that is killed now loses no decision"
        made = scene.ready.rows(scene.executor.groups["sampler"], "generate", [data], {})
        assert isinstance(made, ChunkedResult) and made.count == 3
        chunks: list[Batch] = [made.chunk(index).read() for index in range(3)]
        assert [len(each) for each in chunks] == [2 * SAMPLES] * 3
        rows = concatenate(chunks).row_ids()
        groups = [row.group for row in data.row_ids()]
        assert sorted(rows) == [RowId(*group, sample) for group in groups for sample in range(SAMPLES)]
        reordered += rows != sorted(rows)
        scene.ready.opened()
        scene.trained.append(scene.executor.on_first_rank("policy", train))
    assert reordered


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_a_replay_repeats_every_decision_on_ranks_of_other_speeds(seed: int, drops: bool) -> None:
    """The ranks of the replay answer in another order; rows, versions and steps are those of the run."""
    log = Log()
    first = Scene(seed, 3, 3, 2, drops=drops, decisions=Decisions(log)).run()
    repeated = Decisions(None, log.events)
    second = Scene(seed + 100, 3, 3, 2, drops=drops, decisions=repeated).run()
    assert second.trained == first.trained and second.given_up == first.given_up
    assert repeated.head is None and repeated.position == len(log.events)


def test_another_call_of_the_sampler_is_on_disk_before_it_is_made() -> None:
    log = Log()
    scene = Scene(1, 2, 2, 2, decisions=Decisions(log))
    scene.ready.settle(0)
    assert log.events[-1] == ["beside", 0]


def test_a_replay_refuses_another_decision_and_a_resume_leaves_the_script_there() -> None:
    log = Log()
    log.log_decisions([["draw", 2], ["begin", 0, [0, 0]], ["form", []]])
    replayed, resumed = Decisions(None, log.events), Decisions(log, log.events)
    for each in (replayed, resumed):
        each.note("draw", 2)
    with pytest.raises(RunDirectoryError, match=r"decides \['begin', 1, \[0, 0\]\], and the run decided"):
        replayed.note("begin", 1, (0, 0))
    resumed.note("begin", 1, (0, 0))
    resumed.flush()
    assert log.events == [["draw", 2], ["left"], ["begin", 1, [0, 0]]]
    assert resumed.has_lost_steps and resumed.left.startswith("it decides")
