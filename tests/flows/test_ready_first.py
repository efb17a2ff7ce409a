"""Steps of groups that are ready: rows run through publishes, and none is too old, lost or doubled."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoModelForCausalLM

import rillflow
from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.config import GroupConfig
from rillflow.app.recipe import load_recipe
from rillflow.controller.flow import Flow
from rillflow.controller.interrupt import Interruption
from rillflow.errors import ConfigError, Interrupted
from rillflow.records.batch import Batch
from rillflow.records.rollout import Rollout
from rillflow.records.row import RowId
from rillflow.rollout.native.engine import NativeEngine
from rillflow.runs import layout
from rillflow.runs.reader import read_metrics, read_rollouts, read_spans
from rillflow.runs.rollouts import RolloutRecord

sys.path.insert(0, str(Path(__file__).parent))
from small_recipe import RECIPE, REWARD
from test_ahead import APART, INLINE, RAY, STEPS, ran

READY = 'schedule.mode="ready_first"'
TWO = ('placement.backend="inline"', "placement.pools={ main = 1, answers = 2 }", APART)
LONG = ("rollout.max_tokens=12", "rollout.max_rows=24")


class Halting(NativeEngine):
    """The native engine; every fifth prompt's rows pause after a token until there are new weights."""

    publishes = 1
    patience_s = 1.0

    def __init__(self, *given: Any, **how: Any) -> None:
        super().__init__(*given, **how)
        self._stand: dict[RowId, tuple[Rollout, int, float]] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._stand) or super().has_work

    def abort(self, row: RowId) -> Rollout:
        return self._stand.pop(row)[0] if row in self._stand else super().abort(row)

    def step(self) -> list[Rollout]:
        time.sleep(0.002)  # a pass without duration would end all rows before the first update
        for row, (rollout, version, since) in list(self._stand.items()):
            is_late = time.monotonic() > since + self.patience_s
            if is_late or self._workers[0].version >= version + self.publishes:
                del self._stand[row]
                self.add(rollout)
        ended = super().step()
        for worker in self._workers:
            for row in [
                each.rollout.row for each in worker._scheduler.running if each.rollout.row.prompt % 5 == 0
            ]:
                kept = super().abort(row)
                if sum(kept.loss_mask) == 1:
                    self._stand[row] = kept, self._workers[0].version, time.monotonic()
                else:
                    self.add(kept)
        return ended


class Overtaken(Halting):
    """The same, but rows pause until weights are two versions newer."""

    publishes = 2


class Brief(Halting):
    """The same for freshness 0, whose steps get no new weights while their rows run: a short pause."""

    patience_s = 0.05


class Dying(NativeEngine):
    """The native engine; one process that runs it dies in the middle, up to MOST_DEATHS times."""

    def step(self) -> list[Rollout]:
        time.sleep(0.002)
        self.steps = vars(self).get("steps", 0) + 1
        deaths = Path(os.environ["DEATHS"])
        if self.steps % 30 == 0 and len(list(deaths.iterdir())) < int(os.environ["MOST_DEATHS"]):
            (deaths / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step()


HALTING, BRIEF = (f'rollout.engine="{__name__}:{name}"' for name in ("Halting", "Brief"))


def trained(run: Path) -> dict[int, list[RolloutRecord]]:
    """Return the rows of every step that trained sampled ones."""
    return {step: read_rollouts(run, step) for step in sorted(layout.rollout_files(run)) if step > 3}


def once(run: Path) -> Counter[tuple[int, int]]:
    """Return the number of trained rows of every group."""
    return Counter((row.row.epoch, row.row.prompt) for rows in trained(run).values() for row in rows)


@pytest.mark.parametrize("late", ["wait", "drop"])
def test_every_token_is_of_the_weights_it_names_and_none_is_too_old(tmp_path: Path, late: str) -> None:
    """A row's log probabilities follow from the checkpoints of its tokens' versions."""
    bound = 1 if late == "drop" else 2
    kept = ("run.checkpoint_every=1", "run.keep_checkpoints=20")
    engine = HALTING if late == "wait" else HALTING.replace("Halting", "Overtaken")
    ran(tmp_path, bound, *TWO, READY, engine, *LONG, *kept, f'schedule.on_stale="{late}"')
    run, steps = tmp_path / "run", trained(tmp_path / "run")
    rows = [row for each in steps.values() for row in each]
    assert {len(each) for each in steps.values()} == {15} and set(once(run).values()) == {3}
    first, models = min(steps), dict[int, Any]()
    start = min(version for row in steps[first] for version in row.versions if version >= 0)
    for step, each in steps.items():
        trains = start + step - first
        seen = {version for row in each for version in row.versions if version >= 0}
        assert trains - bound <= min(seen) and max(seen) <= trains
    interrupted = [row for row in rows if len({v for v in row.versions if v >= 0}) > 1]
    assert interrupted or late == "drop"
    for row in interrupted[:6]:
        for version in {v for v in row.versions if v > start}:
            folder = run / layout.CHECKPOINTS / f"step-{first - 1 + version - start:06d}" / "policy"
            models[version] = models.get(version) or AutoModelForCausalLM.from_pretrained(folder)
            with torch.no_grad():
                wanted = models[version](torch.tensor([row.tokens])).logits[0].log_softmax(-1)
            places = [place for place, v in enumerate(row.versions) if v == version]
            said = [float(wanted[place - 1, row.tokens[place]]) for place in places]
            assert [row.logprobs[place] for place in places] == pytest.approx(said, abs=1e-4)
    given_up = run / layout.GIVEN_UP
    lines = [json.loads(line) for line in given_up.read_text().splitlines()] if given_up.exists() else []
    assert bool(lines) == (late == "drop")
    assert all("versions before the weights that would train it" in each["reason"] for each in lines)
    told = [each.metrics for each in read_metrics(run)][-STEPS:]
    assert sum(each["flight/given_up/sum"].value for each in told) == len(lines)
    work = [span for span in read_spans(run) if span.stage == "policy.generate" and span.step > first]
    assert all(sum(rank.rows for rank in span.ranks) == 15 for span in work)


def test_a_run_that_was_cut_trains_every_group_once(tmp_path: Path) -> None:
    """Prompts in flight at a checkpoint are sampled again after it, those of complete steps never."""
    settings = (
        *TWO,
        READY,
        HALTING,
        *LONG,
        "run.checkpoint_every=1",
        "run.keep_checkpoints=9",
        "evaluate=none",
    )
    ran(tmp_path, 3, *settings)
    run = tmp_path / "run"
    (run / layout.FINISHED).unlink()
    for checkpoint in sorted((run / layout.CHECKPOINTS).iterdir())[-3:]:
        shutil.rmtree(checkpoint)
    before = {step: [row.tokens for row in rows] for step, rows in trained(run).items() if step <= 5}
    ran(tmp_path, 3, *settings)
    assert {step: [row.tokens for row in rows] for step, rows in trained(run).items() if step <= 5} == before
    assert set(once(run).values()) == {3} and len(once(run)) == STEPS * 5


def test_a_run_that_is_asked_to_stop_goes_on_where_it_was(tmp_path: Path) -> None:
    asked = Interruption()
    settings = (*INLINE, APART, READY, HALTING, *LONG, "evaluate=none", "schedule.keep_cache=true")

    def stop(phase: str, step: int, metrics: object) -> None:
        asked.requested = asked.requested or (phase == "grpo" and step == 5)

    with pytest.raises(Interrupted, match="stopped after step"):
        ran(tmp_path, 2, *settings, told=stop, interruption=asked)
    ran(tmp_path, 2, *settings)
    assert set(once(tmp_path / "run").values()) == {3} and len(once(tmp_path / "run")) == STEPS * 5


def test_a_step_that_draws_again_gets_groups_that_are_ready(tmp_path: Path) -> None:
    """DAPO's refill needs more groups in the middle of a step."""
    ran(tmp_path, 2, *TWO, READY, HALTING, *LONG, "evaluate=none", name="dapo")
    last = read_metrics(tmp_path / "run")[-1].metrics
    assert last["refill/rounds/mean"].value >= 1 and last["staleness/versions/max"].value <= 2


def test_what_is_asked_beside_rows_in_flight_takes_its_turn(tmp_path: Path) -> None:
    """ReMax samples its prompts greedily, which pauses running rows and then continues them."""
    ran(tmp_path, 2, *TWO, READY, HALTING, *LONG, "evaluate=none", name="remax")
    assert set(once(tmp_path / "run").values()) == {3} and len(once(tmp_path / "run")) == STEPS * 5


def test_weights_are_published_between_parts_of_a_step(tmp_path: Path) -> None:
    """Every fifth of a step's minibatches makes a version, and rows begin with those, too."""
    fifths = ("schedule.syncs_per_step=5", "algorithm.shuffle=false", "algorithm.minibatches=5")
    settings = (*TWO, READY, HALTING, *LONG, *fifths, "evaluate=none", 'algorithm.old_logprobs="sampler"')
    ran(tmp_path, 8, *settings)
    steps = trained(tmp_path / "run")
    start = min(v for row in steps[min(steps)] for v in row.versions if v >= 0)
    told = [each.metrics for each in read_metrics(tmp_path / "run")][-STEPS:]
    published = [each["policy/version/max"].value for each in told]
    assert published == [start + 5 * (step + 1) for step in range(STEPS)]
    assert max(each["staleness/versions/max"].value for each in told) <= 8
    seen = {version for rows in steps.values() for row in rows for version in row.versions if version >= 0}
    assert {(version - start) % 5 for version in seen} - {0}
    assert set(once(tmp_path / "run").values()) == {3}


def test_publishes_that_an_update_has_no_room_for_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"schedule\.syncs_per_step is 2") as told:
        ran(tmp_path, 1, *INLINE, APART, READY, "schedule.syncs_per_step=2")
    assert "algorithm.shuffle = false" in str(told.value) and "not 5" in str(told.value)


def test_parts_of_steps_that_are_made_of_what_is_ready_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"schedule\.stream_chunks is 5, schedule\.freshness is 1, and",
    ):
        ran(tmp_path, 1, *INLINE, APART, READY, "schedule.stream_chunks=5")


class TwiceConfig(GroupConfig):
    """Settings of an algorithm that samples every prompt twice."""

    name: Literal["twice"]


def twice(flow: Flow, prompts: Batch, config: TwiceConfig) -> Any:
    """Run one iteration; prompts are passed by keyword."""
    flow.policy.generate(prompts, samples=2)
    return flow.policy.update(
        flow.policy.generate(prompts=prompts, samples=3), loss=config.loss, passes=config
    )


def test_an_algorithm_that_samples_more_than_its_prompts_once_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RECIPE.replace("NAME", "twice"))
    (tmp_path / "reward.py").write_text(REWARD)
    ahead = ('schedule={mode="ahead",freshness=1}', READY, *INLINE, APART)
    own = Algorithm(config=TwiceConfig, step=twice)
    with pytest.raises(ConfigError, match="twice does not sample its step in one call"):
        load_recipe(tmp_path / "run.toml", ahead, [own])


@RAY
@pytest.mark.slow
@pytest.mark.parametrize("pools", [INLINE[1], TWO[1]])
def test_processes_of_their_own_sample_what_is_ready(tmp_path: Path, pools: str) -> None:
    settings = ('placement.backend="ray"', pools, APART, READY, *LONG, "schedule.keep_cache=true")
    found = ran(tmp_path, 2, *settings)
    assert set(once(tmp_path / "run").values()) == {3} and len(found["judged"]) == 4


MORE = [
    pytest.param(name, chunks, marks=pytest.mark.slow)
    for name, chunks in (("dapo", 1), ("remax", 1), ("dapo", 5))
]


@pytest.mark.parametrize(("name", "chunks"), [("grpo", 1), ("grpo", 5), ("remax", 5), *MORE])
def test_on_policy_steps_train_the_rows_that_end_first(tmp_path: Path, name: str, chunks: int) -> None:
    """At freshness 0 all rows of a step have its own weights, and chunks take groups as they end."""
    parts = (f"schedule.stream_chunks={chunks}", "algorithm.shuffle=false", "algorithm.minibatches=5")
    ran(tmp_path, 0, *TWO, READY, BRIEF, *LONG, *parts, "evaluate=none", name=name)
    steps = trained(tmp_path / "run")
    first = min(steps)
    start = min(version for row in steps[first] for version in row.versions if version >= 0)
    for step, rows in steps.items():
        assert {version for row in rows for version in row.versions if version >= 0} == {start + step - first}
    assert set(once(tmp_path / "run").values()) == {3}
    told = [each.metrics for each in read_metrics(tmp_path / "run")][-STEPS:]
    assert all(each["staleness/versions/max"].value == 0 for each in told if "staleness/versions/max" in each)


THREE = (
    'placement.backend="inline"',
    "placement.pools={ main = 1, answers = 2, judges = 2 }",
    'placement.roles={ sampler = "answers", reward = "judges", reference = "judges" }',
)
"""The reward and the reference train nothing on their ranks, so they run as soon as a group is sampled."""
HANGS = """
import pathlib, time

def small(prompts, completions, **columns):
    chosen = pathlib.Path(__file__).with_name("hung")
    if len(prompts) == 3 and not chosen.exists():
        chosen.write_text(prompts[0])
    if chosen.exists() and chosen.read_text() in prompts:
        time.sleep(3600)
    return [sum(letter < "5" for letter in text) / 4 for text in completions]
"""


@pytest.mark.parametrize("freshness", [0, 2])
def test_stages_that_read_sampled_rows_run_before_the_step(tmp_path: Path, freshness: int) -> None:
    """Scores belong to their rows, whatever the order in which groups become ready."""
    engine = HALTING if freshness else BRIEF
    found = ran(tmp_path, freshness, *THREE, READY, engine, *LONG, "run.keep_checkpoints=20")
    rows = [row for each in trained(tmp_path / "run").values() for row in each]
    assert set(once(tmp_path / "run").values()) == {3} and len(rows) == STEPS * 15
    for row in rows:
        text = row.completion
        assert row.reward == pytest.approx(sum(letter < "5" for letter in text) / 4)
    first = found["metrics"][3]
    assert first["reward/score/mean"] == pytest.approx(sum(row.reward for row in rows[:15]) / 15)
    stages = {span.stage for span in read_spans(tmp_path / "run") if span.step > 3}
    assert {"reward.score", "reference.logprobs"} <= stages


def test_a_reward_that_hangs_holds_up_its_own_group(tmp_path: Path) -> None:
    """No step waits for the group: it is dropped when it is too old, before its time limit."""
    settings = (*THREE, READY, *LONG, 'schedule.on_stale="drop"', "reward.timeout_s=900", "evaluate=none")
    began = time.monotonic()
    ran(tmp_path, 1, *settings, "algorithm.steps=10", "reward.sandbox=false", reward=HANGS)
    assert time.monotonic() - began < 800
    rows = [row for each in trained(tmp_path / "run").values() for row in each]
    assert set(once(tmp_path / "run").values()) == {3} and len(rows) == 10 * 15
    assert (tmp_path / "hung").read_text() not in {row.prompt for row in rows}
    lines = [json.loads(line) for line in (tmp_path / "run" / layout.GIVEN_UP).read_text().splitlines()]
    assert {tuple(line["group"]) for line in lines} - set(once(tmp_path / "run"))


ON_RAY = [pytest.param("ray", most, marks=[RAY, pytest.mark.slow]) for most in (1, 3)]


@pytest.mark.parametrize(("backend", "most"), [("process", 1), *ON_RAY])
def test_a_replica_that_dies_is_replaced_while_training_goes_on(
    tmp_path: Path,
    backend: str,
    most: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No row is lost or doubled, and a replay without deaths has the same bits."""
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    monkeypatch.setenv("DEATHS", str(deaths))
    monkeypatch.setenv("MOST_DEATHS", str(most))
    engine = f'rollout.engine="{__name__}:Dying"'
    pools = (f'placement.backend="{backend}"', *TWO[1:])
    ran(tmp_path, 2, *pools, READY, engine, *LONG, "algorithm.steps=24", "evaluate=none", is_quiet=False)
    said = " ".join(capsys.readouterr().out.split())
    assert len(list(deaths.iterdir())) == most
    assert said.count("a new process takes its place") == most and "all ranks start again" not in said
    assert set(once(tmp_path / "run").values()) == {3} and len(once(tmp_path / "run")) == 24 * 5
    lines = [json.loads(line) for line in (tmp_path / "run" / layout.GIVEN_UP).read_text().splitlines()]
    assert any("its replica was lost" in line["reason"] for line in lines)
    assert (
        rillflow.open_run(tmp_path / "run").replay(settings=['placement.backend="inline"']).difference is None
    )
