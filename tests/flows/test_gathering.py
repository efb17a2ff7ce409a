"""Steps whose last rows gather on few replicas: the rows and the result of a step that does not gather."""

from __future__ import annotations

import time
from importlib.util import find_spec

import pytest

from rillflow.records.rollout import Rollout
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
INLINE, RAY = "placement.backend=inline", "placement.backend=ray"


class Slow(NativeEngine):
    """The native engine, so slow that the rows of a step end in many calls."""

    def step(self) -> list[Rollout]:
        time.sleep(0.02)
        return super().step()


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


@pytest.mark.parametrize("by", ["tokens", "cache"])
@pytest.mark.parametrize("backend", [INLINE, pytest.param(RAY, marks=pytest.mark.slow)])
def test_a_step_has_the_rows_and_losses_of_one_that_does_not_gather(
    tiny: Tiny, by: str, backend: str
) -> None:
    if backend is RAY and find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    gather = ("rollout.gather_rows=6", f'rollout.gather_by="{by}"')
    assert tiny.run("plain", *LONG, *TWO, backend) == 0
    assert tiny.run("gathered", *LONG, *TWO, backend, *gather) == 0
    assert rows(tiny, "plain") == rows(tiny, "gathered")
    told = tiny.numbers("gathered")
    assert sum(each.get("gather/rows/sum", {"sum": 0})["sum"] for each in told) > 0
    for one, other in zip(tiny.numbers("plain"), told, strict=True):
        for name, known in one.items():
            assert other[name] == pytest.approx(known, rel=1e-4, abs=1e-5), name
