"""Whole runs whose rows programs in other processes and languages sample."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the service is the extra `service`")

from rillflow.app.launch import launch
from rillflow.app.recipe import load_recipe
from rillflow.errors import ConfigError, install_plugin
from rillflow.runs import layout
from rillflow.runs.reader import rollout_columns

HERE = Path(__file__).parent
ENGINES = {
    "JavaScript": ["node", str(HERE.parents[1] / "examples" / "engine.js")],
    "Python": [sys.executable, str(HERE / "torch_engine.py")],
}
RECIPE = """
[run]
seed = 3
threads = 1
[task]
source = "arithmetic"
digits = 1
operators = "+"
size = 80
held_out = 10
[policy]
lr = 3e-3
model.new = { hidden = 32, layers = 2, heads = 4, kv_heads = 2, context = 16, alphabet = "0123456789+=" }
[rollout]
max_tokens = 4
service = { check_share = 0.5, timeout_s = 60.0 }
[algorithm]
name = "grpo"
steps = 3
prompts_per_step = 4
samples_per_prompt = 3
loss.correction = "none"
[reward]
function = "reward.py:small"
"""
REWARD = """
def small(prompts, completions, **columns):
    return [sum(letter < "5" for letter in text) / 4 for text in completions]
"""
APART = (
    "placement.pools={ main = 1, answers = 1 }",
    'placement.roles={ sampler = "answers" }',
    "placement.backend=inline",
)


def prepared(folder: Path, name: str, *settings: str) -> tuple[Path, Callable[[], None]]:
    """A run's directory, and what runs it."""
    folder.mkdir(exist_ok=True)
    (folder / "run.toml").write_text(RECIPE)
    (folder / "reward.py").write_text(REWARD)
    run = folder / name
    loaded = load_recipe(folder / "run.toml", [f"run.dir={json.dumps(str(run))}", *settings])
    return run, lambda: launch(loaded, quiet=True)


def sampled_by(language: str, folder: Path, *settings: str, pool: str = "main") -> Path:
    """A run whose rows such an engine samples, beside a client that takes rows and dies."""
    if shutil.which(ENGINES[language][0]) is None:
        pytest.skip(f"there is no {ENGINES[language][0]}")
    run, start = prepared(folder, language, "rollout.engine=service", *settings)
    address = run / "service" / f"{pool}-0.json"
    with ExitStack() as stack:
        engine = stack.enter_context(
            subprocess.Popen(
                [*ENGINES[language], str(address)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
        stack.callback(engine.kill)
        dying = threading.Thread(target=take_and_die, args=(address,))
        dying.start()
        start()
        dying.join(30.0)
        engine.wait(30.0)
        assert engine.stdout is not None and b"the run has" in engine.stdout.read()
    assert not address.exists()
    return run


def take_and_die(address: Path) -> None:
    """Lease two rows and never put them; they go back after a second."""
    while not address.exists():
        time.sleep(0.01)
    found = json.loads(address.read_text())
    headers = {"authorization": f"Bearer {found['token']}", "x-rillflow-client": "dead"}
    body = json.dumps({"count": 2, "lease_s": 1.0, "wait_s": 20}).encode()
    request = urllib.request.Request(f"{found['url']}/rows/take", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Every rollout, as it was written."""
    return [rollout_columns(run, step) for step in sorted(layout.rollout_files(run))]


def rewards(run: Path) -> Sequence[float]:
    lines = (run / layout.METRICS).read_text().splitlines()
    return [json.loads(line)["metrics"]["reward/score/mean"]["mean"] for line in lines]


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run by the native engine."""
    run, start = prepared(tmp_path_factory.mktemp("runs"), "native")
    start()
    return run


@pytest.mark.parametrize("language", ENGINES)
def test_a_run_is_sampled_in_another_language(language: str, native: Path, tmp_path: Path) -> None:
    """Its rows are of the same prompts as the native engine's, and of the version of their step."""
    run = sampled_by(language, tmp_path)
    for step, (own, other) in enumerate(zip(rows_of(run), rows_of(native), strict=True)):
        assert own.keys() == other.keys() and own["prompt"] == other["prompt"], step
        assert len(own["completion"]) == 12 and own["completion"] != other["completion"]
    assert len(rewards(run)) == 3


def test_without_the_plugin_the_engine_is_refused_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rillflow.app.plugins.installed", dict)
    with pytest.raises(ConfigError, match="needs the plugin service") as caught:
        prepared(tmp_path, "run", "rollout.engine=service")
    assert caught.value.fix == install_plugin("service") and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "settings",
    [
        ["rollout.top_p=0.9"],
        [
            "placement.pools={ main = 2 }",
            "placement.train_parallel={ main = { tp = 2 } }",
            "placement.rollout_parallel={ tp = 2 }",
        ],
    ],
    ids=["cut", "sharded"],
)
def test_what_the_engine_cannot_do_is_refused_before_anything_starts(
    settings: Sequence[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="which cannot"):
        prepared(tmp_path, "run", "rollout.engine=service", *settings)[1]()


@pytest.mark.slow
def test_a_killed_run_resumes_with_its_engine(tmp_path: Path) -> None:
    """The engine ends with the run; one that starts before the resumed run waits for its address."""
    if shutil.which("node") is None:
        pytest.skip("there is no node")
    steps = ("rollout.engine=service", "algorithm.steps=30", "run.checkpoint_every=1")
    run, _ = prepared(tmp_path, "run", *steps)
    words = [word for setting in steps for word in ("--set", setting)]
    command = [
        sys.executable,
        "-m",
        "rillflow.cli.main",
        "run",
        str(tmp_path / "run.toml"),
        *words,
        "--dir",
        str(run),
    ]
    for is_killed in (True, False):
        with (
            subprocess.Popen([*ENGINES["JavaScript"], str(run / "service" / "main-0.json")]) as engine,
            subprocess.Popen(command) as running,
        ):
            while is_killed and not ((run / layout.METRICS).exists() and len(rewards(run)) > 3):
                assert running.poll() is None
                time.sleep(0.02)
            if is_killed:
                running.kill()
                assert (run / "service" / "main-0.json").exists()
            assert running.wait(120.0) == (-9 if is_killed else 0)
            assert engine.wait(60.0) == 0
    assert len(rewards(run)) == 30 and not (run / "service").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ['schedule={mode="ahead",freshness=1}'],
        ['schedule={mode="ahead",freshness=2}', "schedule.mode=ready_first", "evaluate.every=3"],
        ['schedule={mode="streamed",stream_chunks=2}'],
    ],
    ids=["ahead", "ready first", "parts"],
)
def test_a_run_goes_ahead_with_rows_from_outside(settings: Sequence[str], tmp_path: Path) -> None:
    run = sampled_by("JavaScript", tmp_path, *APART, "algorithm.steps=8", *settings, pool="answers")
    assert len(rewards(run)) == 8
