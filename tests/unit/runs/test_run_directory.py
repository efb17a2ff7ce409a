"""The run directory: created, refused, locked, resumed, rewound."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rillflow.controller.decisions import decisions_of
from rillflow.errors import RunDirectoryError
from rillflow.records.metrics import Mean
from rillflow.runs import layout
from rillflow.runs.environment import environment, git_revision
from rillflow.runs.integrity import damage
from rillflow.runs.reader import (
    Evaluation,
    SpanRecord,
    read_config,
    read_evaluations,
    read_metrics,
    read_spans,
    read_starts,
)
from rillflow.runs.run_directory import RunDirectory, set_aside
from tests.unit.written_rollouts import write_rollouts

CONFIG = {"policy": {"lr": 1e-5, "betas": (0.9, 0.95)}, "run": {"dir": "runs/a", "threads": 2}}


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """Yield a folder while file permissions apply, even if the tests run as root."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o777)
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(65534)
        try:
            yield folder
        finally:
            if is_root:
                os.seteuid(0)


def span(step: int, start_s: float, duration_s: float = 0.0) -> SpanRecord:
    return SpanRecord(
        step=step, stage="policy.generate", start_s=start_s, duration_s=duration_s, rows=2, tokens=64
    )


def log_steps(run: RunDirectory, steps: range) -> None:
    for step in steps:
        run.log_span(span(step, run.elapsed_s()))
        run.log_metrics(step, "grpo", {"reward/score/mean": Mean(total=float(step), count=1)})
        write_rollouts(run.path, step, [{"epoch": 0, "prompt_id": 0, "sample": 0}])
        run.log_evaluation(
            step, Evaluation(correct=1, count=2, mean_reward=0.5, interval=(0.1, 0.9), more={"x": 3})
        )


def content(path: Path) -> dict[str, bytes]:
    files = (file for file in path.rglob("*") if file.is_file() and file.name != "run.lock")
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def test_a_new_directory_holds_the_config_and_a_reopened_one_is_the_same_run(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "deep" / "run", CONFIG) as run:
        assert run.is_new
        assert run.checkpoints == tmp_path / "deep" / "run" / "checkpoints"
    with RunDirectory.open(tmp_path / "deep" / "run", CONFIG) as run:
        assert not run.is_new
        assert read_config(run.path)["policy"] == {"lr": 1e-5, "betas": [0.9, 0.95]}


def test_another_config_is_refused_with_every_difference(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", CONFIG) as run:
        log_steps(run, range(1, 2))
    other = {"policy": {"lr": 0.5, "betas": (0.9, 0.99)}, "run": {"dir": "runs/b", "threads": 1}, "extra": 1}
    with pytest.raises(RunDirectoryError) as caught:
        RunDirectory.open(tmp_path / "run", other, may_change=["run"])
    text = str(caught.value)
    assert "policy.lr: 1e-05 -> 0.5" in text
    assert "policy.betas.1: 0.95 -> 0.99" in text
    assert "extra: '(not set)' -> 1" in text
    assert "--fresh" in caught.value.fix
    assert "threads" not in text
    assert read_config(tmp_path / "run")["policy"]["lr"] == 1e-5  # type: ignore[index,call-overload]


def test_a_setting_that_may_change_is_recorded_with_its_old_value_and_the_new_one_is_kept(
    tmp_path: Path,
) -> None:
    with RunDirectory.open(tmp_path / "run", CONFIG) as run:
        log_steps(run, range(1, 2))
        run.log_start({"after_step": 0})
    changed = {**CONFIG, "run": {"dir": "runs/a", "threads": 8}}
    for _ in range(2):  # a start that fails before it is logged has changed nothing
        with RunDirectory.open(tmp_path / "run", changed, may_change=["run.threads"]) as run:
            assert [str(change) for change in run.changes] == ["run.threads: 2 -> 8"]
            assert read_config(run.path)["run"] == {"dir": "runs/a", "threads": 2}
    with RunDirectory.open(tmp_path / "run", changed, may_change=["run.threads"]) as run:
        run.log_start({"after_step": 1})
    assert read_config(tmp_path / "run")["run"] == {"dir": "runs/a", "threads": 8}
    assert [start.get("changes") for start in read_starts(tmp_path / "run")] == [
        None,
        [{"key": "run.threads", "old": 2, "new": 8}],
    ]
    with RunDirectory.open(tmp_path / "run", changed) as run:
        assert run.changes == ()


def test_a_setting_that_may_change_frees_none_whose_name_it_begins(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", {"run": {"thread": 1, "threads": 1}}) as run:
        log_steps(run, range(1, 2))
    with pytest.raises(RunDirectoryError, match=r"run\.threads: 1 -> 2"):
        RunDirectory.open(tmp_path / "run", {"run": {"thread": 1, "threads": 2}}, may_change=["run.thread"])


def test_a_start_that_made_no_step_refuses_no_other_config(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", {"device": "cuda"}) as run:
        run.log_evaluation(0, Evaluation(correct=1, count=2, mean_reward=0.5, interval=(0.1, 0.9)))
        first = run.id
    with RunDirectory.open(tmp_path / "run", {"device": "cpu"}) as run:
        assert read_config(run.path) == {"device": "cpu"}
        assert run.id == first
        (run.checkpoints / "step-000001").mkdir(parents=True)
    with pytest.raises(RunDirectoryError, match="device: 'cpu' -> 'cuda'"):
        RunDirectory.open(tmp_path / "run", {"device": "cuda"})


def test_every_run_has_an_id_of_its_own_that_stays(tmp_path: Path) -> None:
    ids = []
    for name in ("a", "b", "a"):
        with RunDirectory.open(tmp_path / name, CONFIG) as run:
            run.log_start({"device": "cpu"})
            ids.append(run.id)
    assert ids[0] == ids[2] != ids[1]
    assert len(read_starts(tmp_path / "a")) == 2


def test_a_file_a_foreign_directory_and_a_broken_link_are_refused_and_untouched(tmp_path: Path) -> None:
    file, model, link = tmp_path / "notes.txt", tmp_path / "model", tmp_path / "link"
    file.write_text("mine")
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    link.symlink_to(tmp_path / "nowhere")
    for path, word in (
        (file, "notes.txt is a file"),
        (model, "'config.json'"),
        (link, "link is not a directory"),
    ):
        for act in (lambda path: RunDirectory.open(path, CONFIG), set_aside):
            with pytest.raises(RunDirectoryError) as caught:
                act(path)
            assert word in str(caught.value)
    assert file.read_text() == "mine"
    assert [entry.name for entry in model.iterdir()] == ["config.json"]


def test_a_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="file/run: Not a directory"):
        RunDirectory.open(tmp_path / "file" / "run", CONFIG)


def test_an_unwritable_place_is_refused_by_name(unprivileged: Path) -> None:
    (unprivileged / "locked").mkdir()
    (unprivileged / "locked").chmod(0o555)
    with pytest.raises(RunDirectoryError) as caught:
        RunDirectory.open(unprivileged / "locked" / "run", CONFIG)
    assert f"cannot write {unprivileged / 'locked' / 'run'}: Permission denied" in str(caught.value)
    mode = f"has the mode dr-xr-xr-x; this process runs as user {os.geteuid()}"
    assert f"{unprivileged / 'locked'} belongs to user {os.geteuid()} and {mode}" in caught.value.why
    assert "choose a writable run directory" in caught.value.fix


def test_a_run_that_became_read_only_says_so_and_keeps_what_it_has(unprivileged: Path) -> None:
    with RunDirectory.open(unprivileged / "run", CONFIG) as run:
        log_steps(run, range(1, 3))
        before = content(run.path)
        (run.path / "metrics.jsonl").chmod(0o444)
        (run.path / "rollouts").chmod(0o555)
        run.path.chmod(0o555)
        acts: list[Callable[[], None]] = [
            lambda: run.log_metrics(3, "grpo", {}),
            lambda: write_rollouts(run.path, 3, [{}]),
            lambda: run.write_json("summary.json", {}),
        ]
        for act in acts:
            with pytest.raises(RunDirectoryError, match="Permission denied"):
                act()
        assert content(run.path) == before
        run.path.chmod(0o777)
        (run.path / "rollouts").chmod(0o777)


def test_a_second_driver_is_refused_and_told_about_the_first(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", CONFIG):
        script = (
            "import sys; from pathlib import Path; from rillflow.runs.run_directory import RunDirectory;"
            "RunDirectory.open(Path(sys.argv[1]), {})"
        )
        other = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "run")],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert other.returncode != 0
        assert f"is in use by process {os.getpid()} on " in other.stderr
        assert "started 20" in other.stderr
        with pytest.raises(RunDirectoryError, match="is in use by process"):
            set_aside(tmp_path / "run")


def test_the_holder_is_named_after_one_of_a_longer_name(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", CONFIG):
        pass
    longer = {"pid": 1, "host": "x" * 500, "started": "long ago"}
    (tmp_path / "run" / "run.lock").write_text(json.dumps(longer))
    with (
        RunDirectory.open(tmp_path / "run", CONFIG),
        pytest.raises(RunDirectoryError, match=f"is in use by process {os.getpid()} on "),
    ):
        RunDirectory.open(tmp_path / "run", CONFIG)


def test_the_lock_of_a_killed_driver_is_free(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from rillflow.runs.run_directory import RunDirectory;"
        "RunDirectory.open(Path(sys.argv[1]), {}); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path / "run")], timeout=30, check=False)
    assert killed.returncode == -9
    with RunDirectory.open(tmp_path / "run", {}) as run:
        assert not run.is_new


def test_a_refused_open_frees_the_lock(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", {"a": 1}) as run:
        log_steps(run, range(1, 2))
    with pytest.raises(RunDirectoryError):
        RunDirectory.open(tmp_path / "run", {"a": 2})
    RunDirectory.open(tmp_path / "run", {"a": 1}).close()


def test_a_directory_whose_driver_died_before_the_config_was_there_is_new(tmp_path: Path) -> None:
    RunDirectory.open(tmp_path / "run", {"a": 1}).close()
    (tmp_path / "run" / "config.json").unlink()
    with RunDirectory.open(tmp_path / "run", {"a": 2}) as run:
        assert run.is_new


def test_rewind_drops_later_steps_and_a_second_rewind_changes_nothing(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", CONFIG) as run:
        log_steps(run, range(1, 4))
        at_three = content(run.path)
        log_steps(run, range(4, 6))
        (run.path / "rollouts" / "notes.txt").write_text("mine")
        run.rewind(3)
        assert content(run.path) == {**at_three, "rollouts/notes.txt": b"mine"}
        run.rewind(3)
        assert content(run.path) == {**at_three, "rollouts/notes.txt": b"mine"}
        run.rewind(-1)
        assert not read_metrics(run.path) and not read_spans(run.path) and not read_evaluations(run.path)


def test_decisions_outlive_a_rewind_and_are_cut_at_any_of_them(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", {}) as run:
        run.log_decisions([["draw", 2], ["call", 0, 4]])
        run.log_decisions([["form", []]])
        run.rewind(-1)
        assert decisions_of(run.path) == [["draw", 2], ["call", 0, 4], ["form", []]]
        run.cut_decisions(1)
        assert decisions_of(run.path) == [["draw", 2]] and damage(run.path, is_deep=True) == []
        run.log_decisions([["draw", 1]])
    file = tmp_path / "run" / layout.DECISIONS
    file.write_bytes(file.read_bytes().replace(b'["draw", 1]', b'["draw", 9]'))
    with RunDirectory.open(tmp_path / "run", {}) as run:
        run.rewind(-1)
        assert decisions_of(run.path) == [["draw", 2]], "a changed line and those after it are dropped"


def test_torn_lines_and_drafts_of_a_killed_driver_are_mended_at_the_next_start(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", CONFIG) as run:
        log_steps(run, range(1, 3))
        whole = content(run.path)
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "phase": "gr')
    with (tmp_path / "run" / "spans.jsonl").open("ab") as file:
        file.write(b"\0\0\0\0\n")
    (tmp_path / "run" / "rollouts" / ".step-000003.jsonl.tmp").write_text('{"epo')
    with RunDirectory.open(tmp_path / "run", CONFIG) as run:
        assert content(run.path) == whole
        log_steps(run, range(3, 4))
        assert [record.step for record in read_metrics(run.path)] == [1, 2, 3]


def test_time_goes_on_after_a_resume_and_never_backwards(tmp_path: Path) -> None:
    now = [100.0]
    with RunDirectory.open(tmp_path / "run", CONFIG, clock=lambda: now[0]) as run:
        run.log_span(span(1, run.elapsed_s(), 2.0))
        now[0] += 2.0
        run.log_metrics(1, "grpo", {})
        now[0] += 3.0
        run.log_metrics(2, "grpo", {})
    now[0] = 7.0  # another boot, another zero
    with RunDirectory.open(tmp_path / "run", CONFIG, clock=lambda: now[0]) as run:
        run.rewind(1)
        now[0] += 0.5
        run.log_metrics(2, "grpo", {})
        assert [record.time_s for record in read_metrics(run.path)] == [2.0, 2.5]
        (first,) = read_spans(run.path)
        assert (first.stage, first.start_s, first.duration_s, first.rows, first.tokens) == (
            "policy.generate",
            0.0,
            2.0,
            2,
            64,
        )


def test_a_resumed_run_s_clock_begins_after_a_stage_that_ended_later_than_its_last_metric(
    tmp_path: Path,
) -> None:
    now = [0.0]
    with RunDirectory.open(tmp_path / "run", CONFIG, clock=lambda: now[0]) as run:
        now[0] = 2.0
        run.log_metrics(1, "grpo", {})
        run.log_span(span(2, 2.0, 7.0))
    with RunDirectory.open(tmp_path / "run", CONFIG, clock=lambda: now[0]) as run:
        assert run.elapsed_s() == 9.0


def test_every_start_is_kept_and_no_environment_variable_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary-5f1d")
    for device in ("cpu", "cuda:0"):
        with RunDirectory.open(tmp_path / "run", CONFIG) as run:
            run.log_start(environment(device=device, command=["rillflow", "run", "run.toml"]))
    starts = read_starts(tmp_path / "run")
    assert [start["device"] for start in starts] == ["cpu", "cuda:0"]
    assert starts[0]["versions"]["numpy"]  # type: ignore[index,call-overload]
    assert starts[0]["command"] == ["rillflow", "run", "run.toml"]
    assert all(b"canary-5f1d" not in data for data in content(tmp_path / "run").values())


def test_the_git_revision_says_when_files_differ(tmp_path: Path) -> None:
    assert git_revision(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("1")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *command], check=True, timeout=30)
    clean = git_revision(tmp_path)
    assert clean is not None and len(clean) == 40
    (tmp_path / "file").write_text("2")
    assert git_revision(tmp_path) == f"{clean}-dirty"


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", CONFIG) as run:
        run.write_json("environment.json", {"format": 99, "starts": []})
    with pytest.raises(RunDirectoryError, match="has format 99"):
        RunDirectory.open(tmp_path / "run", CONFIG)


@pytest.mark.parametrize("name", ["../other.json", "/etc/x", "a/b.json", "..", ""])
def test_a_name_that_leaves_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    with (
        RunDirectory.open(tmp_path / "run", CONFIG) as run,
        pytest.raises(RunDirectoryError, match="is not a plain file name"),
    ):
        run.write_json(name, {})


def test_a_closed_directory_writes_nothing(tmp_path: Path) -> None:
    run = RunDirectory.open(tmp_path / "run", CONFIG)
    run.close()
    run.close()
    with pytest.raises(RunDirectoryError, match="is closed"):
        run.log_metrics(1, "grpo", {})
    with pytest.raises(RunDirectoryError, match="is closed"):
        run.rewind(0)


def test_a_run_is_set_aside_whole_and_its_place_is_free(tmp_path: Path) -> None:
    assert set_aside(tmp_path / "run") is None
    for count in (1, 2):
        with RunDirectory.open(tmp_path / "run", {"count": count}) as run:
            assert run.is_new
        kept = set_aside(tmp_path / "run")
        assert kept == tmp_path / f"run.old-{count}"
        assert json.loads((kept / "config.json").read_text()) == {"count": count}
        assert not (tmp_path / "run").exists()


def test_a_run_that_cannot_be_set_aside_is_named(tmp_path: Path) -> None:
    path = tmp_path / ("r" * 250)  # with ".old-1", the name is longer than a file system allows
    with RunDirectory.open(path, CONFIG):
        pass
    with pytest.raises(RunDirectoryError, match=f"cannot write {path}: File name too long"):
        set_aside(path)
    assert (path / "config.json").exists()


def test_a_run_whose_lock_file_was_removed_is_still_a_run(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", CONFIG) as run:
        run.log_start({"device": "cpu"})
    (tmp_path / "run" / "run.lock").unlink()
    with RunDirectory.open(tmp_path / "run", CONFIG) as run:
        assert not run.is_new
