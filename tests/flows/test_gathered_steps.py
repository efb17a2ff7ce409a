"""Steps whose last rows gather on few replicas: the rows and the result of a step that does not gather."""

from __future__ import annotations

import os
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import pytest

from rillflow.app.recipe import load_recipe
from rillflow.errors import ConfigError
from rillflow.records.rollout import Rollout
from rillflow.records.row import RowId
from rillflow.rollout.engine import Capability
from rillflow.rollout.native.engine import NativeEngine
from rillflow.runs.reader import read_rollouts
from tests.flows.conftest import SUMS, Tiny

REST = f"""
name = "ppo"
steps = 3
minibatches = 2
loss.kl = 0.01
loss.correction = "none"
{SUMS}[evaluate]
problems = 0
"""
REWARD = """
def reward(prompts, completions, **_):
    return [sum(letter < "5" for letter in text) / 10 for text in completions]
"""
LONG = (
    "rollout.max_tokens=40",
    "rollout.deterministic=true",
    "rollout.max_rows=16",
    f'rollout.engine="{__name__}:Slow"',
)
TWO = ("placement.pools={main=2}", "placement.train_parallel={main={dp=2}}")
GATHER, FOUR = (f'schedule={{mode="gathering",gather_rows={rows}}}' for rows in (6, 4))
APART = ("placement.pools={main=1, answers=1}", 'placement.roles={sampler="answers"}')
MARK = "GATHERING_KILLED"
"""The variable of the environment that names the file which tells that a process was killed."""
INLINE, RAY = "placement.backend=inline", "placement.backend=ray"


class Slow(NativeEngine):
    """The native engine, so slow that the rows of a step end in many calls."""

    def step(self) -> list[Rollout]:
        time.sleep(0.02)
        return super().step()


class Killed(Slow):
    """The engine whose process is killed when it gives up a second row, once."""

    given_up = 0

    def detach(self, row: RowId) -> Rollout:
        self.given_up += 1
        mark = Path(os.environ[MARK])
        if self.given_up == 2 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().detach(row)


class OnlyTokens(Slow):
    """The engine without caches that move."""

    can: ClassVar = Slow.can - {Capability.CACHE}

    def detach(self, row: RowId) -> Rollout:
        raise NotImplementedError


@pytest.fixture
def tiny(tiny: Tiny) -> Tiny:
    tiny.write(REST, REWARD)
    text = tiny.recipe.read_text().replace('name = "grpo"\n', "").replace("context = 16", "context = 64")
    tiny.recipe.write_text(text)
    return tiny


def rows(tiny: Tiny, name: str) -> list[list[tuple[object, ...]]]:
    """Of every step the rows in order, with the bits of their log probabilities."""
    found = [read_rollouts(tiny.folder / name, step) for step in range(1, 4)]
    return [[(tuple(row.row), row.completion, row.logprobs, row.versions) for row in each] for each in found]


def scores_beside_rows(tiny: Tiny, step: int) -> bool:
    """Whether a rank computed values in a step while a row ran on another rank."""
    spans = {each["stage"]: each for each in tiny.lines("gathered", "spans.jsonl") if each["step"] == step}
    ran = spans["policy.generate"]["ranks"]
    last = max(each["start_s"] + each["duration_s"] for each in ran if each["rows"] == 0)
    return bool(min(each["start_s"] for each in spans["critic.values"]["ranks"]) < last)


@pytest.mark.parametrize("by", [pytest.param("tokens", marks=pytest.mark.slow), "cache"])
@pytest.mark.parametrize("backend", [INLINE, pytest.param(RAY, marks=pytest.mark.slow)])
def test_a_run_has_the_bits_of_one_that_does_not_gather(tiny: Tiny, by: str, backend: str) -> None:
    """Fixed shapes and micro-batches of one row: no number depends on the rows beside it."""
    if backend is RAY and find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    how = (*LONG, *TWO, backend, "policy.tokens_per_micro_batch=1")
    assert tiny.run("plain", *how) == 0
    assert tiny.run("gathered", *how, GATHER, f'schedule.gather_by="{by}"') == 0
    assert rows(tiny, "plain") == rows(tiny, "gathered")
    told = tiny.numbers("gathered")
    assert sum(each.get("gather/rows/sum", {"sum": 0})["sum"] for each in told) > 0
    alike = [{name: each[name] for name in each if not name.startswith("gather/")} for each in told]
    assert tiny.numbers("plain") == alike
    tiny.assert_same_weights("plain", "gathered")
    assert any(scores_beside_rows(tiny, step) for step in range(1, 4))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.parametrize("axis", ["pp", "tp"])
def test_the_ranks_of_one_copy_of_a_sharded_model_score_alone(tiny: Tiny, axis: str) -> None:
    """Each rank samples; two ranks hold one copy of the reference, and one of the critic."""
    text = tiny.recipe.read_text().replace("layers = 1", "layers = 2").replace("kv_heads = 1", "kv_heads = 2")
    tiny.recipe.write_text(text)
    mesh = f"placement.train_parallel={{main={{dp=2, {axis}=2}}}}"
    how = (*LONG, "placement.pools={main=4}", mesh, RAY, "policy.tokens_per_micro_batch=1")
    assert tiny.run("plain", *how) == 0
    assert tiny.run("gathered", *how, GATHER, "schedule.gather_replicas=2") == 0
    assert rows(tiny, "plain") == rows(tiny, "gathered")
    assert any(scores_beside_rows(tiny, step) for step in range(1, 4))


def test_a_sampler_on_ranks_of_its_own_shares_them_with_a_reference(tiny: Tiny) -> None:
    """The critic is on the policy's rank, which has nothing else to do meanwhile."""
    apart = (
        "placement.pools={main=1, answers=2}",
        'placement.roles={sampler="answers", reference="answers"}',
        INLINE,
        "policy.tokens_per_micro_batch=1",
    )
    assert tiny.run("plain", *LONG, *apart) == 0
    assert tiny.run("gathered", *LONG, *apart, GATHER) == 0
    assert rows(tiny, "plain") == rows(tiny, "gathered")
    tiny.assert_same_weights("plain", "gathered")
    found = [each for each in tiny.lines("gathered", "spans.jsonl") if each["stage"] == "reference.logprobs"]
    assert {each["pool"] for each in found} == {"answers"}
    assert any(scores_beside_rows(tiny, step) for step in range(1, 4))


def test_larger_micro_batches_change_scores_by_rounding_only(tiny: Tiny) -> None:
    assert tiny.run("plain", *LONG, *TWO, INLINE, "algorithm.steps=1") == 0
    assert tiny.run("gathered", *LONG, *TWO, INLINE, "algorithm.steps=1", GATHER) == 0
    for one, other in zip(tiny.numbers("plain"), tiny.numbers("gathered"), strict=True):
        for name, known in one.items():
            assert other[name] == pytest.approx(known, rel=1e-4, abs=1e-5), name


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_a_replica_that_is_killed_while_its_rows_move_begins_them_again(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its process ends by SIGKILL between two rows that it gives up; the run goes on and has its bits."""
    monkeypatch.setenv(MARK, str(tiny.folder / "killed"))
    how = (*LONG, *TWO, RAY, "policy.tokens_per_micro_batch=1", "run.checkpoint_every=1")
    assert tiny.run("plain", *how) == 0
    killing = f'rollout.engine="{__name__}:Killed"'
    assert tiny.run("gathered", *how, GATHER, killing, "run.restarts=1") == 0
    assert (tiny.folder / "killed").exists()
    assert "has died" in "".join(capsys.readouterr())
    assert rows(tiny, "plain") == rows(tiny, "gathered")
    tiny.assert_same_weights("plain", "gathered")


REFUSED = [
    (('schedule={mode="gathering",gather_rows=9}',), "a step has 8 rows"),
    ((FOUR, "schedule.gather_replicas=2"), "the sampler has 2 replicas, of which 2"),
    ((FOUR, "rollout.max_rows=2"), "the sampler has 2 replicas, of which 2"),
    ((FOUR, "placement.pools={main=1}", "placement.train_parallel={}"), "1 replica,"),
    ((FOUR, "schedule.freshness=1", *APART), "has no key 'freshness'"),
    ((FOUR, 'rollout.agent.function="agent.py:run"'), "rollout.agent writes the rows"),
    (('schedule={mode="gathering"}',), "schedule.gather_rows is missing"),
    (('schedule={mode="gathering",gather_rows=0}',), "schedule.gather_rows is 0"),
]


@pytest.mark.parametrize(("settings", "said"), REFUSED)
def test_what_cannot_gather_is_refused(tiny: Tiny, settings: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_recipe(tiny.recipe, [*TWO, INLINE, *settings])
    assert said in str(refused.value)


def test_an_engine_that_cannot_move_caches_gathers_by_tokens(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    own = f'rollout.engine="{__name__}:OnlyTokens"'
    gather = ("algorithm.steps=1", GATHER)
    assert tiny.run("refused", *LONG, *TWO, INLINE, own, *gather) == 2
    assert "cannot move a row's KV cache" in "".join(capsys.readouterr())
    assert tiny.run("tokens", *LONG, *TWO, INLINE, own, *gather, 'schedule.gather_by="tokens"') == 0


def test_a_run_is_told_that_no_stage_scores_meanwhile(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    """Rewards are on ranks of their own, and the critic has none: nothing is won."""
    apart = ("placement.pools={main=1, answers=2}", 'placement.roles={sampler="answers"}')
    assert tiny.run("warned", *LONG, *apart, INLINE, "algorithm.steps=1", GATHER) == 0
    assert "no stage can score on the sampler's ranks" in "".join(capsys.readouterr())
