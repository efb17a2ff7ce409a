"""A sampler that runs k versions ahead: the seed alone decides which version samples which rows."""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.cli.main import main
from rillflow.controller.checkpoint import _problem
from rillflow.controller.interrupt import Interruption
from rillflow.errors import ConfigError, Interrupted
from rillflow.models.model_files import write_tensors
from rillflow.records.batch import Batch
from rillflow.roles import saving
from rillflow.rollout.native.engine import NativeEngine
from rillflow.runs import layout
from rillflow.runs.reader import read_evaluations, read_metrics, read_spans, rollout_columns

sys.path.insert(0, str(Path(__file__).parent))
from small_recipe import RECIPE, REWARD

STEPS = 5
INLINE = ('placement.backend="inline"', "placement.pools={ main = 1, answers = 1 }")
APART = 'placement.roles={ sampler = "answers" }'
"""The same with one changed line: scoring stays with the policy."""
SCORED_THERE = 'placement.roles={ sampler = "answers", reward = "answers" }'
COUNTED = """
from pathlib import Path

def small(prompts, completions, **columns):
    with (Path(__file__).parent / "asked").open("a") as file:
        print(len(prompts), file=file)
    return [sum(letter < "5" for letter in text) / 4 for text in completions]
"""
SCORED_ALONE = 'placement.roles={ sampler = "answers", reward = "scores", reference = "scores" }'


def ran(
    folder: Path,
    freshness: int,
    *settings: str,
    name: str = "grpo",
    reward: str = REWARD,
    is_quiet: bool = True,
    **how: Any,
) -> dict[str, Any]:
    """Run; return the results that must not depend on placement: rows, metrics, evaluations, weights."""
    folder.mkdir(exist_ok=True)
    (folder / "run.toml").write_text(RECIPE.replace("NAME", name))
    (folder / "reward.py").write_text(reward)
    run = folder / "run"
    told = [
        f"run.dir={json.dumps(str(run))}",
        f"algorithm.steps={STEPS}",
        f'schedule={{mode="ahead",freshness={freshness}}}',
    ]
    told += ["evaluate.every=2", "policy.model.new.layers=1"]
    loaded = load_recipe(folder / "run.toml", [*told, *settings])
    launch(loaded, quiet=is_quiet, **how)
    newest = max((run / layout.CHECKPOINTS).iterdir())
    return {
        "rows": [rollout_columns(run, step) for step in layout.rollout_files(run)],
        "metrics": [
            {key: metric.value for key, metric in each.metrics.items() if "seconds" not in key}
            for each in read_metrics(run)
        ],
        "judged": [(each.step, each.mean_reward) for each in read_evaluations(run)],
        "weights": [file.read_bytes() for file in sorted((newest / "policy").glob("*.safetensors"))],
    }


def versions(found: dict[str, Any]) -> list[set[int]]:
    """Return the versions of the tokens of every sampled step."""
    return [{v for row in step["versions"] for v in row if v >= 0} for step in found["rows"]]


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Return runs with a separate sampler that is 0, 1 or 2 versions ahead."""
    folder = tmp_path_factory.mktemp("apart")
    return {freshness: ran(folder / str(freshness), freshness, *INLINE, APART) for freshness in (0, 1, 2)}


@pytest.mark.parametrize("freshness", [0, 1, 2])
def test_every_step_samples_with_the_version_that_is_k_steps_old(
    apart: dict[int, dict[str, Any]], freshness: int
) -> None:
    found = apart[freshness]
    (warm,) = versions(found)[0]
    assert versions(found)[1:] == [{warm + max(0, step - freshness)} for step in range(1, STEPS)]
    behind = [each.get("staleness/versions/max") for each in found["metrics"][-STEPS:]]
    assert behind == ([None] * STEPS if not freshness else [min(step, freshness) for step in range(STEPS)])
    assert [step for step, _ in found["judged"]] == [3, 5, 7, 8]


class Late(NativeEngine):
    """The native engine with a delay that depends on its rows."""

    def generate_parts(self, parts: Sequence[Batch], *given: Any) -> Iterator[Batch]:
        for rows in super().generate_parts(parts, *given):
            time.sleep(int(rows.ids.sum()) * 7 % 40 / 1000)
            yield rows


LATE = """
import time

def small(prompts, completions, **columns):
    time.sleep(sum(map(len, completions)) * 11 % 50 / 1000)
    return [sum(letter < "5" for letter in text) / 4 for text in completions]
"""


@pytest.mark.parametrize("parts", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_what_takes_how_long_changes_no_bit(tmp_path: Path, parts: int) -> None:
    plain = 'algorithm.loss.correction="none"'  # without this, a foreign engine gets a correction
    settings = (*INLINE, SCORED_THERE, f"schedule.stream_chunks={parts}", "algorithm.loss.kl=0", plain)
    prompt = ran(tmp_path / "a", 2, *settings)
    late = ran(tmp_path / "b", 2, *settings, f'rollout.engine="{__name__}:Late"', reward=LATE)
    for step in (
        *prompt["metrics"],
        *late["metrics"],
    ):  # a foreign engine is not checked for being on-policy
        for name in [name for name in step if name.startswith("mismatch/first_")]:
            del step[name]
    assert late == prompt


def test_at_bound_0_a_sampler_apart_learns_what_one_together_does(
    tmp_path: Path, apart: dict[int, dict[str, Any]]
) -> None:
    together = 'placement.roles={ reward = "answers" }'
    assert ran(tmp_path, 0, *INLINE, together) == apart[0]


def test_where_roles_are_changes_no_bit(tmp_path: Path, apart: dict[int, dict[str, Any]]) -> None:
    assert ran(tmp_path, 2, *INLINE, SCORED_THERE) == apart[2]


@pytest.mark.parametrize("name", ["ppo", pytest.param("dapo", marks=pytest.mark.slow)])
def test_where_roles_are_changes_no_bit_of_a_step_of_more(tmp_path: Path, name: str) -> None:
    """PPO has a critic, whose versions follow the policy's; DAPO counts rows in the middle of a step."""
    here = ran(tmp_path / "a", 2, *INLINE, APART, name=name)
    pools = "placement.pools={ main = 1, answers = 1, scores = 1 }"
    assert ran(tmp_path / "b", 2, *INLINE, pools, SCORED_ALONE, name=name) == here


@pytest.mark.parametrize("name", ["dapo", pytest.param("remax", marks=pytest.mark.slow)])
def test_rows_that_come_part_by_part_are_the_same_rows(tmp_path: Path, name: str) -> None:
    """Scoring stages run on each part alone; no bit of rows, weights or reports changes.

    No model computes on parts here, because a model's result on fewer rows is equal only up to rounding.
    """
    pools = "placement.pools={ main = 1, answers = 1, scores = 1 }"
    alone = SCORED_ALONE.replace(', reference = "scores"', "")
    settings = (*INLINE, pools, alone, "algorithm.loss.kl=0", "evaluate=none", "reward.sandbox=false")
    whole = ran(tmp_path / "a", 1, *settings, name=name, reward=COUNTED)
    parted = ran(tmp_path / "b", 1, *settings, "schedule.stream_chunks=3", name=name, reward=COUNTED)
    assert parted == whole
    asked = [list(map(int, (tmp_path / run / "asked").read_text().split())) for run in "ab"]
    assert sum(asked[1]) == sum(asked[0]) and len(asked[1]) > len(asked[0])
    step = {span.stage: span.rows for span in read_spans(tmp_path / "b/run") if span.step == 5}
    assert step["policy.generate"] == step["reward.score"]


TWO_SAMPLERS = ("placement.pools={ main = 1, answers = 2 }", "rollout.deterministic=true")


@pytest.mark.parametrize("samplers", [pytest.param((), marks=pytest.mark.slow), TWO_SAMPLERS])
def test_minibatches_are_trained_as_their_rows_come(tmp_path: Path, samplers: tuple[str, ...]) -> None:
    """With the sampling order as training order, an update by parts has the bits of one over all rows.

    Two samplers divide a part otherwise than all rows, so their passes have other shapes.
    """
    order = ("algorithm.shuffle=false", "algorithm.minibatches=5", "algorithm.old_logprobs=sampler")
    settings = (*INLINE, APART, *order, "algorithm.loss.kl=0", *samplers)
    whole = ran(tmp_path / "a", 1, *settings)
    assert ran(tmp_path / "b", 1, *settings, "schedule.stream_chunks=5") == whole
    if not samplers:
        mixed = ran(tmp_path / "c", 1, *settings, "algorithm.shuffle=true")
        assert mixed["weights"] != whole["weights"]


def test_what_models_say_of_parts_is_what_they_say_of_all_but_for_rounding(tmp_path: Path) -> None:
    """PPO: reference, old policy and critic score part by part, and the critic trains on parts."""
    settings = (*INLINE, APART, "algorithm.shuffle=false", "algorithm.minibatches=5")
    whole, parted = (
        ran(tmp_path / name, 1, *settings, f"schedule.stream_chunks={parts}", name="ppo")["metrics"]
        for name, parts in (("a", 1), ("b", 5))
    )
    for one, other in zip(whole, parted, strict=True):
        assert other == pytest.approx(one, rel=1e-3, abs=1e-4)


def test_parts_that_would_cut_minibatches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"schedule\.stream_chunks is 2, and algorithm\.prompts_per_step is 5"
    ):
        ran(tmp_path, 1, *INLINE, APART, "algorithm.shuffle=false", "schedule.stream_chunks=2")


@pytest.mark.parametrize(("freshness", "cuts"), [pytest.param(1, [2], marks=pytest.mark.slow), (4, [1, 4])])
def test_a_run_that_was_cut_goes_on_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, freshness: int, cuts: list[int]
) -> None:
    """Rows sampled ahead are in the checkpoint; steps of versions that are gone are not sampled again.

    Writing files takes longer than a step: a checkpoint belongs to its own step, whatever begins meanwhile.
    """
    monkeypatch.setattr(saving, "SMALL_BYTES", 0)
    monkeypatch.setattr(saving, "write_tensors", lambda *given: time.sleep(0.15) or write_tensors(*given))
    steps = f"algorithm.steps={freshness + 3}"
    settings = (*INLINE, APART, steps, "run.checkpoint_every=1", "run.keep_checkpoints=9")
    whole = ran(tmp_path / "a", freshness, *settings)
    made = sorted((tmp_path / "a/run" / layout.CHECKPOINTS).iterdir())
    assert [_problem(each, "") for each in made] == [None] * len(made) and len(made) > freshness + 3
    for lost in cuts:
        folder = tmp_path / f"b{lost}"
        shutil.copytree(tmp_path / "a", folder)
        (folder / "run" / layout.FINISHED).unlink()
        for checkpoint in sorted((folder / "run" / layout.CHECKPOINTS).iterdir())[-lost:]:
            shutil.rmtree(checkpoint)
        assert ran(folder, freshness, *settings) == whole


def goes_on(folder: Path, freshness: int) -> None:
    """Extend a finished run of a folder with the command."""
    settings = [
        f"algorithm.steps={STEPS}",
        f'schedule={{mode="ahead",freshness={freshness}}}',
        "evaluate.every=2",
    ]
    settings += ["policy.model.new.layers=1", *INLINE, APART]
    words = [word for each in settings for word in ("--set", each)]
    assert main(["run", str(folder / "run.toml"), "--dir", str(folder / "run"), *words]) == 0


def test_a_finished_run_goes_on_with_its_last_weights_and_says_so(
    tmp_path: Path, apart: dict[int, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """It has sampled nothing ahead: the next k steps are fresher than those of a longer run."""
    ran(tmp_path / "a", 2, *INLINE, APART, "algorithm.steps=2")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    goes_on(tmp_path / "b", 2)
    said = " ".join(capsys.readouterr().out.split())
    assert "steps 6 to 7 are sampled by the weights after step 5" in said
    found, again, whole = (
        ran(tmp_path / "a", 2, *INLINE, APART),
        ran(tmp_path / "b", 2, *INLINE, APART),
        apart[2],
    )
    (warm,) = versions(whole)[0]
    assert versions(found) == [{warm + version} for version in (0, 0, 2, 2, 2)]
    assert versions(whole) == [{warm + version} for version in (0, 0, 0, 1, 2)]
    assert found["rows"][:2] == whole["rows"][:2] and found["weights"] != whole["weights"]
    assert found["rows"] == again["rows"] and found["weights"] == again["weights"]


def test_a_finished_run_in_step_says_nothing_of_fresher_weights(
    tmp_path: Path, apart: dict[int, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    ran(tmp_path, 0, *INLINE, APART, "algorithm.steps=2")
    goes_on(tmp_path, 0)
    said = capsys.readouterr().out
    assert "resuming after step 5" in said and "sampled by the weights after" not in said
    assert ran(tmp_path, 0, *INLINE, APART)["weights"] == apart[0]["weights"]


SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in ("tis", "sequence_tis", "icepop", "topr")]


@pytest.mark.parametrize("correction", ["m2po", *SLOW])
def test_every_correction_runs_ahead(tmp_path: Path, correction: str) -> None:
    found = ran(tmp_path, 2, *INLINE, APART, f"algorithm.loss.correction={correction}", "evaluate=none")
    last = found["metrics"][-1]
    assert all(math.isfinite(value) for value in last.values())
    assert 0 < last["mismatch/weight/mean"] < 2 and 0 <= last["mismatch/bounded/share"] <= 1
    tokens = last["rollout/tokens/sum"]
    assert last["staleness/versions/histogram"] == last["mismatch/log_ratio/histogram"] == tokens
    report = (tmp_path / "run" / layout.REPORT).read_text()
    assert "&quot;heat&quot;" in report and ">Staleness<" in report


MOVING = (*INLINE, APART, "policy.lr=0.02", "evaluate=none")
"""A learning rate at which a bound on weights acts within a few steps."""


def test_a_stale_run_clips_the_ratio_to_the_sampler_by_default(tmp_path: Path) -> None:
    found = ran(tmp_path / "default", 2, *MOVING)
    stale = found["metrics"][1 - STEPS :]
    assert all(each["policy/clipped/share"] > 0 for each in stale)
    assert all("mismatch/weight/mean" not in each for each in stale)
    assert ran(tmp_path / "named", 2, *MOVING, "algorithm.old_logprobs=sampler") == found


def test_a_stale_run_of_the_trainers_ratio_has_weights_by_default(tmp_path: Path) -> None:
    trainer = "algorithm.old_logprobs=trainer"
    found = ran(tmp_path / "default", 2, *MOVING, trainer)
    fresh, *stale = found["metrics"][-STEPS:]
    assert fresh["mismatch/weight/mean"] == pytest.approx(1, abs=1e-4)
    assert fresh["mismatch/bounded/share"] == 0
    assert all(abs(each["mismatch/weight/mean"] - 1) > 1e-3 for each in stale)
    assert max(each["mismatch/bounded/share"] for each in stale) > 0
    assert ran(tmp_path / "named", 2, *MOVING, "algorithm.loss.correction=tis") == found
    plain = ran(tmp_path / "none", 2, *MOVING, "algorithm.loss.correction=none")
    assert "mismatch/weight/mean" not in plain["metrics"][-1] and plain["weights"] != found["weights"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            [],
            "note: schedule.freshness is 2: tokens may be 2 versions old. algorithm.old_logprobs is "
            '"sampler"',
        ),
        (
            ["algorithm.old_logprobs=trainer"],
            'note: schedule.freshness is 2: tokens may be 2 versions old. algorithm.loss.correction = "tis"',
        ),
        (["algorithm.loss.correction=none"], "note: warning: schedule.freshness is 2: tokens may be 2"),
    ],
)
def test_check_and_the_start_of_a_run_say_what_corrects_stale_tokens(
    settings: Sequence[str], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(RECIPE.replace("NAME", "grpo"))
    (tmp_path / "reward.py").write_text(REWARD)
    words = ['schedule={mode="ahead",freshness=2}', "evaluate=none", *INLINE, APART, *settings]
    given = [part for word in words for part in ("--set", word)]
    where = [str(tmp_path / "run.toml"), "--dir", str(tmp_path / "run"), *given]
    assert main(["check", *where]) == 0
    assert said in capfd.readouterr().out
    assert main(["run", *where]) == 0
    shown = capfd.readouterr().out
    assert shown.index(said) < shown.index("grpo 1/2")
    assert ("importance weight" in shown.split("grpo 2/2")[1].splitlines()[0]) == (
        settings == ["algorithm.old_logprobs=trainer"]
    )


def test_a_correction_of_the_samplers_own_numbers_is_refused(tmp_path: Path) -> None:
    same = ("algorithm.loss.correction=tis", "algorithm.old_logprobs=sampler")
    with pytest.raises(ConfigError, match=r'correction is "tis", and algorithm\.old_logprobs is "sampler"'):
        ran(tmp_path, 1, *INLINE, APART, *same)


def test_a_run_that_is_asked_to_stop_ends_with_what_it_sampled_ahead(
    tmp_path: Path, apart: dict[int, dict[str, Any]]
) -> None:
    asked = Interruption()

    def stop(phase: str, step: int, metrics: object) -> None:
        asked.requested = asked.requested or (phase == "grpo" and step == 5)

    with pytest.raises(Interrupted, match="stopped after step 6"):
        ran(tmp_path, 1, *INLINE, APART, told=stop, interruption=asked)
    kept = max((tmp_path / "run" / layout.CHECKPOINTS).glob("step-*"))
    assert [file.name for file in (kept / "ahead").iterdir()] == ["step-000007-000.safetensors"]
    assert ran(tmp_path, 1, *INLINE, APART) == apart[1]


def test_an_error_ahead_names_its_cause_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    settings = (*INLINE, APART, "run.checkpoint_every=1")
    with pytest.raises(Exception, match="one of mine"):
        ran(tmp_path, 1, *settings, told=raise_at_6)
    assert max((tmp_path / "run" / layout.CHECKPOINTS).glob("step-*")).name == "step-000005"


def raise_at_6(phase: str, step: int, metrics: object) -> None:
    if step == 6:
        raise ValueError("one of mine")


def test_ranks_that_take_turns_cannot_run_ahead(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"schedule\.freshness is 1, and the sampler shares its ranks"):
        ran(tmp_path, 1, "placement.pools={ main = 2 }")


RAY = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")


@RAY
@pytest.mark.slow
def test_processes_of_their_own_sample_and_learn_the_same(
    tmp_path: Path, apart: dict[int, dict[str, Any]]
) -> None:
    assert ran(tmp_path, 1, *INLINE, 'placement.backend="ray"', APART) == apart[1]


@RAY
@pytest.mark.slow
@pytest.mark.parametrize("freshness", [2, 4])
def test_several_processes_that_are_cut_and_go_on_learn_the_same(tmp_path: Path, freshness: int) -> None:
    """Two ranks train, two sample; the run is resumed in the middle."""
    sizes = ('placement.backend="ray"', "placement.pools={ main = 2, answers = 2 }", SCORED_THERE)
    steps = f"algorithm.steps={freshness + 3}"
    settings = (*sizes, steps, "run.checkpoint_every=1", "run.keep_checkpoints=9")
    whole = ran(tmp_path / "a", freshness, *settings)
    assert versions(whole)[-1] != versions(whole)[0]
    folder = tmp_path / "b"
    shutil.copytree(tmp_path / "a", folder)
    (folder / "run" / layout.FINISHED).unlink()
    for checkpoint in sorted((folder / "run" / layout.CHECKPOINTS).iterdir())[-2:]:
        shutil.rmtree(checkpoint)
    assert ran(folder, freshness, *settings) == whole
