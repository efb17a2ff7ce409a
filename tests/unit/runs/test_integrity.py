"""Every changed, removed or truncated line and every removed file of a run directory is found and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.errors import RunDirectoryError
from rillflow.records.metrics import Sum
from rillflow.runs.integrity import Evidence, damage, digest
from rillflow.runs.reader import Evaluation
from rillflow.runs.run_directory import RunDirectory

CONFIG = {"run": {"seed": 3}}
ROLLOUTS = "rollouts/step-000002-0001-of-0001.safetensors"


def write_run(path: Path, steps: int = 4) -> Path:
    """Write a run of some steps with an evaluation, rollouts and a finished mark."""
    with RunDirectory.open(path, CONFIG) as run:
        run.log_start({"device": "cpu"})
        for step in range(1, steps + 1):
            run.log_metrics(step, "grpo", {"rollout/tokens/sum": Sum(value=float(step))})
            file = path / f"rollouts/step-{step:06d}-0001-of-0001.safetensors"
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(b"rows" * step)
            run.evidence.of_rollouts(step, {file.name: digest(file.read_bytes())})
        run.log_evaluation(steps, Evaluation(count=5, mean_reward=0.5))
        run.write_json("tokens.json", {"texts": ["a", "b"]})
        run.write_json("finished.json", {"steps": steps})
        run.write_json("summary.json", {"steps": steps})
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "whole")


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """Return a copy of the run, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def found(run: Path) -> list[str]:
    return [str(each) for each in damage(run, is_deep=True)]


def test_a_run_that_nothing_touched_is_whole(whole: Path) -> None:
    assert found(whole) == []


def change(file: str, old: str, new: str) -> Callable[[Path], None]:
    def act(run: Path) -> None:
        text = (run / file).read_text()
        assert old in text
        (run / file).write_text(text.replace(old, new))

    return act


def keep_lines(file: str, *places: int) -> Callable[[Path], None]:
    def act(run: Path) -> None:
        lines = (run / file).read_bytes().splitlines(keepends=True)
        (run / file).write_bytes(b"".join(lines[place] for place in places))

    return act


def remove(file: str) -> Callable[[Path], None]:
    return lambda run: (run / file).unlink()


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (change("metrics.jsonl", '"sum": 2.0', '"sum": 9.0'), "metrics.jsonl line 2 (step 2): changed"),
        (keep_lines("metrics.jsonl", 0, 2, 3), "metrics.jsonl (step 2): a line is missing"),
        (keep_lines("metrics.jsonl", 0, 1, 2), "metrics.jsonl (step 4): a line is missing"),
        (keep_lines("metrics.jsonl", 0, 1, 2, 3, 3), "metrics.jsonl line 5: the run did not write this line"),
        (remove("metrics.jsonl"), "metrics.jsonl: missing: it had 4 lines"),
        (change("evaluations.jsonl", "0.5", "0.9"), "evaluations.jsonl line 1 (step 4): changed"),
        (change(ROLLOUTS, "rows", "rowz"), f"{ROLLOUTS}: changed"),
        (remove(ROLLOUTS), f"{ROLLOUTS}: missing"),
        (change("tokens.json", "b", "c"), "tokens.json: changed"),
        (remove("config.json"), "config.json: missing"),
        (remove("digests.jsonl"), "digests.jsonl: missing: the other files cannot be verified"),
    ],
)
def test_damage_is_named_with_file_and_line(run: Path, act: Callable[[Path], None], told: str) -> None:
    act(run)
    assert told in found(run)


@settings(max_examples=60)
@given(data=st.data())
def test_any_changed_byte_of_any_file_is_found(whole: Path, data: st.DataObject) -> None:
    names = [file for file in whole.rglob("*") if file.is_file() and file.name != "run.lock"]
    file = data.draw(st.sampled_from(sorted(names)))
    content = file.read_bytes()
    place = data.draw(st.integers(0, len(content) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda value: value != content[place]))
    try:
        file.write_bytes(content[:place] + bytes([other]) + content[place + 1 :])
        try:
            assert found(whole) or file.name == "digests.jsonl"  # the content of an entry may still agree
        except RunDirectoryError as error:
            assert "digests.jsonl" in str(error)
    finally:
        file.write_bytes(content)


def test_a_kill_between_an_entry_and_its_line_is_no_damage(run: Path) -> None:
    with (run / "digests.jsonl").open("ab") as file:
        file.write(b'{"file": "metrics.jsonl", "step": 5, "digest": "00"}\n{"file": "met')
    assert found(run) == []
    with RunDirectory.open(run, CONFIG) as opened:
        assert opened.notes == ()
        opened.log_metrics(5, "grpo", {})
    assert found(run) == []


def test_rewinding_leaves_a_whole_run_and_keeps_earlier_damage(run: Path) -> None:
    change("metrics.jsonl", '"sum": 1.0', '"sum": 9.0')(run)
    with RunDirectory.open(run, CONFIG) as opened:
        assert any("metrics.jsonl line 1 (step 1): changed" in note for note in opened.notes)
        opened.rewind(2)
        opened.log_metrics(3, "grpo", {})
    assert found(run) == ["metrics.jsonl line 1 (step 1): changed"]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("config.json", "changed"),
        ("config.json", "missing"),
        ("environment.json", "changed"),
        ("environment.json", "missing"),
        ("finished.json", "changed"),
    ],
)
def test_files_that_a_resume_needs_are_restored(run: Path, name: str, how: str) -> None:
    before = (run / name).read_bytes()
    if how == "missing":
        (run / name).unlink()
    else:
        (run / name).write_bytes(before.replace(b'"', b"'", 1))
    with RunDirectory.open(run, CONFIG) as opened:
        assert opened.notes == (f"{name} was {how} and is restored from digests.jsonl",)
    assert (run / name).read_bytes() == before
    assert found(run) == []


def test_a_run_whose_finished_json_is_missing_is_unfinished(run: Path) -> None:
    (run / "finished.json").unlink()
    assert found(run) == ["finished.json: missing"]
    with RunDirectory.open(run, CONFIG):
        pass
    assert not (run / "finished.json").exists()


def test_a_file_that_the_run_removed_itself_is_not_restored(run: Path) -> None:
    Evidence(run).remove("finished.json")
    with RunDirectory.open(run, CONFIG) as opened:
        assert opened.notes == ()
    assert not (run / "finished.json").exists()


def test_a_run_without_digests_is_taken_as_it_is_and_says_so(run: Path) -> None:
    (run / "digests.jsonl").unlink()
    with RunDirectory.open(run, CONFIG) as opened:
        assert any("digests.jsonl is missing" in note for note in opened.notes)
    assert found(run) == []


def test_a_checkpoint_that_is_gone_is_said(run: Path) -> None:
    Evidence(run).of_checkpoint(4)
    with RunDirectory.open(run, CONFIG) as opened:
        assert opened.notes == ("checkpoints/step-000004 is missing: it was the newest checkpoint",)


@pytest.mark.parametrize("other", [None, "another driver's"])
def test_a_driver_whose_lock_is_gone_writes_nothing_more(tmp_path: Path, other: str | None) -> None:
    with RunDirectory.open(tmp_path / "run", CONFIG) as first:
        first.log_metrics(1, "grpo", {})
        (first.path / "run.lock").unlink()
        if other is not None:
            (first.path / "run.lock").write_text(other)
        with pytest.raises(RunDirectoryError, match=r"run\.lock was (removed|replaced)"):
            first.log_metrics(2, "grpo", {})
        assert len((first.path / "metrics.jsonl").read_text().splitlines()) == 1


def test_digests_that_are_no_digests_are_named(run: Path) -> None:
    lines = (run / "digests.jsonl").read_text().splitlines()
    (run / "digests.jsonl").write_text("\n".join([lines[0], json.dumps({"file": "../x"}), *lines[1:], ""]))
    with pytest.raises(RunDirectoryError, match=r"line 2 is not a digest"):
        damage(run, is_deep=True)
