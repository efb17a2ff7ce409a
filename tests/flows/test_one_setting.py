"""``schedule.mode = "ahead"`` alone makes a run sample ahead: choices, messages and report."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rillflow.cli.main import main
from rillflow.runs import layout
from tests.flows.conftest import SUMS, Tiny

AHEAD, INLINE = 'schedule={mode="ahead",freshness=2}', "placement.backend=inline"
READY = "schedule.mode=ready_first"
FAST = "policy.lr=0.1"
"""A learning rate at which weights move far within two steps."""


@pytest.fixture
def small(tiny: Tiny) -> Tiny:
    """Write a recipe of six steps in one pool."""
    tiny.write("steps = 6\n[evaluate]\nproblems = 0\n" + SUMS)
    return tiny


def checked(tiny: Tiny, *settings: str) -> int:
    words = [word for setting in settings for word in ("--set", setting)]
    return main(["check", str(tiny.recipe), "--dir", str(tiny.folder / "a"), *words])


def placed(tiny: Tiny, name: str) -> dict[str, Any]:
    """Return the placement in a run's config."""
    found: dict[str, Any] = json.loads((tiny.folder / name / layout.CONFIG).read_text())["placement"]
    return found


def steps_of(shown: str) -> list[str]:
    return [line for line in shown.splitlines() if line.startswith("grpo ")]


def test_one_setting_chooses_pools_and_loss_and_says_so(
    small: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    said = (
        "note: schedule.freshness is 2, so the sampler has a pool of its own: "
        "placement.pools = {main = 1, answers = 1}",
        'algorithm.old_logprobs is "sampler"',
    )
    assert checked(small, AHEAD, INLINE) == 0
    shown = capsys.readouterr().out
    assert all(each in shown for each in said) and "generation: pool answers" in shown
    assert small.run("a", AHEAD, INLINE) == 0
    shown = capsys.readouterr().out
    assert all(0 <= shown.index(each) < shown.index("grpo 1/6") for each in said)
    ages = [next(part for part in line.split("  ") if part.startswith("age ")) for line in steps_of(shown)]
    assert ages == ["age 0", "age 1", *["age 2"] * 4]
    assert "waited" not in shown and "dropped" not in shown
    assert placed(small, "a")["pools"] == {"main": 1, "answers": 1}
    named = ("placement.pools={ main = 1, answers = 1 }", 'placement.roles={ sampler = "answers" }')
    assert small.run("b", AHEAD, INLINE, "algorithm.old_logprobs=sampler", *named) == 0
    small.assert_same("a", "b")
    assert "pool of its own" not in capsys.readouterr().out, "nothing was chosen"


def test_ready_first_scores_on_a_pool_of_its_own_and_shows_its_waits(
    small: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    assert small.run("a", AHEAD, INLINE, READY) == 0
    shown = capsys.readouterr().out
    assert "so the functions of reward have the pool scores: scores do not wait for updates" in shown
    assert placed(small, "a")["roles"] == {"sampler": "answers", "reward": "scores"}
    assert all("  age " in line and "  waited " in line for line in steps_of(shown))


def test_a_resumed_run_keeps_the_pools_that_it_began_with(
    small: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine with other devices would choose other sizes, and another sum of gradients."""
    began = {"main": 2, "answers": 2}
    named = ("placement.pools={ main = 2, answers = 2 }", 'placement.roles={ sampler = "answers" }')
    assert small.run("a", AHEAD, INLINE, *named) == 0
    assert small.run("b", AHEAD, INLINE, *named, "algorithm.steps=9") == 0
    capsys.readouterr()
    assert checked(small, AHEAD, INLINE, "algorithm.steps=9") == 0
    assert "placement.pools = {main = 2, answers = 2}" in capsys.readouterr().out
    assert small.run("a", AHEAD, INLINE, "algorithm.steps=9") == 0
    shown = capsys.readouterr().out
    assert "changed: from step 7 on, algorithm.steps: 6 -> 9" in shown and "placement.pools:" not in shown
    assert placed(small, "a")["pools"] == began
    words = ["run", str(small.recipe), "--dir", str(small.folder / "a"), "--fresh"]
    assert main([*words, "--set", AHEAD, "--set", INLINE]) == 0
    assert placed(small, "a")["pools"] == {"main": 1, "answers": 1}


@pytest.mark.parametrize("ratio", ["sampler", "trainer"])
def test_a_rate_that_leaves_the_sampler_behind_is_warned_of_once(
    small: Tiny, capsys: pytest.CaptureFixture[str], ratio: str
) -> None:
    measured = f"algorithm.old_logprobs={ratio}"
    assert small.run("a", AHEAD, INLINE, FAST, measured) == 0
    during, summary = capsys.readouterr().out.split("\n\nSteps ")
    (said,) = [line for line in during.splitlines() if line.startswith("warning: staleness/kl/mean is ")]
    assert "above 0.05 for 3 steps" in said and "Lower policy.lr first" in said
    assert said.removeprefix("warning: ") in summary
    kept = json.loads((small.folder / "a" / layout.SUMMARY).read_text())
    assert kept["warnings"] == [said.removeprefix("warning: ")]
    assert small.run("b", AHEAD, INLINE, "policy.lr=1e-5", measured) == 0
    assert "staleness/kl" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            (READY, "placement.pools={ main = 2 }"),
            'schedule.mode is "ready_first", and the sampler shares',
        ),
        ((READY, "schedule.on_stale=drop"), "no row becomes stale"),
        ((READY, "schedule.keep_cache=true"), "every row ends with the weights that it began"),
        ((AHEAD, "schedule.keep_cache=true"), "[schedule] has no key 'keep_cache'"),
        ((READY, "schedule.syncs_per_step=2"), "published once, at the end of a step"),
        (
            ('schedule={mode="ahead",freshness=1}', "placement.pools={ main = 2 }"),
            "the sampler shares its ranks",
        ),
    ],
)
def test_settings_that_nothing_would_read_are_refused(
    small: Tiny, capsys: pytest.CaptureFixture[str], settings: tuple[str, ...], said: str
) -> None:
    assert checked(small, *settings, INLINE) == 2
    assert said in capsys.readouterr().err


def test_a_bound_above_the_steps_is_told(small: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(small, 'schedule={mode="ahead",freshness=40}', INLINE) == 0
    assert "note: warning: schedule.freshness is 40, and no token" in capsys.readouterr().out
