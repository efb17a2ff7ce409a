"""A non-finite update is skipped, reported and saved, and ``rillflow replay`` repeats it."""

from __future__ import annotations

import pytest

from rillflow.cli.main import main
from tests.flows.conftest import Tiny

REST = """
steps = 5
minibatches = 2
scale = "off"
[task]
source = "prompts.jsonl"
held_out = 0
"""
REWARD = """
from pathlib import Path
HUGE = Path(__file__).with_name("huge")

def reward(prompts, completions, **_):
    scores = [len(text) / 3 for text in completions]
    for row, prompt in enumerate(prompts):
        if HUGE.exists() and prompt == "5+1=" and row % 2 == 0:
            scores[row] = 3e38
    return scores
"""


@pytest.fixture
def tiny(tiny: Tiny) -> Tiny:
    tiny.write(REST, REWARD)
    tiny.write_rows(9)
    (tiny.folder / "huge").touch()
    return tiny


def test_it_is_left_out_and_counted_its_rows_are_named_and_a_replay_finds_the_one(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny.run("run") == 0
    left_out = tiny.lines("run", "skips.jsonl")
    steps = [line["step"] for line in left_out]
    assert steps and set(steps) < {1, 2, 3, 4, 5}
    said = capsys.readouterr().out
    assert f"an update of the policy in step {steps[0]} was skipped: {left_out[0]['reason']}" in said
    counted = {line["step"]: line["metrics"] for line in tiny.lines("run", "metrics.jsonl")}
    for step, metrics in counted.items():
        skipped = metrics["train/skipped/sum"]["sum"] if step in steps else 0
        assert skipped == steps.count(step)
        assert ("train/skipped/sum" in metrics) == (step in steps)
        updates = metrics["train/grad_norm/mean"]["count"] if "train/grad_norm/mean" in metrics else 0
        assert updates == 2 - skipped
    assert all(any(prompt == 5 for _, prompt, _ in line["rows"]) for line in left_out)
    bundle = tiny.folder / "run" / "bundles" / f"step-{steps[0]:06d}"
    assert main(["replay", str(bundle)]) == 1
    said = capsys.readouterr().out
    assert f"the run found  {left_out[0]['reason']}" in said
    assert "first here     row (epoch 0 prompt 5 sample" in said
    (bundle / "config.json").write_text("{}")
    assert main(["replay", str(bundle)]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert main(["replay", str(bundle.parent)]) == 2
    assert "is not a bundle" in capsys.readouterr().err


def test_a_spent_budget_stops_with_a_checkpoint_and_a_larger_one_goes_on_to_the_same_bits(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny.run("whole") == 0
    assert tiny.run("run", "run.max_skipped=0") == 1
    step = tiny.lines("run", "skips.jsonl")[0]["step"]
    error = capsys.readouterr().err
    assert "run.max_skipped is 0" in error and "not finite" in error
    assert f"bundles/step-{step:06d}" in error
    assert (tiny.folder / "run" / "checkpoints" / f"step-{step:06d}").is_dir()
    assert tiny.run("run", "run.max_skipped=9") == 0
    tiny.assert_same("run", "whole")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp = 2", "fsdp = 2", "tp = 2", "pp = 2"])
def test_ranks_leave_it_out_together(tiny: Tiny, mesh: str) -> None:
    where = ("placement.pools={main=2}", f"placement.train_parallel={{main={{{mesh}}}}}")
    assert tiny.run("run", "policy.model.new.layers=2", "policy.model.new.kv_heads=2", *where) == 0
    left_out = tiny.lines("run", "skips.jsonl")
    assert left_out and all(len(line["rows"]) == 4 for line in left_out)
    bundle = tiny.folder / "run" / "bundles" / f"step-{left_out[0]['step']:06d}"
    assert main(["replay", str(bundle)]) == 1
