"""Programs of a model that try to get a reward, reach a neighbour or escape: none succeeds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rillflow.isolation.sandbox import Level
from rillflow.rewards.outcome import Outcome

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "services"))
import attacks
from attacks import ATTACKS, Target, attack

pytestmark = pytest.mark.skipif(
    not Path("/proc/sys/user/max_user_namespaces").is_file()
    or Path("/proc/sys/user/max_user_namespaces").read_text().strip() == "0",
    reason="this kernel gives no user namespaces",
)

SAMPLE = ATTACKS[::6]
"""Some attacks of every goal; the slow tests run all."""
FORGING = [each for each in ATTACKS if each["goal"] == "forge a score"]
"""An answer's attack if a reward's process and its text share a pid namespace and a user."""


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    with attacks.prepared(tmp_path) as target:
        yield target


def test_the_corpus_is_large_and_its_attacks_have_names_of_their_own() -> None:
    assert len({each["name"] for each in ATTACKS}) == len(ATTACKS) >= 80
    assert {each["goal"] for each in SAMPLE} == {each["goal"] for each in ATTACKS}


@pytest.mark.parametrize(
    ("way", "sample"),
    [("by_run_python", SAMPLE), ("by_subprocess", FORGING[::6])],
    ids=["run_python", "subprocess"],
)
def test_no_attack_of_a_sample_succeeds_at_the_default_level(
    target: Target, way: str, sample: list[dict[str, str]]
) -> None:
    found = attack(target, way, sample)
    assert found.won == []
    assert found.level is not Level.NONE
    assert all(score.outcome is Outcome.SCORE for score in found.scores.values()), "an attack ended its judge"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("level", [Level.FULL, Level.SHARED_USER])
@pytest.mark.parametrize("way", attacks.WAYS)
def test_no_attack_succeeds_at_any_level_of_the_sandbox(target: Target, way: str, level: Level) -> None:
    seen_by_the_function = {"read the function's file"} if way == "by_subprocess" else set()
    found = attack(target, way, ATTACKS, level=level)
    assert set(found.won) == seen_by_the_function


def test_without_a_sandbox_the_harmless_attacks_find_their_way(target: Target) -> None:
    harmless = [each for each in ATTACKS if "harmless" in each]
    found = attack(target, "by_subprocess", harmless, sandbox=False)
    assert len(found.won) >= len(harmless) - 3, [name for name in found.scores if name not in found.won]
