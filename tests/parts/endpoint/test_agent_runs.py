"""Agents in training: tool text is in the row but not trained; a failing agent loses no step."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the door is the extra `service`")

import rillflow
from rillflow.cli.main import main
from rillflow.runs.reader import read_rollouts

EXAMPLES = Path(__file__).parents[3] / "examples"
SMALL = {
    "run.threads": 1,
    "task.digits": 1,
    "task.size": 60,
    "task.held_out": 4,
    "policy.model.new.hidden": 32,
    "policy.model.new.layers": 1,
    "policy.model.new.alphabet": '"0123456789+=?"',
    "rollout.agent.workers": 4,
    "algorithm.steps": 2,
    "algorithm.prompts_per_step": 6,
    "algorithm.samples_per_prompt": 4,
    "evaluate.problems": 0,
}
FAILING = """
from agent import right, solve as honest

def solve(prompt, base_url, api_key, log_metric):
    log_metric("first", int(prompt[0]))
    if prompt[0] in "6":
        raise ValueError(prompt)
    return honest(prompt, base_url, api_key)
"""


def run(recipe: Path, folder: Path, **more: object) -> Path:
    settings = [f"--set={name}={value}" for name, value in {**SMALL, **more}.items()]
    assert main(["run", str(recipe), *settings, "--dir", str(folder), "--quiet"]) == 0
    return folder


def test_a_calculator_s_answer_is_in_the_row_and_learns_nothing(tmp_path: Path) -> None:
    (tmp_path / "agent.toml").write_text((EXAMPLES / "agent.toml").read_text())
    (tmp_path / "agent.py").write_text((EXAMPLES / "agent.py").read_text() + FAILING.split("\n\n", 1)[1])
    text = (tmp_path / "agent.py").read_text().replace("def solve", "def honest", 1)
    (tmp_path / "agent.py").write_text(text)
    path = run(tmp_path / "agent.toml", tmp_path / "run")
    metrics = rillflow.open_run(path).metrics
    assert len(metrics) == 2
    for each in metrics:
        assert each["mismatch/logprob_gap/max"] < 1e-4, "on-policy the ratio is 1"
        assert each["reward/score/mean"] > 0
        assert 0 <= each["rollout_metrics/first/mean"] <= 9
    rows = [row for step in (1, 2) for row in read_rollouts(path, step)]
    assert len(rows) == 48
    called = failed = 0
    for row in rows:
        sampled = [row.token_texts[place] for place in row.sampled]
        text = "".join(row.token_texts).replace("<|end|>", "")
        if row.prompt[0] in "6":
            failed += 1
            assert row.outcome == "error" and "raised ValueError" in row.message and row.reward is None
            assert not sampled and row.advantage == 0
            continue
        assert row.outcome == "score" and text.startswith(row.prompt) and 1 <= len(sampled) <= 6
        if sampled[0] == "?":
            called += 1
            answer = str(sum(map(int, row.prompt.rstrip("=").split("+"))))
            assert text.startswith(f"{row.prompt}?{answer}")
            own = {*row.sampled}
            rest = [piece for place, piece in enumerate(row.token_texts) if place not in own]
            assert "".join(rest) == f"{row.prompt}{answer}"
            assert row.columns["returned"] == answer + "".join(sampled[1:]).replace("<|end|>", "")
    assert called and failed


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": '{mode="tail_batching",oversample_prompts=2}'},
        {
            "placement.pools": "{ main = 1, answers = 2 }",
            "placement.roles": '{ sampler = "answers" }',
        },
    ],
    ids=["a tail that is cut", "two ranks apart"],
)
def test_agents_write_the_same_rows_on_every_placement_and_resumed(
    settings: dict[str, object], tmp_path: Path
) -> None:
    """The rows do not depend on the sampling rank or on a stop of the run."""
    cut = {name: value for name, value in settings.items() if name.startswith(("algorithm", "schedule"))}
    exact = {"rollout.deterministic": "true", "evaluate.problems": 4}
    whole = run(EXAMPLES / "agent.toml", tmp_path / "whole", **exact, **cut)
    again = tmp_path / "again"
    run(EXAMPLES / "agent.toml", again, **exact, **settings, **{"algorithm.steps": 1})
    run(EXAMPLES / "agent.toml", again, **exact, **settings)
    for step in (1, 2):
        one, other = (
            {
                row.row: (row.tokens, row.logprobs, row.reward, row.columns)
                for row in read_rollouts(path, step)
            }
            for path in (whole, again)
        )
        assert one == other and len(one) == 24
