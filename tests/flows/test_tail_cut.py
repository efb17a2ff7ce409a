"""Steps that defer their longest rows: on-policy, every prompt once, the same bits after a resume."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from rillflow.app.recipe import load_recipe
from rillflow.cli.main import main
from rillflow.errors import ConfigError
from rillflow.runs.reader import read_rollouts
from tests.flows.conftest import SUMS, Tiny

REST = f"""
steps = 5
{SUMS}[evaluate]
problems = 0
"""
REWARD = """
from pathlib import Path

FAILS_AT = Path(__file__).with_name("fails_at")
calls = 0

def reward(prompts, completions, **_):
    global calls
    calls += 1
    if FAILS_AT.exists() and calls >= int(FAILS_AT.read_text()):
        raise ConnectionError("the judge is down")
    return [sum(letter < "5" for letter in text) / 3 for text in completions]
"""
CUT = ('schedule={mode="tail_batching",oversample_prompts=1.75}', "rollout.max_tokens=10")
TWO = ("placement.pools={main=2}", "placement.train_parallel={main={dp=2}}", "placement.backend=inline")
APART = (
    "placement.pools={main=1, answers=2}",
    'placement.roles={sampler="answers"}',
    "placement.backend=inline",
)

SHARDED = (TWO[0], "placement.train_parallel={main={fsdp=2}}", "placement.backend=ray")
SHARED = (
    TWO[0],
    "placement.train_parallel={main={tp=2}}",
    "placement.rollout_parallel={tp=2}",
    "placement.backend=ray",
)
RAY = (*APART[:2], "placement.backend=ray")


@pytest.fixture
def tiny(tiny: Tiny) -> Tiny:
    tiny.write(REST, REWARD)
    return tiny


def rows(tiny: Tiny, name: str) -> list[list[tuple[tuple[int, int, int], str]]]:
    """Return the rows of every step, in order."""
    found = [read_rollouts(tiny.folder / name, step) for step in range(1, 6)]
    return [[(tuple(row.row), row.completion) for row in each] for each in found]


def test_an_interrupted_run_trains_every_prompt_once_with_the_bits_of_one_that_was_not(tiny: Tiny) -> None:
    """Crash-equivalence and exactly-once with deferred prompts; the reward fails while some are deferred."""
    assert tiny.run("plain", CUT[1]) == 0
    assert tiny.run("whole", *CUT) == 0
    aside = [each["tail/aside/mean"]["mean"] for each in tiny.numbers("whole")]
    assert max(aside) > 0 and aside[-1] == 0
    told = rows(tiny, "whole")
    assert sorted(row for step in told for row, _ in step) == sorted(
        row for step in rows(tiny, "plain") for row, _ in step
    )
    assert [len(step) for step in told] == [8] * 5
    for step, each in enumerate(read_rollouts(tiny.folder / "whole", 3)):
        assert {version for version in each.versions if version >= 0} == {2}, step
    (tiny.folder / "fails_at").write_text("4")
    assert tiny.run("late", *CUT) == 1
    kept = json.loads((tiny.folder / "late/checkpoints/step-000003/state.json").read_text())
    assert len(kept["stream"]["aside"]) == aside[2]
    (tiny.folder / "fails_at").unlink()
    assert tiny.run("late", *CUT) == 0
    tiny.assert_same("whole", "late")
    assert rows(tiny, "late") == told


@pytest.mark.parametrize(
    "where",
    [TWO, *(pytest.param(each, marks=pytest.mark.slow) for each in (APART, SHARDED, SHARED, RAY))],
)
def test_replicas_leave_the_same_prompts_for_later_as_one_does(tiny: Tiny, where: tuple[str, ...]) -> None:
    """Each replica has a slot for every row, so rows end after as many passes as they have tokens."""
    if "placement.backend=ray" in where and find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    if where is SHARED:
        tiny.recipe.write_text(tiny.recipe.read_text().replace("kv_heads = 1", "kv_heads = 2"))
    frozen = ("policy.lr=1e-12", 'schedule={mode="tail_batching",oversample_samples=1.5}')
    assert tiny.run("one", *CUT, *frozen) == 0
    assert tiny.run("two", *CUT, *frozen, *where) == 0
    assert rows(tiny, "one") == rows(tiny, "two")


@pytest.mark.parametrize("name", ["dapo", "remax"])
def test_steps_that_draw_again_or_ask_more_of_their_prompts_are_cut(tiny: Tiny, name: str) -> None:
    assert tiny.run("run", *CUT, f"algorithm.name={name}", "algorithm.steps=3") == 0
    found = [row for step in range(1, 4) for row in read_rollouts(tiny.folder / "run", step)]
    ids = [row.row for row in found if row.row.sample >= 0]
    assert len(ids) == len({*ids}) and len(ids) >= 12


def test_a_run_that_is_trained_longer_says_that_its_last_steps_chose_other_prompts(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        assert tiny.run(name, *CUT, "algorithm.steps=3") == 0
        capsys.readouterr()
        assert tiny.run(name, *CUT, "algorithm.steps=5") == 0
        said = capsys.readouterr().out
        assert "with schedule.oversample_prompts = 1.75, the last of the 3 steps left no prompt" in said
    tiny.assert_same("one", "two")
    assert tiny.run("long", *CUT, "algorithm.steps=5") == 0
    assert rows(tiny, "long") != rows(tiny, "one"), "the note is needed"
    assert tiny.run("plain", CUT[1], "algorithm.steps=3") == 0
    capsys.readouterr()
    assert tiny.run("plain", CUT[1], "algorithm.steps=5") == 0
    assert "left no prompt" not in capsys.readouterr().out


def test_a_plan_that_begins_more_than_it_trains_is_run(tiny: Tiny) -> None:
    (tiny.folder / "plan.toml").write_text(
        """name = "grpo"
oversample_prompts = 1.75
[pools.main]
machine_type = "cores"
devices = 1
[units.policy]
pool = "main"
dp = 1
"""
    )
    words = ["run", str(tiny.recipe), "--dir", str(tiny.folder / "run"), "--set", CUT[1], "--quiet"]
    assert main([*words, "--plan", str(tiny.folder / "plan.toml")]) == 0
    assert max(each["tail/begun/sum"]["sum"] for each in tiny.numbers("run")) == 7


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (("schedule.freshness=1", *APART), "has no key 'freshness'"),
        (("schedule.stream_chunks=2", *APART), "has no key 'stream_chunks'"),
        (("schedule.oversample_prompts=0.5",), "oversample_prompts"),
        (("schedule.oversample_prompts=1",), "starts only the rows that it trains"),
    ],
)
def test_what_cannot_be_cut_is_refused(tiny: Tiny, setting: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_recipe(tiny.recipe, [CUT[0], *setting])
