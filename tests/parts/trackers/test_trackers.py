"""Trackers of a run: what they get; one that raises, hangs, prints or is slow never touches training."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rillflow.cli.main import main
from rillflow.errors import install_package
from tests.flows.conftest import SUMS, Tiny
from tests.flows.warm import Command

TRACKER = '''
import json, os, sys, time
from pathlib import Path


class Mine:
    """Writes every call as a line into a file."""

    def __init__(self, file, trouble=""):
        self.file, self.trouble, self.calls = Path(file), trouble, 0

    def write(self, *call):
        with self.file.open("a") as out:
            out.write(json.dumps(call) + "\\n")

    def start(self, run):
        if self.trouble == "key":
            from rillflow_parts.trackers.tracker import TrackerError
            raise TrackerError("there is no key", fix="make one")
        self.write("start", run.step, dict(run.kept), list(run.tags), run.config["policy"]["lr"])
        return {"id": run.kept.get("id", "first")}

    def log(self, step, values, time_s):
        self.calls += 1
        if self.trouble == "hang":
            time.sleep(1000)
        if self.trouble == "slow":
            time.sleep(3)
        if self.trouble == "die":
            os._exit(5)
        if self.trouble == "raise" and self.calls < 3:
            print("x" * 100000)
            raise ValueError("no\\nroute")
        self.write("log", step, values)

    def samples(self, step, rows):
        self.write("samples", step, rows)

    def finish(self, state):
        self.write("finish", state)
'''
LOGGING = """
def reward(prompts, completions, log_metric, **_):
    for text in completions:
        log_metric("characters", len(text))
    return [len(text) / 3 for text in completions]
"""
REST = f"""steps = 2
{SUMS}
[run.trackers.mine]
class = "mine.py:Mine"
file = "FILE"
wait_s = 30
"""


@pytest.fixture
def tracked(tmp_path: Path) -> Tiny:
    """Return a recipe with a tracker of its own that writes calls.jsonl."""
    tiny = Tiny(tmp_path)
    (tiny.folder / "mine.py").write_text(TRACKER)
    tiny.write(REST.replace("FILE", str(tiny.folder / "calls.jsonl")), LOGGING)
    return tiny


def calls(tiny: Tiny) -> list[Any]:
    file = tiny.folder / "calls.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_tracker_gets_what_the_run_directory_gets(
    tracked: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tracked.run("run", 'run.tags=["a", "b"]', "run.trackers.mine.samples=2") == 0
    assert "tracker mine:" not in capsys.readouterr().out
    start, *logged, finish = calls(tracked)
    assert start == ["start", -1, {}, ["a", "b"], 1e-3] and finish == ["finish", "finished"]
    names = [(call[0], call[1], any("evaluation/" in name for name in call[2])) for call in logged]
    sent = [(step, is_evaluation) for kind, step, is_evaluation in names if kind == "log"]
    assert sent == [(0, True), (1, False), (2, False), (2, True)]
    last = tracked.lines("run")[-1]["metrics"]
    (values,) = [call[2] for call in logged if call[:2] == ["log", 2] and "policy/loss/mean" in call[2]]
    assert values.keys() == {name for name, parts in last.items() if "histogram" not in parts}
    assert values["reward_metrics/characters/mean"] == last["reward_metrics/characters/mean"]["mean"]
    assert last["reward_metrics/characters/mean"]["count"] == 8
    rows = [call[2] for call in logged if call[0] == "samples"]
    assert len(rows) == 2 and len(rows[0]) == 2 and rows[0][0].keys() >= {"prompt", "completion", "reward"}
    assert main(["verify", str(tracked.folder / "run")]) == 0


def test_a_resumed_run_goes_on_in_the_same_tracker_run_and_no_step_is_doubled(tracked: Tiny) -> None:
    assert tracked.run("run", "run.checkpoint_minutes=0", "run.checkpoint_every=1") == 0
    assert tracked.run("run", "algorithm.steps=3") == 0
    starts = [call for call in calls(tracked) if call[0] == "start"]
    assert [start[1:3] for start in starts] == [[-1, {}], [2, {"id": "first"}]]
    steps = [call[1] for call in calls(tracked) if call[0] == "log" and "policy/loss/mean" in call[2]]
    assert steps == [1, 2, 3]
    rewound = tracked.folder / "run"
    for name in ("checkpoints/step-000003", "finished.json"):  # as after a kill: step 3 runs again
        path = rewound / name
        path.rename(tracked.folder / path.name)
    assert tracked.run("run", "algorithm.steps=3") == 0
    steps = [call[1] for call in calls(tracked) if call[0] == "log" and "policy/loss/mean" in call[2]]
    assert steps == [1, 2, 3]


@pytest.mark.parametrize(
    "trouble",
    [
        "hang",
        "key",
        pytest.param("slow", marks=pytest.mark.slow),
        pytest.param("die", marks=pytest.mark.slow),
    ],
)
def test_a_tracker_in_trouble_costs_the_run_its_wait_at_most_and_track_sends_the_rest(
    tracked: Tiny, trouble: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (f"run.trackers.mine.trouble={trouble}", "run.trackers.mine.wait_s=1.0")
    began = time.monotonic()
    assert tracked.run("run", *settings) == 0
    assert time.monotonic() - began < 60
    said = capsys.readouterr().out
    run = tracked.folder / "run"
    assert f"rillflow track {run} sends the rest" in said
    assert "were not sent" in said and ("there is no key; make one" in said) == (trouble == "key")
    assert len(tracked.lines("run")) == 2 and (run / "report.html").is_file()
    assert main(["track", str(run), "mine", "--set", "trouble=none"]) == 0
    steps = [call[1] for call in calls(tracked) if call[0] == "log" and "policy/loss/mean" in call[2]]
    assert steps == [1, 2] and calls(tracked)[-1] == ["finish", "finished"]


def test_an_exception_is_told_once_and_the_call_is_repeated(
    tracked: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tracked.run("run", "run.trackers.mine.trouble=raise") == 0
    said = capsys.readouterr().out
    assert said.count("tracker mine: ValueError: no route; it is tried again") == 1
    assert "tracker mine: works again" in said
    assert next(call[1] for call in calls(tracked) if call[0] == "log") == 0
    assert 0 < (tracked.folder / "run/trackers/mine.log").stat().st_size < 1 << 20


def test_training_has_the_bits_of_a_run_without_trackers(tracked: Tiny) -> None:
    assert tracked.run("with") == 0
    assert tracked.run("without", "run.trackers=none") == 0
    tracked.assert_same("with", "without")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_the_tracker_too(tracked: Tiny, number: signal.Signals) -> None:
    trouble = "hang" if number is signal.SIGKILL else ""
    settings = {"algorithm.steps": 500, "run.trackers.mine.trouble": trouble, "run.trackers.mine.wait_s": 2.0}
    words = [f"--set={name}={value}" for name, value in settings.items()]
    run = tracked.folder / "run"
    command = Command(["run", str(tracked.recipe), "--dir", str(run), *words], tracked.folder / "said")
    until = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() or not calls(tracked):
        assert time.monotonic() < until and command.poll() is None, command.said
        time.sleep(0.05)
    (tracker,) = [each for each in _children(command.pid) if "trackers.worker" in _words(each)]
    os.kill(command.pid, number)
    command.wait(120)
    while Path(f"/proc/{tracker}").exists() and "trackers.worker" in _words(tracker):
        assert time.monotonic() < until, "the tracker outlives its run"
        time.sleep(0.1)
    if number is signal.SIGINT:
        assert calls(tracked)[-1] == ["finish", "stopped"]
        steps = [call[1] for call in calls(tracked) if call[0] == "log" and "policy/loss/mean" in call[2]]
        assert steps == [line["step"] for line in tracked.lines("run")]


def _children(process: int) -> list[int]:
    file = Path(f"/proc/{process}/task/{process}/children")
    return [int(word) for word in file.read_text().split()]


def _words(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ("run.trackers.mine.class=none.py:Mine", "no file|does not exist"),
        ("run.trackers.mine.class=mine.py:Yours", "has no function 'Yours'|has no class 'Yours'"),
        ("run.trackers.mlfow={}", "did you mean 'mlflow'"),
        ("run.trackers={ mlflow = { uri = 'http://me:secret@host' } }", "has a user or a password"),
    ],
)
def test_a_tracker_that_cannot_be_is_refused_before_the_start(
    tracked: Tiny, setting: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tracked.run("run", setting) == 2
    said = capsys.readouterr().err
    assert any(part in said for part in error.split("|")), said
    assert not (tracked.folder / "run").exists()


def test_a_package_that_is_missing_is_refused_with_its_pip_line(
    tracked: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rillflow_parts.trackers.checks.find_spec", lambda _: None)
    assert tracked.run("run", "run.trackers={ wandb = { project = 'x' } }") == 2
    assert f"fix: {install_package('wandb')}" in capsys.readouterr().err


def test_a_check_says_that_nothing_is_sent_without_a_key(
    tracked: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rillflow_parts.trackers.checks.find_spec", lambda _: "found")
    monkeypatch.setattr("rillflow_parts.trackers.checks.has_key", lambda: False)
    assert tracked.run("check", "run.trackers={ wandb = { project = 'x' } }") == 0
    assert "so nothing is sent" in " ".join(capsys.readouterr().out.split())


def test_track_without_a_tracker_says_how_to_name_one(
    tracked: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tracked.run("run", "run.trackers=none", "algorithm.steps=1") == 0
    run = str(tracked.folder / "run")
    assert main(["track", run]) == 2
    assert f"rillflow track {run} wandb --set project=NAME" in capsys.readouterr().err
    words = [f"--set=class={tracked.folder / 'mine.py'}:Mine", f"--set=file={tracked.folder / 'calls.jsonl'}"]
    assert main(["track", run, "other", *words]) == 0
    assert [call[0] for call in calls(tracked)] == ["start", "log", "log", "log", "finish"]
    assert main(["track", str(Path(run).parent)]) == 2


@pytest.mark.slow
def test_logged_values_of_all_ranks_and_children_are_counted(tracked: Tiny) -> None:
    ranks = ("placement.backend=inline", "placement.pools={main=2}", "reward.workers=2")
    assert tracked.run("run", "run.trackers=none", *ranks) == 0
    for line in tracked.lines("run"):
        assert line["metrics"]["reward_metrics/characters/mean"]["count"] == 8
