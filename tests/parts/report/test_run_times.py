"""Waiting times of ranks and their causes: the records of small runs with several pools, rank by rank."""

from __future__ import annotations

import json
from collections import defaultdict
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.cli.main import main
from rillflow.runs.reader import SpanRecord, read_spans
from rillflow.runs.run_data import load
from rillflow_parts.report.measured import RankName, measured, rank_times
from rillflow_parts.report.write import write_report
from tests.flows.small_recipe import RECIPE, REWARD

STEPS = 3
INLINE = 'placement.backend="inline"'
APART = ("placement.pools={ main = 2, answers = 1 }", 'placement.roles={ sampler = "answers" }')
THREE = (
    "placement.pools={ main = 1, answers = 1, scores = 1 }",
    'placement.roles={ sampler = "answers", reward = "scores" }',
    'schedule={mode="ahead",freshness=1}',
    "schedule.stream_chunks=2",
)
ANSWERED = ("policy.generate", "sampler.receive", "sampler.serve")
"""Stages of the sampling ranks."""
MICROSECONDS = 2e-6
"""Largest rounding error of the sum of two times."""


def ran(folder: Path, *settings: str) -> Path:
    (folder / "run.toml").write_text(RECIPE.replace("NAME", "grpo"))
    (folder / "reward.py").write_text(REWARD)
    told = [f"run.dir={json.dumps(str(folder / 'run'))}", "warm_start=none", "evaluate=none", INLINE]
    loaded = load_recipe(folder / "run.toml", [*told, f"algorithm.steps={STEPS}", *settings])
    launch(loaded, quiet=True)
    return folder / "run"


@pytest.fixture(scope="module")
def in_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run with freshness 0: two ranks train, one samples."""
    return ran(tmp_path_factory.mktemp("in step"), *APART)


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run with freshness 1: one rank trains, one samples in two parts, one scores them."""
    return ran(tmp_path_factory.mktemp("ahead"), *THREE)


@pytest.fixture(scope="module")
def on_ray(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run with freshness 1: two processes train, one samples in two parts."""
    apart = ("placement.pools={ main = 2, answers = 1 }", 'placement.roles={ sampler = "answers" }')
    more = ('schedule={mode="ahead",freshness=1}', "schedule.stream_chunks=2", 'placement.backend="ray"')
    return ran(tmp_path_factory.mktemp("on ray"), *apart, *more)


def stages_of(run: Path, step: int) -> dict[str, SpanRecord]:
    return {span.stage: span for span in read_spans(run) if span.step == step}


def test_every_rank_of_a_stage_is_written_down_with_its_own_rows(in_step: Path) -> None:
    step = stages_of(in_step, 2)
    assert [each.rank for each in step["policy.generate"].ranks] == [0]
    for both in ("policy.update", "policy.digest"):
        assert sorted(each.rank for each in step[both].ranks) == [0, 1]
    scored = step["reward.score"]
    assert sorted(each.rank for each in scored.ranks) == [0, 1]
    assert sum(each.rows for each in scored.ranks) == scored.rows == 15
    assert step["policy.update"].after == (
        "policy.generate",
        "reference.logprobs",
        "policy.logprobs",
        "controller.group_advantages",
    )


def test_parts_of_a_stage_are_written_one_by_one(ahead: Path) -> None:
    step = stages_of(ahead, 2)
    assert [(each.rank, each.rows) for each in step["policy.generate"].ranks] == [(0, 9), (0, 6)]
    assert [(each.rank, each.rows) for each in step["reward.score"].ranks] == [(0, 9), (0, 6)]
    assert step["reward.score"].after == ("policy.generate",)
    assert step["policy.generate"].rows == 15


RAY = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")]


@pytest.mark.parametrize("name", ["in_step", "ahead", pytest.param("on_ray", marks=RAY)])
def test_a_rank_does_one_thing_at_a_time_and_only_what_it_was_given(
    name: str, request: pytest.FixtureRequest
) -> None:
    spans = read_spans(request.getfixturevalue(name))
    work = defaultdict(list)
    for span in spans:
        ends = [each.start_s + each.duration_s for each in span.ranks]
        assert span.start_s == min(each.start_s for each in span.ranks)
        assert span.start_s + span.duration_s == pytest.approx(max(ends), abs=MICROSECONDS)
        for each in span.ranks:
            work[span.pool, each.rank].append((each.start_s, each.start_s + each.duration_s))
    assert len(work) == 3
    for done in work.values():
        assert all(before[1] <= after[0] + MICROSECONDS for before, after in pairwise(sorted(done)))
    for span in spans:
        for given in (one for one in spans if one.step == span.step and one.stage in span.after):
            first_ends = min(each.start_s + each.duration_s for each in given.ranks)
            assert first_ends <= span.start_s + MICROSECONDS, "its first part at least was there"


def test_in_step_ranks_that_train_wait_for_the_one_that_answers_and_it_for_them(
    in_step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All work of the trainers needs the step's rows, so they wait for the whole generation."""
    found = measured(load(in_step), 2, STEPS)
    times = {one.on: one for one in rank_times(found.works, found.waits, found.start_s, found.end_s)}
    assert [f"{on.pool} {on.rank}" for on in times] == ["answers 0", "main 0", "main 1"]
    answered = [span.duration_s for span in read_spans(in_step) if span.stage == "policy.generate"][1:]
    for rank in (0, 1):
        one = times[RankName("main", rank)]
        assert one.waited_s["policy.generate on answers"] == pytest.approx(sum(answered), abs=1e-5)
    assert times[RankName("answers", 0)].waited_s["policy.update on main"] > 0
    file = tmp_path / "trace.json"
    assert main(["timeline", str(in_step), "--steps", "2-3", "--out", str(file)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("steps 2 to 3: ") and [line.split()[0] for line in told[3:6]] == [
        "answers",
        "main",
        "main",
    ]
    threads = defaultdict(list)
    for one in json.loads(file.read_text("utf-8"))["traceEvents"]:
        if one["ph"] == "X":
            threads[one["pid"], one["tid"]].append((one["ts"], one["ts"] + one["dur"]))
    assert len(threads) == 3
    for done in threads.values():
        assert all(before[1] <= after[0] + 2 for before, after in pairwise(sorted(done)))


def test_ahead_the_rank_that_answers_does_not_wait_for_the_step_it_is_ahead_of(ahead: Path) -> None:
    found = measured(load(ahead), 1, 2)
    before = [wait for wait in found.waits if wait.on.pool == "answers" and wait.before == "policy.generate"]
    assert not [wait for wait in before if wait.step == 2 and wait.whom == "policy.update on main"]
    scored = [wait for wait in found.waits if wait.on.pool == "scores" and wait.before == "reward.score"]
    assert "policy.generate on answers" in {wait.whom for wait in scored}
    page = write_report(ahead).read_text("utf-8")
    assert "waits for policy.generate on answers" in page and "scores 0" in page


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_processes_share_one_axis_of_time_and_waits_are_those_of_the_right_one(
    on_ray: Path, tmp_path: Path
) -> None:
    """Each process has its own clock: a step's spans lie between the times that the controller saw."""
    data = load(on_ray)
    ends = {record.step: record.time_s for record in data.steps}
    for span in data.spans:
        assert span.start_s > 0 and span.start_s + span.duration_s <= ends[span.step] + MICROSECONDS
        open_since = ends.get(span.step - (3 if span.stage == "policy.send" else 2), 0.0)
        assert span.start_s > open_since - MICROSECONDS, (
            "two steps are open; packed is what the next will have"
        )
        assert span.pool == ("answers" if span.stage in ANSWERED else "main")
    found = measured(data, 1, STEPS)
    times = {one.on: one for one in rank_times(found.works, found.waits, found.start_s, found.end_s)}
    assert [f"{on.pool} {on.rank}" for on in times] == ["answers 0", "main 0", "main 1"]
    for one in times.values():
        whole = one.busy_s + sum(one.waited_s.values()) + one.else_s
        assert whole == pytest.approx(found.end_s - found.start_s, abs=1e-4)
    first = stages_of(on_ray, 1)["policy.generate"]
    for rank in (0, 1):
        waits = [wait for wait in found.waits if wait.on == RankName("main", rank) and wait.cause is not None]
        answered = sum(
            wait.end_s - wait.start_s for wait in waits if wait.step == 1 and wait.cause.on.pool == "answers"
        )
        assert answered >= first.ranks[0].duration_s - 1e-4, "step 1 trains on what was not there before"
    file = tmp_path / "trace.json"
    assert main(["timeline", str(on_ray), "--out", str(file)]) == 0
    events = json.loads(file.read_text("utf-8"))["traceEvents"]
    names = {(one["pid"], one["args"]["name"]) for one in events if one["name"] == "process_name"}
    assert {name for _, name in names} == {"answers", "main"} and len({pid for pid, _ in names}) == 2


def worked(run: Path, pool: str = "") -> float:
    """Return the seconds of steps 2 and 3 in which stages worked, summed; with ``pool`` only that pool's."""
    found = 0.0
    for span in read_spans(run):
        if span.step > 1 and pool in ("", span.pool):
            ranks = defaultdict[int, float](float)
            for each in span.ranks:
                ranks[each.rank] += each.duration_s
            found += max(ranks.values())
    return found
