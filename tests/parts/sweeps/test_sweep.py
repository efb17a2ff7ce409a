"""Sweeps: every run of a grid, its table, a failing case, Ctrl-C and resume, the median rule."""

from __future__ import annotations

import csv
import json
import os
import signal
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rillflow.cli.main import main
from rillflow.errors import ConfigError, Interrupted
from rillflow.runs.reader import read_metrics
from rillflow_parts.sweeps.config import MedianConfig
from rillflow_parts.sweeps.jobs import LocalJobs, SweepJob
from rillflow_parts.sweeps.median import Result, below_median
from rillflow_parts.sweeps.plan import load_sweep
from rillflow_parts.sweeps.sweep import Sweep
from rillflow_parts.sweeps.table import RunState
from tests.flows.conftest import SUMS, Tiny
from tests.flows.warm import Command

REWARD = """
import time
def reward(prompts, completions, **_):
    SLOW
    return [len(text) / 3 for text in completions]
"""
SWEEP = """
recipe = "run.toml"
dir = "FOLDER/sweep"
seeds = 2
at_once = 2
[grid]
"policy.lr" = [1e-3, 1e-5]
"""


class _Warm(Command):
    def interrupt(self) -> None:
        os.kill(self.pid, signal.SIGINT)


class WarmJobs:
    """Jobs whose processes skip the imports; it keeps what was started."""

    def __init__(self) -> None:
        self.started: list[Sequence[str]] = []

    def start(self, words: Sequence[str], log: Path) -> SweepJob:
        self.started.append(words)
        return _Warm(words, log)


@pytest.fixture
def swept(tiny: Tiny) -> Tiny:
    """Return a folder with a recipe of seconds and a sweep over two rates and two seeds."""
    tiny.write(f"steps = 2\n{SUMS}\n", REWARD.replace("SLOW", "pass"))
    write(tiny, SWEEP)
    return tiny


def write(tiny: Tiny, text: str) -> None:
    (tiny.folder / "sweep.toml").write_text(text.replace("FOLDER", str(tiny.folder)))


def sweep(tiny: Tiny, said: list[str] | None = None) -> tuple[Sweep, WarmJobs]:
    jobs = WarmJobs()
    say = (said if said is not None else []).append
    return Sweep(load_sweep(tiny.folder / "sweep.toml"), jobs, say), jobs


def test_a_grid_over_seeds_has_a_table_with_intervals_and_a_second_start_runs_nothing(swept: Tiny) -> None:
    made, jobs = sweep(swept)
    cases = made.run()
    assert {case.case for case in cases} == {"lr=0.001", "lr=1e-05"} and len(jobs.started) == 4
    for case in cases:
        assert [each.state for each in case.results] == [RunState.FINISHED] * 2
        for each in case.results:
            config = json.loads((each.run.path / "config.json").read_text())
            assert config["policy"]["lr"] == case.settings["policy.lr"]
            assert config["run"]["seed"] == each.run.seed and config["run"]["tags"] == [swept.folder.name]
            assert (each.run.path / "report.html").is_file() and each.step == 2
    table = json.loads((swept.folder / "sweep/table.json").read_text())
    assert [case["case"] for case in table["cases"]] == [case.case for case in cases]
    assert "Student's 95%" in table["interval"]
    rows = list(csv.DictReader((swept.folder / "sweep/table.csv").read_text().splitlines()))
    assert len(rows) == 4 and {row["policy.lr"] for row in rows} == {"0.001", "1e-05"}
    again, none = sweep(swept)
    assert again.run() == cases or [case.mean for case in again.run()] == [case.mean for case in cases]
    assert none.started == []
    with (cases[0].results[0].run.path / "evaluations.jsonl").open("a") as file:  # its last result is graded
        file.write('{"step": 2, "measure": "mean_reward", "count": 4, "mean_reward": 0.5}\n')
    measures = [(each.measure, each.value) for case in again.table() for each in case.results]
    assert {measure for measure, _ in measures} == {"mean reward"} and ("mean reward", 0.5) in measures


def test_a_failing_case_is_named_with_its_error_and_others_go_on(
    swept: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = "def reward(prompts, completions, **_):\n    return [0.5] * len(completions)\n"
    (swept.folder / "scores.py").write_text(reward)
    (swept.folder / "bad.py").write_text("def reward(prompts, completions, **_):\n    raise KeyError('no')\n")
    cases = '[cases.good]\n[cases.bad]\n"reward.function" = "bad.py:reward"\n'
    write(swept, SWEEP.partition("[grid]")[0].replace("seeds = 2", "seeds = [7]") + cases)
    made, _ = sweep(swept)
    good, bad = made.run()
    assert good.case == "good" and good.mean is not None and good.interval is None
    assert bad.case == "bad" and bad.mean is None and bad.results[0].state is RunState.FAILED
    assert "KeyError: 'no'" in bad.results[0].why
    assert main(["sweep", str(swept.folder / "sweep.toml"), "--table"]) == 0
    said = capsys.readouterr().out
    assert "case  held-out" in said and "bad seed 7 waiting" in said


@pytest.mark.slow
def test_ctrl_c_leaves_checkpoints_and_the_same_sweep_resumes(swept: Tiny) -> None:
    swept.write(f"steps = 6\n{SUMS}\n", REWARD.replace("SLOW", "time.sleep(0.3)"))
    said: list[str] = []
    made, _ = sweep(swept, said)
    runs = load_sweep(swept.folder / "sweep.toml").runs[:2]
    began = time.monotonic()

    def tell(line: str) -> None:
        said.append(line)

    made._say = tell  # type: ignore[method-assign]
    settle = made._settle

    def interrupted() -> None:
        settle()
        if all(read_metrics(run.path) for run in runs) or time.monotonic() > began + 120:
            raise KeyboardInterrupt

    made._settle = interrupted  # type: ignore[method-assign]
    with pytest.raises(Interrupted, match="was stopped"):
        made.run()
    assert any("each run finishes its step" in line for line in said)
    steps = [len(read_metrics(run.path)) for run in runs]
    assert all(0 < made_steps < 6 for made_steps in steps), steps
    assert all(any((run.path / "checkpoints").iterdir()) for run in runs)
    again, jobs = sweep(swept)
    cases = again.run()
    assert len(jobs.started) == 4
    assert all(each.state is RunState.FINISHED for case in cases for each in case.results)


@pytest.mark.slow
def test_the_command_runs_real_processes(swept: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    write(swept, SWEEP.replace("seeds = 2", "seeds = 1") + "[stop]\nafter = 1\n")
    assert main(["sweep", str(swept.folder / "sweep.toml")]) == 0
    said = capsys.readouterr().out
    assert "lr=0.001 seed 0: starts" in said and "1/1" in said and "table.csv" in said


@pytest.mark.slow
def test_a_run_below_the_median_is_stopped_for_good(swept: Tiny) -> None:
    text = (
        "import time\ndef reward(prompts, completions, **_):\n    time.sleep(0.1)\n"
        "    return [VALUE] * len(completions)\n"
    )
    cases = ""
    for name, value in (("a", 0.9), ("b", 0.8), ("c", 0.7), ("d", 0.1)):
        (swept.folder / f"{name}.py").write_text(text.replace("VALUE", str(value)))
        cases += f'[cases.{name}]\n"reward.function" = "{name}.py:reward"\n'
    swept.write(f"steps = 40\n{SUMS}\n[evaluate]\nevery = 1\n")
    write(
        swept, SWEEP.partition("[grid]")[0].replace("seeds = 2", "seeds = 1") + "[stop]\nafter = 2\n" + cases
    )
    made, _ = sweep(swept)
    found = {case.case: case.results[0] for case in made.run()}
    assert found["d"].state is RunState.STOPPED and "is below the median" in found["d"].why
    assert found["a"].state is RunState.FINISHED and len(read_metrics(found["d"].run.path)) < 40
    again, jobs = sweep(swept)
    assert {case.case: case.results[0].state for case in again.run()}["d"] is RunState.STOPPED
    assert jobs.started == []


needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is the extra `ray`")


@needs_ray
@pytest.mark.slow
def test_a_sweep_runs_on_ray(swept: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    write(swept, 'on = "ray"\nthreads = 1\n' + SWEEP.replace("seeds = 2", "seeds = 1"))
    assert main(["sweep", str(swept.folder / "sweep.toml")]) == 0
    assert capsys.readouterr().out.count("finished with a held-out") == 2


@needs_ray
@pytest.mark.slow
def test_a_command_on_ray_gets_ctrl_c_and_a_waiting_one_is_dropped(tmp_path: Path) -> None:
    from rillflow.workers.start import settle

    settle(None)
    from rillflow_parts.sweeps.ray_commands import RayCommands

    program = (
        "import pathlib, time\npathlib.Path('begun').touch()\ntry:\n    time.sleep(600)\n"
        "except KeyboardInterrupt:\n    pathlib.Path('saved').touch()\n    raise SystemExit(130)\n"
    )
    (tmp_path / "program.py").write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{program}")
    cores = max(1, os.cpu_count() or 1)
    with RayCommands(["python", str(tmp_path / "program.py")], None, cores=cores, at_once=1) as commands:
        running = commands.start([], tmp_path / "log")
        waiting = commands.start([], tmp_path / "other.log")
        until = time.monotonic() + 120
        while not (tmp_path / "begun").exists() and time.monotonic() < until:
            time.sleep(0.1)
        assert running.poll() is None and waiting.poll() is None
        waiting.interrupt()
        assert waiting.poll() == 1, "nobody waits for the answer of an actor that was given up"
        running.interrupt()
        while running.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        assert running.poll() == 130 and (tmp_path / "saved").exists()
        assert waiting.poll() == 1 and not (tmp_path / "other.log").exists()


@pytest.mark.slow
def test_a_run_of_another_process_is_waited_for(swept: Tiny) -> None:
    import fcntl

    write(swept, SWEEP.partition("[grid]")[0].replace("seeds = 2", "seeds = 1"))
    said: list[str] = []
    made, jobs = sweep(swept, said)
    (run,) = load_sweep(swept.folder / "sweep.toml").runs
    run.path.mkdir(parents=True)
    looks = 0
    with (run.path / "run.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        settle = made._settle

        def released() -> None:
            nonlocal looks
            looks += 1
            if looks == 3:
                assert jobs.started == []
                fcntl.flock(lock, fcntl.LOCK_UN)
            settle()

        made._settle = released  # type: ignore[method-assign]
        cases = made.run()
    assert any("another process runs it" in line for line in said) and len(jobs.started) == 1
    assert cases[0].results[0].state is RunState.FINISHED


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('[grid]\n"policy.lrr" = [1]\n', r"the case lrr=1: policy.lrr = 1"),
        ('[grid]\n"policy.lr" = []\n', "and 0 cases"),
        ('[set]\n"run.seed" = 3\n', "sets run.seed"),
        ('[grid]\n"policy.lr" = [-1.0]\n', "the case lr=-1.0: policy.lr is -1.0"),
        ("[stop]\nafter = 0\n", "stop.after is 0"),
        ("[grids]\n", r"has no section 'grids'"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_any_run(swept: Tiny, text: str, error: str) -> None:
    write(swept, SWEEP.partition("[grid]")[0] + text)
    with pytest.raises(ConfigError) as caught:
        load_sweep(swept.folder / "sweep.toml")
    assert error in str(caught.value)
    assert not (swept.folder / "sweep").exists()


@pytest.mark.parametrize("seeds", ["[1, 1]", "[]", "0", "2000"])
def test_seeds_are_different_and_not_too_many(swept: Tiny, seeds: str) -> None:
    write(swept, SWEEP.replace("seeds = 2", f"seeds = {seeds}"))
    with pytest.raises(ConfigError, match=r"seeds|runs"):
        load_sweep(swept.folder / "sweep.toml")


def test_names_of_cases_are_short_and_differ(swept: Tiny) -> None:
    grid = '[grid]\n"policy.lr" = [1e-3]\n"critic.lr" = [1e-4]\n"rollout.stop" = [["a/b"], ["a:b"]]\n'
    write(swept, SWEEP.partition("[grid]")[0].replace("seeds = 2", "seeds = 1") + grid)
    names = [run.case for run in load_sweep(swept.folder / "sweep.toml").runs]
    assert names == [
        "policy.lr=0.001,critic.lr=0.0001,stop=_a_b_",
        "policy.lr=0.001,critic.lr=0.0001,stop=_a_b_+",
    ]


RULE = MedianConfig(after=2, runs=2)


def results(*values: float) -> list[Result]:
    return [Result(step=step, value=value) for step, value in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("own", "others", "stops"),
    [
        ([0.1], [[0.5, 0.5], [0.6, 0.6]], False),  # before ``after``
        ([0.1, 0.2], [[0.5, 0.5], [0.6, 0.6]], True),
        ([0.1, 0.2], [[0.5, 0.5], [0.6]], False),  # one other run has got so far
        (
            [0.55, 0.2],
            [[0.5, 0.5], [0.6, 0.6]],
            False,
        ),  # the best of its results counts, and equals the median
        ([0.1, 0.3], [[0.0, 0.5], [0.0, 0.6]], False),  # means of 0.25 and 0.3 up to the step
        ([0.1, 0.2], [[0.1, 0.2, 0.9], [0.1, 0.2, 0.9]], False),  # later results do not count
        ([], [[0.5, 0.5]], False),
    ],
)
def test_the_median_rule(own: list[float], others: list[list[float]], stops: bool) -> None:
    assert bool(below_median(results(*own), [results(*each) for each in others], RULE)) is stops


def test_the_example_has_six_runs() -> None:
    plan = load_sweep(Path(__file__).parents[3] / "examples/sweep.toml")
    assert [(run.case, run.seed) for run in plan.runs] == [
        (case, seed) for seed in range(3) for case in ("lr=0.0001", "lr=0.0003")
    ]
    assert plan.path == Path("runs/sweeps/examples") and plan.config.stop is not None
    words = plan.runs[0].words
    assert words[:1] == ("run",) and "--set=policy.lr=0.0001" in words and "--set=run.seed=0" in words


def test_local_jobs_have_sessions_of_their_own(tmp_path: Path) -> None:
    job: Any = LocalJobs(["sh", "-c"]).start(["echo out; echo err >&2; exit 3"], tmp_path / "log")
    while job.poll() is None:
        time.sleep(0.01)
    assert job.poll() == 3 and (tmp_path / "log").read_text() == "out\nerr\n"
