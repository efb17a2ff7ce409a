"""A run that is watched: six steps of two groups, one answer with a tool's text, written step by step."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from rillflow.records.metrics import Histogram, Max, Mean, Sum
from rillflow.runs import layout
from rillflow.runs.reader import Evaluation, RankSpan, SpanRecord
from rillflow.runs.run_directory import RunDirectory
from rillflow.serving.token import Token
from rillflow_parts.watch.indexing import IndexingProcess, RunIndexer
from rillflow_parts.watch.server import application
from rillflow_parts.watch.watched_runs import WatchedRuns
from tests.unit.written_rollouts import write_rollouts

TOKEN = "a-token-of-some-length"
STEPS = 6
PROMPTS = ("What is 2+3?", "Spell STRASSE.")


def rows_of(step: int) -> list[dict[str, Any]]:
    """Return the rows of a step: two prompts, three answers each; the last answer calls a tool."""
    found = []
    for prompt, text in enumerate(PROMPTS):
        for sample in range(3):
            is_tool = prompt == 1 and sample == 2
            answer = f"answer {step}{sample} Straße" if prompt else f"{step + sample}"
            tokens = [1, 2, 3, 4, 5] if is_tool else [1, 2, 3]
            versions = [-1, step - 1, -1, -1, step - 1] if is_tool else [-1, step - 1, step - 1]
            reward = None if (prompt, sample) == (0, 1) else sample / 2
            found.append(
                {
                    "epoch": step // 3,
                    "prompt_id": prompt,
                    "sample": sample,
                    "prompt": text,
                    "columns": {"answer": "5"},
                    "completion": answer,
                    "tokens": tokens,
                    "logprobs": [0.0 if version < 0 else -0.5 for version in versions],
                    "versions": versions,
                    "finish": "stop" if sample else "length",
                    "outcome": "score" if reward is not None else "error",
                    "message": "" if reward is not None else "it raised",
                    "reward": reward,
                    "advantage": 0.25 * sample,
                }
            )
    return found


class WrittenRun:
    """A run directory that a test writes."""

    def __init__(self, path: Path) -> None:
        self.path, self.now = path, 0.0
        self.open()

    @classmethod
    def new(cls, path: Path, steps: int = STEPS) -> WrittenRun:
        """Write a run."""
        run = cls(path)
        command = ["rillflow", "run", "a.toml"]
        run.directory.log_start({"started": "2026-01-01T00:00:00+00:00", "command": command})
        (path / layout.TOKENS).write_text('{"texts": ["", "Q", " call", "TOOL", " says", " done"]}')
        for step in range(1, steps + 1):
            run.step(step)
        return run

    def open(self) -> None:
        """Open the directory, as a driver does."""
        config: dict[str, Any] = {"algorithm": {"name": "grpo", "steps": 10}, "policy": {"lr": 1e-4}}
        self.directory = RunDirectory.open(self.path, config, clock=lambda: self.now)

    def step(self, step: int, score: float | None = None) -> None:
        """Write one step."""
        write_rollouts(self.path, step, rows_of(step))
        for stage, after in {"policy.generate": (), "policy.update": ("policy.generate",)}.items():
            rank = RankSpan(rank=0, start_s=self.now, duration_s=1.0, rows=6, tokens=20)
            self.now += 1.5
            self.directory.log_span(
                SpanRecord.of_ranks([rank], 1, step=step, stage=stage, pool="main", after=after)
            )
        self.directory.log_metrics(
            step,
            "grpo",
            {
                "reward/score/mean": Mean(total=(step if score is None else score) * 6, count=6),
                "rollout/tokens/sum": Sum(value=20.0),
                "policy/ratio/max": Max(value=float("inf") if step == 2 else 1.0),
                "staleness/versions/histogram": Histogram(edges=(0.0,), counts=(step, 1)),
            },
        )
        if step % 3 == 0:
            found = Evaluation(correct=step, count=10, mean_reward=step / 10, interval=(0.0, 1.0))
            self.directory.log_evaluation(step, found)


class InlineIndexing(IndexingProcess):
    """Indexes in this process, at every request."""

    def folder(self, run: Path, identity: str) -> Path:
        """Index everything that is there, and return the folder."""
        indexer = RunIndexer(run, self.cache / identity)
        while indexer.advance(60):
            pass
        indexer.close()
        return self.cache / identity


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = WrittenRun.new(tmp_path_factory.mktemp("watched") / "first")
    run.directory.close()
    return run.path


@pytest.fixture
def written(template: Path, tmp_path: Path) -> Iterator[WrittenRun]:
    """Copy the run and drive it."""
    shutil.copytree(template, tmp_path / "runs" / "first")
    run = WrittenRun(tmp_path / "runs" / "first")
    run.now = run.directory.elapsed_s()
    with run.directory:
        yield run


@pytest.fixture
def client(written: WrittenRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    monkeypatch.setattr("rillflow_parts.watch.watched_runs.LOOK_S", 0.0)
    runs = WatchedRuns([tmp_path / "runs"])
    app = application(runs, InlineIndexing(tmp_path / "cache"), Token(text=TOKEN, is_new=True), 8100)
    return TestClient(app, base_url="http://127.0.0.1:8100", headers={"Authorization": f"Bearer {TOKEN}"})


@pytest.fixture
def get(client: TestClient) -> Callable[..., Any]:
    """Return a function that returns the JSON of an answer with status 200."""

    def asked(path: str, **parameters: Any) -> Any:
        found = client.get(path, params=parameters)
        assert found.status_code == 200, found.text
        return found.json()

    return asked
