"""The simulator: order, faults and clock of its ranks, data loss on its disk, detections of its oracle."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from rillflow.runs.durable import append, replace
from rillflow.workers.backend import Place, Pool, RankLost, Site
from rillflow.workers.collectives import Stranded
from tests.simulation.backend import HEALTH_S, SimulatedBackend
from tests.simulation.disk import FakeDisk
from tests.simulation.oracle import problems
from tests.simulation.timeline import DriverKilled, Timeline
from tests.simulation.world import Scenario, World

ONE, OTHER = Place("one", 0), Place("other", 0)
Plan = dict[int, Callable[[Timeline], None]]


def made(seed: int = 0, plan: Plan | None = None) -> SimulatedBackend:
    """Return two pools of one rank."""
    backend = SimulatedBackend(Timeline(Random(seed), plan or {}, ""))
    backend.open([Pool(name="one", size=1), Pool(name="other", size=1)])
    return backend


def noted(site: Site, order: list[Any], what: Any) -> Any:
    """Record that a call ran."""
    order.append((site.place.pool, what))
    return what


def doubled(site: Site, given: Any) -> Any:
    """Return twice the value of a reference."""
    (value,) = site.fetch([given[0]])
    return 2 * value


def fails(site: Site) -> None:
    """Raise an error."""
    raise ValueError("no")


def test_a_rank_keeps_its_order_and_ranks_overtake_each_other() -> None:
    orders = []
    for seed in range(20):
        backend, order = made(seed), list[Any]()
        calls = [backend.submit(at, noted, order, n)[0] for n in range(4) for at in (ONE, OTHER)]
        backend.read_all(calls, 100.0)
        assert [n for pool, n in order if pool == "one"] == [n for pool, n in order if pool == "other"]
        assert [n for pool, n in order if pool == "one"] == [0, 1, 2, 3]
        orders.append(tuple(order))
    assert len({*orders}) > 5


def test_a_call_waits_for_its_arguments_on_other_ranks() -> None:
    backend = made()
    first = backend.submit(ONE, noted, [], 21)
    second = backend.submit(OTHER, doubled, first)
    assert not backend.is_ready(second[0])
    assert backend.read_all(second, 100.0) == [42]


def test_errors_and_deaths_reach_their_readers() -> None:
    backend = made()
    wrong, late = backend.submit(ONE, fails), backend.submit(ONE, noted, [], 1)
    with pytest.raises(ValueError, match="no"):
        backend.read_all([*wrong, *late], 100.0)
    done = backend.submit(ONE, noted, [], 2)
    assert backend.read_all(done, 100.0) == [2]
    lost = backend.submit(ONE, noted, [], 3)
    needs = backend.submit(OTHER, doubled, lost)
    backend.kill(ONE)
    with pytest.raises(RankLost, match="has died"):
        backend.read_all(lost, 100.0)
    with pytest.raises(Stranded, match="the rank of an argument has died"):
        backend.read_all(needs, 100.0)
    assert backend.read_all(done, 100.0) == [2]  # its result is in the store
    with pytest.raises(RankLost):
        backend.read_all(backend.submit(ONE, noted, [], 4), 100.0)


def test_a_stopped_rank_goes_on_and_a_wait_ends_at_its_deadline() -> None:
    backend = made()
    backend.stop(ONE, 50.0)
    began, slow = backend.now(), backend.submit(ONE, noted, [], 1)
    assert not backend.wait_for_any(slow, 10.0)
    assert backend.now() - began == pytest.approx(10.0, abs=0.1)
    with pytest.raises(TimeoutError):
        backend.read_all(slow, 10.0)
    assert backend.read_all(slow, 100.0) == [1]
    assert backend.now() - began >= 50.0


def test_a_rank_that_is_cut_off_answers_later_or_counts_as_dead_and_works_on() -> None:
    backend, order = made(), list[Any]()
    backend.cut(ONE, 5.0)
    assert backend.read_all(backend.submit(ONE, noted, order, 1), 100.0) == [1]
    waiting = backend.submit(ONE, noted, order, 2)
    backend.read_all(backend.submit(OTHER, noted, [], 0), 100.0)
    backend.sleep(20.0)
    backend.cut(ONE, 2 * HEALTH_S)
    later = backend.submit(ONE, noted, order, 3)
    with pytest.raises(RankLost):
        backend.read_all([*waiting, *later], 100.0)
    backend.sleep(3 * HEALTH_S)
    assert [what for _, what in order] == [1, 2, 3]  # nothing fences the rank


def test_the_driver_dies_at_an_event_and_can_do_nothing_more() -> None:
    backend = made(plan={3: Timeline.die})
    backend.submit(ONE, noted, [], 1)
    with pytest.raises(DriverKilled):
        for _ in range(3):
            backend.submit(ONE, noted, [], 1)
    with pytest.raises(DriverKilled):
        backend.submit(ONE, noted, [], 1)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FakeDisk]:
    (tmp_path / "disk").mkdir()
    yield FakeDisk(tmp_path / "disk")


def test_a_disk_forgets_what_was_not_flushed_when_power_is_lost(disk: FakeDisk) -> None:
    found = set()
    for seed in range(40):
        for path in disk.folder.iterdir():
            path.unlink()
        disk.restart(Random(0), power=False)
        with disk.watched(Timeline(Random(0), {}, "")):
            replace(disk.folder / "kept", [b"whole"])
            append(disk.folder / "lines", b"1234\n")
            (disk.folder / "kept").replace(disk.folder / "moved")
        disk.restart(Random(seed), power=True)
        there = {path.name: path.read_bytes() for path in disk.folder.iterdir()}
        assert {"kept", "moved"} & there.keys() and b"whole" in there.values()
        assert b"1234\n".startswith(there.get("lines", b""))
        found.add((("moved" in there), there.get("lines")))
    assert {name for name, _ in found} == {True, False} and len({lines for _, lines in found}) > 3


def test_a_full_disk_and_a_failing_one(disk: FakeDisk) -> None:
    with disk.watched(Timeline(Random(0), {}, "")):
        disk.fails_once = True
        with pytest.raises(OSError) as failed:
            (disk.folder / "one").write_bytes(b"1")
        assert failed.value.errno == errno.EIO
        (disk.folder / "one").write_bytes(b"1")
        disk.is_full = True
        for _ in range(2):
            with pytest.raises(OSError) as failed:
                (disk.folder / "two").write_bytes(b"2")
            assert failed.value.errno == errno.ENOSPC


def lines_changed(run: Path, change: Callable[[list[str]], list[str]]) -> None:
    """Change the lines of the metrics, and their digests as if the run had written them."""
    file = run / "metrics.jsonl"
    file.write_text("".join(change(file.read_text().splitlines(keepends=True))))


def tokens_changed(run: Path, step: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the rollouts of a step."""
    (file,) = (run / "rollouts").glob(f"step-{step:06d}-*")
    tensors = dict(load_file(file))
    change(tensors)
    save_file(tensors, file)


def one_token(tensors: dict[str, Any]) -> None:
    """Change the last token."""
    tensors["tokens:values"][-1] ^= 1


def older(tensors: dict[str, Any]) -> None:
    """Make all sampled tokens one version older."""
    tensors["versions:values"][tensors["versions:values"] > 0] -= 1


def again(tensors: dict[str, Any]) -> None:
    """Give all rows the ids of other rows."""
    tensors["ids"][:2] = tensors["ids"][2:]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda run: lines_changed(run, lambda lines: lines[:-1]), "metrics.jsonl has the steps [1, 2, 3]"),
        (lambda run: lines_changed(run, lambda lines: [*lines, lines[-1]]), "has the steps [1, 2, 3, 4, 4]"),
        (lambda run: tokens_changed(run, 3, one_token), "of step 3 is not of version 2"),
        (lambda run: tokens_changed(run, 3, older), "has versions"),
        (lambda run: tokens_changed(run, 2, again), "rows are trained twice"),
        (
            lambda run: (run / "rollouts/step-000002-0001-of-0001.safetensors").unlink(),
            "rollouts of the steps",
        ),
        (lambda run: (run / "finished.json").write_text(json.dumps({"steps": 3})), "finished.json"),
    ],
)
def test_the_oracle_sees_a_run_that_is_wrong(
    tmp_path: Path, change: Callable[[Path], None], found: str
) -> None:
    scenario, disk = Scenario(steps=4), FakeDisk(tmp_path)
    World(scenario, disk, Timeline(Random(0), {}, "")).run()
    assert problems(tmp_path / "run", scenario) == []
    change(tmp_path / "run")
    assert any(found in each for each in problems(tmp_path / "run", scenario))
