"""Recorded steps run again in a temporary directory; the first different value is named."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import rillflow
from rillflow.cli.main import main
from rillflow.errors import RunDirectoryError
from rillflow.runs.lock import Lock
from rillflow_parts.replay.replay import replay
from tests.flows.conftest import REWARD, SUMS, Tiny, written
from tests.flows.given_reward import longer

INLINE = """[placement]
backend = "inline"
pools = { main = 1, answers = 1 }
roles = { sampler = "answers" }
"""
REST = f"steps = 4\nloss.kl = 0.01\n{SUMS}[evaluate]\nevery = 2\n"
EVERY = ("run.checkpoint_every=2", "run.keep_checkpoints=9")


def contents(folder: Path) -> dict[str, tuple[str, int]]:
    """Return digest and time of every file in a folder."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    return {
        str(file.relative_to(folder)): (
            hashlib.sha256(file.read_bytes()).hexdigest(),
            file.stat().st_mtime_ns,
        )
        for file in files
    }


def steps_said(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("step ")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Return a folder with a run of four steps and checkpoints of steps 2 and 4."""
    tiny = Tiny(tmp_path_factory.mktemp("trained"))
    tiny.write(REST)
    assert tiny.run("run", *EVERY) == 0
    return tiny


@pytest.fixture
def copy(trained: Tiny, tmp_path: Path) -> Path:
    """Return a copy of that run's directory."""
    return Path(shutil.copytree(trained.folder / "run", tmp_path / "copy"))


def test_a_whole_run_is_equal_and_its_directory_is_untouched(
    trained: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained.folder / "run"
    before = contents(run)
    held = Lock(run / "run.lock")  # as if another process trained it
    before["run.lock"] = contents(run)["run.lock"]
    assert main(["replay", str(run)]) == 0
    held.release()
    assert contents(run) == before
    lines = steps_said(capsys.readouterr().out)
    assert lines[0] == "step 0: 1 evaluation, equal"
    assert [line.split(":")[0] for line in lines] == [f"step {step}" for step in range(5)]
    assert all("equal" in line and "8 rows" in line for line in lines[1:])
    assert "1 evaluation, " in lines[4] and "tensors, equal" in lines[4]


def test_one_step_starts_from_the_newest_checkpoint_before_it(
    trained: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained.folder / "run"
    assert main(["replay", str(run), "--step", "4"]) == 0
    said = capsys.readouterr().out
    assert f"steps 3 to 4, from {run / 'checkpoints' / 'step-000002'}" in said
    assert [line.split(":")[0] for line in steps_said(said)] == ["step 3", "step 4"]
    assert main(["replay", str(run), "--step", "3"]) == 0
    (line,) = steps_said(capsys.readouterr().out)
    assert "not compared: weights, the run has no checkpoint of the step" in line
    found = rillflow.open_run(run).replay(step=1)
    assert found.difference is None and found.start == 0


@pytest.mark.parametrize(
    "rest",
    [
        pytest.param(
            f'{INLINE}[schedule]\nmode = "ahead"\nfreshness = 2\n',
            id="versions behind",
            marks=pytest.mark.slow,
        ),
        pytest.param(f'{INLINE}[schedule]\nmode = "ahead"\nfreshness = 1\nstream_chunks = 2\n', id="chunks"),
        pytest.param('[schedule]\nmode = "tail_batching"\noversample_prompts = 1.5\n', id="tail batching"),
    ],
)
def test_each_way_of_sampling_is_equal(tiny: Tiny, rest: str, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.write(f"steps = 6\n{SUMS}{rest}[evaluate]\nevery = 3\n")
    assert tiny.run("run", *EVERY) == 0
    capsys.readouterr()
    run = str(tiny.folder / "run")
    assert main(["replay", run, "--step", "5"]) == 0
    assert [line.split(":")[0] for line in steps_said(capsys.readouterr().out)] == ["step 5"]
    assert main(["replay", run]) == 0
    assert "tensors, equal" in steps_said(capsys.readouterr().out)[6]


def test_every_phase_is_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, run = written(tmp_path), tmp_path / "run"
    assert main(["run", str(recipe), "--dir", str(run), "--quiet"]) == 0
    for words in ([], ["--step", "6"], ["--step", "8"]):
        assert main(["replay", str(run), *words]) == 0
    said = capsys.readouterr().out
    assert "step 1: 6 metrics, equal" in said  # demonstrations need no sampling
    assert f"steps 7 to 8, from {run / 'checkpoints' / 'step-000006'}" in said


def test_changed_settings_apply_from_the_step_of_their_start(tiny: Tiny) -> None:
    tiny.write(
        f"steps = 3\nloss.kl = 0.01\n{SUMS}[evaluate]\nevery = 2\n{INLINE}"
        "[schedule]\nmode = 'ahead'\nfreshness = 1\n"
    )
    assert tiny.run("run") == 0
    other = REWARD.replace("len(text) / 3", "1 - len(text) / 3")
    (tiny.folder / "scores.py").write_text(other)
    assert tiny.run("run", "policy.lr=5e-3", "algorithm.steps=6") == 0
    assert tiny.run("run", "policy.lr=1e-2", "algorithm.steps=8") == 0
    run = tiny.folder / "run"
    found = replay(run)
    assert found.difference is None and [each.step for each in found.steps] == list(range(9))
    (tiny.folder / "scores.py").unlink()  # the copies in the run directory are enough
    assert replay(run).difference is None
    (kept,) = [file for file in (run / "sources").iterdir() if file.read_text() == other]
    kept.write_text("")
    assert main(["replay", str(run), "--step", "8"]) == 2


def test_rows_sampled_ahead_of_a_change_are_equal(tiny: Tiny) -> None:
    tiny.write(f"steps = 6\n{SUMS}{INLINE}[schedule]\nmode = 'ahead'\nfreshness = 2\n")

    def stop(result: rillflow.StepResult) -> None:
        if result.step == 2:
            result.run.stop()

    rillflow.train(tiny.recipe, dir=tiny.folder / "run", callbacks=[stop], quiet=True)
    assert tiny.run("run", "policy.lr=5e-3") == 0
    after = [
        each["after_step"]
        for each in json.loads((tiny.folder / "run" / "environment.json").read_text())["starts"]
    ]
    assert after[0] == 0 < after[1] < 6
    assert replay(tiny.folder / "run").difference is None


def flip(run: Path, column: str, place: int, step: int = 3) -> None:
    """Change one value of a step's rollouts."""
    (file,) = (run / "rollouts").glob(f"step-{step:06d}-*")
    columns = load_file(file)
    columns[column][place] += 1
    save_file(columns, file)


def flip_metric(run: Path, name: str, step: int) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[step - 1]["metrics"][name]["mean"] += 1
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def flip_weight(run: Path, step: int) -> None:
    file = run / "checkpoints" / f"step-{step:06d}" / "policy" / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][3] += 1
    save_file(weights, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda run: flip(run, "tokens:values", 2),
            ["step 3", "column tokens, row (epoch 0 prompt ", "token 2:"],
        ),
        (lambda run: flip(run, "sampler_logprobs:values", 4), ["step 3", "column logprobs", "token 4:"]),
        (
            lambda run: flip(run, "versions:values", 5),
            ["step 3", "column versions", "recorded 3, replayed 2"],
        ),
        (lambda run: flip(run, "rewards:", 5), ["step 3", "column reward", "(difference -1)"]),
        (lambda run: flip(run, "advantages:", 0), ["step 3", "column advantage"]),
        (
            lambda run: flip_metric(run, "policy/entropy/mean", 4),
            ["step 4", "metric policy/entropy/mean, mean"],
        ),
        (lambda run: flip_weight(run, 4), ["step 4", "policy, tensor model.norm.weight, index [3]"]),
    ],
)
def test_one_changed_value_is_named(
    copy: Path, change: Callable[[Path], None], named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    change(copy)
    assert main(["replay", str(copy), "--step", "4"]) == 1
    said = capsys.readouterr().out
    assert f"first difference in {named[0]}\n" in said
    for words in named[1:]:
        assert words in said
    assert len([line for line in said.splitlines() if "DIFFERENT" in line]) == 1
    if "weight" not in said.split("first difference")[1].splitlines()[1]:
        assert "possible reason: damaged since the run wrote it: " in said


def test_another_setting_is_found_at_the_first_step_that_it_affects(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = replay(copy, 4, settings=["policy.lr=2e-3"])
    assert "the replay changed a setting: policy.lr=2e-3" in found.reasons
    assert found.difference is not None
    assert (found.difference.step, found.difference.recorded) == (3, 1e-3)
    assert found.difference.place == "metric train/lr/mean, mean"
    config = json.loads((copy / "config.json").read_text())
    config["rollout"]["temperature"] = 0.5
    (copy / "config.json").write_text(json.dumps(config))
    assert main(["replay", str(copy), "--step", "3"]) == 1
    said = capsys.readouterr().out
    assert "first difference in step 3" in said and "row (epoch" in said
    assert "possible reason: damaged since the run wrote it: config.json: changed" in said


def test_only_recorded_rollouts_are_compared(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.write(REST)
    assert tiny.run("run", "run.rollouts_every=2", "run.rollouts_share=0.5") == 0
    run = tiny.folder / "run"
    capsys.readouterr()
    assert main(["replay", str(run)]) == 0
    _, *lines = steps_said(capsys.readouterr().out)
    for line in (lines[0], lines[2]):
        assert " rows, " not in line and "(not compared: rollouts, none are recorded" in line
    for line in (lines[1], lines[3]):
        assert ": 8 rows, " in line or "rows, which are not recorded" in line
    for file in (run / "rollouts").iterdir():
        file.unlink()
    assert main(["replay", str(run)]) == 0
    assert "(not compared: rollouts, files of the step are missing" in capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["replay", *words]) == 2
    return capsys.readouterr().err


def test_bad_input_is_refused_in_words(
    trained: Tiny, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(copy)
    assert "its records end with step 4" in refusal(capsys, run, "--step", "5")
    assert "the replay ended after step 2" in refusal(capsys, run, "--set", "algorithm.steps=2")
    assert "not a bundle and not a run directory" in refusal(capsys, str(tmp_path / "none"))
    with pytest.raises(SystemExit):
        main(["replay", run, "--step", "0"])
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    (copy / "metrics.jsonl").write_text("\n".join([lines[0], lines[1][:40], *lines[2:], ""]))
    assert "metrics.jsonl line 2" in refusal(capsys, run)
    (copy / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    (file,) = (copy / "rollouts").glob("step-000002-*")
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    assert str(file) in refusal(capsys, run)
    file.write_bytes(data)
    known = json.loads((copy / "environment.json").read_text())
    (copy / "environment.json").write_text(json.dumps({**known, "format": 0}))
    assert "has format 0" in refusal(capsys, run)


def test_a_damaged_checkpoint_is_skipped_and_a_removed_one_is_named(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = copy / "checkpoints" / "step-000002"

    def remove(_: str) -> None:
        if kept.is_dir():
            kept.rename(copy / "checkpoints" / "away")

    with pytest.raises(RunDirectoryError, match="step-000002 was removed while the replay used it"):
        replay(copy, 3, say=remove)
    (copy / "checkpoints" / "away").rename(kept)
    (kept / "state.json").write_text("{}")
    assert main(["replay", str(copy), "--step", "3"]) == 0
    said = capsys.readouterr().out
    assert "state.json is not what was written" in said and "steps 1 to 3, from the start" in said


def test_other_data_are_refused_with_the_row(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.write('steps = 2\n[task]\nsource = "prompts.jsonl"\nheld_out = 0\n')
    tiny.write_rows(6)
    assert tiny.run("run") == 0
    run = str(tiny.folder / "run")
    assert main(["replay", run]) == 0
    found = replay(tiny.folder / "run", settings=["run.seed=4"])
    assert found.difference is not None and found.difference.step == 1  # it draws other rows
    tiny.write_rows(6, p3="9+9=")
    assert "line 4" in refusal(capsys, run)
    tiny.write_rows(8)
    assert "has 8 rows; these steps of" in refusal(capsys, run)


def test_rewards_given_in_python_are_read_from_their_kept_texts(tiny: Tiny) -> None:
    tiny.write(f"steps = 2\n{SUMS}")

    def even(completions: list[str]) -> list[float]:
        return [1.0 - len(text) % 2 for text in completions]

    run = rillflow.train(tiny.recipe, reward=[longer, (even, 0.5)], dir=tiny.folder / "run", quiet=True)
    assert run.replay().difference is None


READY = """[schedule]
mode = "ready_first"
freshness = 2
"""
TWO_REPLICAS = """[placement]
backend = "inline"
pools = { main = 1, answers = 2, scores = 1 }
roles = { sampler = "answers", reward = "scores", reference = "scores" }
"""


def test_a_ready_first_run_is_replayed_by_its_decisions(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also across a stop, after which the groups in flight were sampled again."""
    tiny.write(f"steps = 9\nloss.kl = 0.01\n{SUMS}[evaluate]\nevery = 3\n{TWO_REPLICAS}{READY}")
    assert tiny.run("run", "algorithm.steps=4", *EVERY) == 0
    assert tiny.run("run", *EVERY) == 0
    run = tiny.folder / "run"
    lines = [json.loads(line) for line in (run / "decisions.jsonl").read_text().splitlines()]
    events = [event for line in lines for event in line["events"]]
    assert {event[0] for event in events} >= {"draw", "begin", "call", "receive", "run", "form", "deliver"}
    capsys.readouterr()
    assert main(["replay", str(run)]) == 0
    told = steps_said(capsys.readouterr().out)
    assert [line.split(":")[0] for line in told] == [f"step {step}" for step in range(10)]
    assert all("equal" in line for line in told) and "tensors, equal" in told[-1]
    assert main(["replay", str(run), "--step", "6"]) == 0


def test_a_decision_that_cannot_be_repeated_is_named(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.write(f"steps = 2\nloss.kl = 0.01\n{SUMS}{TWO_REPLICAS}{READY}")
    assert tiny.run("run") == 0
    file = tiny.folder / "run" / "decisions.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    begun = next(event for line in lines for event in line["events"] if event[0] == "begin")
    group, begun[2] = begun[2], [7, 7]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    capsys.readouterr()
    assert main(["replay", str(tiny.folder / "run")]) != 0
    said = capsys.readouterr().err
    assert f"the replay decides ['begin', {begun[1]}, {group}]" in said and "[7, 7]" in said


def test_a_run_with_prompts_from_python_is_refused(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.write("steps = 1\n")
    prompts = ["1+1=", "2+2=", "3+3=", "4+4="]
    rillflow.train(tiny.recipe, prompts=prompts, dir=tiny.folder / "given", quiet=True)
    assert "prompts given in Python" in refusal(capsys, str(tiny.folder / "given"))


@pytest.mark.slow
def test_a_ready_first_run_on_ray_is_replayed_in_one_process(tiny: Tiny) -> None:
    tiny.write(f"steps = 6\nloss.kl = 0.01\n{SUMS}{TWO_REPLICAS.replace('inline', 'ray')}{READY}")
    assert tiny.run("run", *EVERY) == 0
    assert replay(tiny.folder / "run").difference is None


@pytest.mark.slow
def test_a_run_of_several_processes_is_replayed_in_one(tiny: Tiny) -> None:
    where = INLINE.replace("inline", "ray").replace("main = 1", "main = 2")
    tiny.write(f"steps = 4\n{SUMS}{where}[schedule]\nmode = 'ahead'\nfreshness = 1\n")
    assert tiny.run("run", *EVERY) == 0
    found = replay(tiny.folder / "run")
    assert found.difference is None and found.steps[-1].compared["tensors"]
    assert replay(tiny.folder / "run", 4).difference is None


def test_a_step_with_a_skipped_update_is_equal(tiny: Tiny) -> None:
    tiny.write(
        'steps = 4\nscale = "off"\n[task]\nsource = "prompts.jsonl"\nheld_out = 0\n',
        "def reward(prompts, completions, **_):\n"
        "    return [3e38 if text == '2+1=' and row % 2 else 0.5 for row, text in enumerate(prompts)]\n",
    )
    tiny.write_rows(6)
    assert tiny.run("run") == 0
    assert tiny.lines("run", "skips.jsonl")
    assert replay(tiny.folder / "run").difference is None
    assert tiny.run("ended", "run.max_skipped=0") == 1
    found = replay(tiny.folder / "ended")
    assert found.difference is None and found.steps[-1].step == tiny.lines("ended", "skips.jsonl")[-1]["step"]


def test_a_replay_without_gradients_on_the_way_leaves_torch_as_it_was(trained: Tiny) -> None:
    before = torch.get_num_threads(), torch.is_grad_enabled()
    assert replay(trained.folder / "run", 3).difference is None
    assert (torch.get_num_threads(), torch.is_grad_enabled()) == before
