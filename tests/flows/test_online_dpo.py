"""Online DPO end to end: collected pairs survive, references move, invalid settings are refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rillflow.algorithms.registry import ALGORITHMS
from rillflow.cli.main import main
from rillflow.controller.flow import Flow
from rillflow.errors import TrainingError
from rillflow.records.batch import load_batch
from tests.flows.conftest import Tiny

SETTINGS = """
minibatches = 2
steps = 4
[task]
source = "arithmetic"
digits = 1
operators = "+"
size = 60
held_out = 2
"""
PAIRS = ("algorithm.name=online_dpo", "run.checkpoint_every=1", "run.keep_checkpoints=9")
PAIRS += ("algorithm.samples_per_prompt=3", "algorithm.prompts_per_step=6", "policy.lr=3e-3")


@pytest.fixture
def small(tiny: Tiny) -> Tiny:
    tiny.write(SETTINGS)
    return tiny


def values(tiny: Tiny, run: str, name: str) -> list[float]:
    return [line[name]["mean"] for line in tiny.numbers(run)]


def cut(tiny: Tiny, run: str, after: int, into: str) -> None:
    """Copy a run as it was after a step."""
    shutil.copytree(tiny.folder / run, tiny.folder / into)
    (tiny.folder / into / "finished.json").unlink()
    for step in range(after + 1, 5):
        shutil.rmtree(tiny.folder / into / f"checkpoints/step-{step:06d}")


def collected(tiny: Tiny, run: str, step: int) -> Any:
    return load_batch(tiny.folder / run / f"checkpoints/step-{step:06d}/collected/pairs.safetensors")


def test_pairs_are_collected_and_a_resumed_run_has_the_same_bits(small: Tiny) -> None:
    assert small.run("whole", *PAIRS) == 0
    counts = values(small, "whole", "flow/paired_groups/mean")
    kept = [collected(small, "whole", step) for step in range(1, 5)]
    assert [len(each) for each in kept] == [int(2 * sum(counts[: step + 1])) for step in range(4)]
    last = kept[-1]
    assert bool((last.dense("preferred").long().view(-1, 2).sum(1) == 1).all())
    ends = last.ragged("versions").bounds[1:] - 1
    assert set(last.ragged("versions").values[ends].tolist()) == {0, 1, 2, 3}
    first = kept[0].dense("reference_totals")
    assert torch.equal(last.dense("reference_totals")[: len(first)], first)
    ages = [line.get("staleness/versions/max", {"max": 0})["max"] for line in small.numbers("whole")]
    assert ages == [0, 1, 2, 3]
    for after in (2,):
        cut(small, "whole", after, f"cut {after}")
        assert small.run(f"cut {after}", *PAIRS) == 0
        small.assert_same("whole", f"cut {after}")
        assert torch.equal(collected(small, f"cut {after}", 4).ids, last.ids)


def test_an_error_inside_an_iteration_saves_the_pairs_of_the_last_whole_one(small: Tiny) -> None:
    """The third iteration ends after it collected, and before it changed a weight."""
    rare, whole = (*PAIRS, "run.checkpoint_every=0", "algorithm.steps=3"), ALGORITHMS["online_dpo"]
    assert small.run("whole", *rare) == 0
    calls = []

    def step(flow: Any, prompts: Any, config: Any) -> Any:
        if isinstance(flow, Flow) and flow.journal.supply:  # not only a trace
            calls.append(flow)
            if len(calls) == 3:
                flow.collect("pairs", flow.rows["pairs"])
                raise TrainingError("the third one ends here")
        return whole.step(flow, prompts, config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALGORITHMS, "online_dpo", replace(whole, step=step))
        assert small.run("broken", *rare) == 1
    assert small.steps_kept("broken") == [2]
    assert small.run("broken", *rare) == 0
    small.assert_same("whole", "broken")
    assert torch.equal(collected(small, "whole", 3).ids, collected(small, "broken", 3).ids)


@pytest.mark.parametrize("name", ["online_dpo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_a_reference_that_moves_is_the_mean_it_should_be_and_resumes(small: Tiny, name: str) -> None:
    moves = (*PAIRS, f"algorithm.name={name}", "algorithm.reference=moving", "algorithm.reference_rate=0.25")
    moves += ("algorithm.reference_every=2",) + (("algorithm.loss.kl=0.1",) if name == "grpo" else ())
    assert small.run("whole", *moves) == 0

    def weights(step: int, role: str) -> dict[str, torch.Tensor]:
        return load_file(small.folder / f"whole/checkpoints/step-{step:06d}/{role}/model.safetensors")

    before = load_file(small.folder / "whole/reference/model.safetensors")
    for step in range(1, 5):
        now, policy = weights(step, "reference"), weights(step, "policy")
        for key, each in before.items():
            torch.testing.assert_close(now[key], each.lerp(policy[key], 0.0 if step % 2 else 0.25))
        before = now
    for after in (1,):
        cut(small, "whole", after, f"cut {after}")
        assert small.run(f"cut {after}", *moves) == 0
        small.assert_same("whole", f"cut {after}")


def test_previous_is_moving_all_the_way_in_every_iteration(small: Tiny) -> None:
    few = ("algorithm.steps=3", "evaluate.problems=0")
    assert small.run("previous", *PAIRS, "algorithm.reference=previous", *few) == 0
    assert not (small.folder / "previous/reference").exists(), "the policy itself says what it was"
    whole = ("algorithm.reference=moving", "algorithm.reference_rate=1.0")
    assert small.run("moving", *PAIRS, *whole, *few) == 0
    small.assert_same("previous", "moving")
    assert values(small, "previous", "pairs/loss/mean")[0] > 0


@pytest.mark.parametrize("reference", ["first", pytest.param("previous", marks=pytest.mark.slow)])
def test_fresh_pairs_alone_are_learnt_from(small: Tiny, reference: str) -> None:
    fresh = ("algorithm.data=fresh", f"algorithm.reference={reference}", "algorithm.selector=max_random")
    assert small.run("fresh", *PAIRS, *fresh, "algorithm.steps=2", "evaluate.problems=0") == 0
    assert not (small.folder / "fresh/checkpoints/step-000002/collected").exists()
    assert len(values(small, "fresh", "pairs/accuracy/mean")) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("data", "ages"), [("all", [0, 1, 2, 3]), ("fresh", [0, 1, 1, 1])])
def test_ahead_pairs_are_as_old_as_they_may_be_and_a_resumed_run_has_the_same_bits(
    small: Tiny, data: str, ages: list[int]
) -> None:
    """Collected pairs are trained at any age; the bound applies to fresh pairs."""
    ahead = (
        *PAIRS,
        f"algorithm.data={data}",
        'schedule={mode="ahead",freshness=1}',
        "placement.backend=inline",
    )
    ahead += ("placement.pools={main=1,answers=1}", 'placement.roles.sampler="answers"')
    assert small.run("whole", *ahead) == 0
    assert [line["staleness/versions/max"]["max"] for line in small.numbers("whole")] == ages
    cut(small, "whole", 2, "cut")
    assert small.run("cut", *ahead) == 0
    small.assert_same("whole", "cut")


def test_an_iteration_without_a_pair_is_counted_and_a_run_without_any_fails(
    small: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    flat = "def reward(prompts, completions, **_):\n    return [1.0] * len(prompts)\n"
    (small.folder / "scores.py").write_text(flat)
    assert small.run("none", *PAIRS, "algorithm.data=fresh") != 0
    assert "none of 4 iterations gave a pair to learn from" in capsys.readouterr().err
    assert values(small, "none", "flow/paired_groups/mean") == [0.0] * 3
    late = "import pathlib\nSEEN = pathlib.Path(__file__).with_name('seen')\n"
    late += "def reward(prompts, completions, **_):\n    late = SEEN.stat().st_size >= 36\n"
    late += "    with SEEN.open('a') as seen:\n        seen.write('.' * len(prompts))\n"
    late += "    return [len(text) / 3 if late else 1.0 for text in completions]\n"
    (small.folder / "scores.py").write_text(late)
    few = ("algorithm.steps=3", "evaluate.problems=0", "reward.workers=1", "reward.sandbox=false")
    for data in ("all", "fresh"):
        (small.folder / "seen").write_text("")
        assert small.run(data, *PAIRS, *few, f"algorithm.data={data}") == 0
        lines = small.numbers(data)
        assert ["pairs/loss/mean" in line for line in lines] == [False, False, True]
        assert values(small, data, "flow/iterations_without_pairs/mean") == [1.0, 2.0, -1.0]


def test_what_cannot_be_is_refused(small: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", str(small.recipe), "--set", "algorithm.name=online_dpo", "--set"]
    cases = {
        "algorithm.samples_per_prompt=1": "samples_per_prompt",
        "algorithm.selector=max_mim": "max_min",
        "algorithm.length_price=-1": "length_price",
        "schedule={mode='ready_first',on_stale='drop'}": "no row becomes stale",
        "algorithm.reference=last": "reference",
        "algorithm.truncated=bootstrap": "has no critic",
    }
    for setting, said in cases.items():
        assert main([*words, setting]) == 2
        assert said in capsys.readouterr().err
    apart = ["placement.pools={main=1,other=1}", 'placement.roles.reference="other"']
    moving = [word for each in (*apart, "algorithm.reference=moving") for word in ("--set", each)]
    assert main([*words[:-1], *moving]) == 2
    assert "its placement is not the policy's" in capsys.readouterr().err
    adapter = ["--set", "policy.model.adapter.rank=2", "--set", "algorithm.reference=moving"]
    assert main([*words[:-1], *adapter]) == 2
    assert "is not the mean of their weight updates" in capsys.readouterr().err
