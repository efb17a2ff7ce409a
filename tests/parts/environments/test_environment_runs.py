"""Environments in training: what the environment says is in the row and not trained; evaluation plays too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rillflow
from rillflow.cli.main import main
from rillflow.runs.reader import read_evaluations, read_rollouts

EXAMPLES = Path(__file__).parents[3] / "examples"
SMALL = {
    "run.threads": 1,
    "task.held_out": 2,
    "policy.model.new.hidden": 32,
    "policy.model.new.layers": 1,
    "algorithm.steps": 2,
    "algorithm.prompts_per_step": 5,
    "algorithm.samples_per_prompt": 4,
    "evaluate.problems": 2,
}
BONUS = "def short(environment_reward, turns, **columns):\n    return [-0.1 * each for each in turns]\n"


def run(folder: Path, **more: object) -> Path:
    settings = [f"--set={name}={value}" for name, value in {**SMALL, **more}.items()]
    assert main(["run", str(EXAMPLES / "guess.toml"), *settings, "--dir", str(folder), "--quiet"]) == 0
    return folder


def test_rewards_of_an_environment_train_and_its_words_do_not(tmp_path: Path) -> None:
    (tmp_path / "bonus.py").write_text(BONUS)
    path = run(tmp_path / "run", **{"reward.function": f"{tmp_path / 'bonus.py'}:short"})
    rows = [row for step in (1, 2) for row in read_rollouts(path, step)]
    assert len(rows) == 40
    for row in rows:
        own = {*row.sampled}
        said = "".join(piece for place, piece in enumerate(row.token_texts) if place not in own)
        guesses = [row.token_texts[place] for place in row.sampled]
        secret, turns = row.columns["secret"], row.columns["turns"]
        assert len(guesses) == turns <= 4
        assert said == "?" + "".join("<" if int(guess) > secret else ">" for guess in guesses[:-1])
        solved = guesses[-1] == str(secret)
        assert row.columns["environment_reward"] == float(solved)
        assert row.reward == pytest.approx(solved - 0.1 * turns), "rewards of both are added"
    for each in rillflow.open_run(path).metrics:
        turns = [row.columns["turns"] for row in read_rollouts(path, each["step"])]
        assert each["rollout_metrics/turns/mean"] == pytest.approx(sum(turns) / len(turns))
        assert each["mismatch/logprob_gap/max"] < 1e-4, "on-policy the ratio is 1"
    found = read_evaluations(path)
    assert [each.count for each in found][-1] == 2
    assert json.loads((path / "summary.json").read_text())["has_environment"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": '{mode="tail_batching",oversample_prompts=1.5}', "algorithm.prompts_per_step": 4},
        {"placement.pools": "{ main = 1, answers = 2 }", "placement.roles": '{ sampler = "answers" }'},
    ],
    ids=["a tail that is cut", "two ranks apart"],
)
def test_environments_write_the_same_rows_on_every_placement_and_resumed(
    settings: dict[str, object], tmp_path: Path
) -> None:
    cut = {name: value for name, value in settings.items() if name.startswith(("algorithm", "schedule"))}
    whole = run(tmp_path / "whole", **{"rollout.deterministic": "true", **cut})
    for steps in (2,) if cut else (1, 2):  # the last step of a run leaves no tail, so a shorter run differs
        again = {"rollout.deterministic": "true", **settings, "algorithm.steps": steps}
        run(tmp_path / "again", **again)
    for step in (1, 2):
        one, other = (
            {
                row.row: (row.tokens, row.logprobs, row.reward, row.columns)
                for row in read_rollouts(path, step)
            }
            for path in (whole, tmp_path / "again")
        )
        assert one == other and len(one) == 4 * int(str({**SMALL, **cut}["algorithm.prompts_per_step"]))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"rollout.environment.source": "guess.py:Gues"}, "did you mean 'Guess'?"),
        ({"rollout.environment.arguments": "{ level = 3 }"}, "Guess.reset raised TypeError"),
        ({"rollout.environment.source": "verifiers:none"}, "is not installed"),
        ({"task.source": "arithmetic", "task.size": 10}, "Guess.reset needs 'secret'"),
        ({"rollout.agent.function": "agent.py:solve"}, "rollout.agent and rollout.environment are both set"),
        ({"placement.rollout_parallel.tp": 2}, "rollout.environment writes the rows"),
    ],
)
def test_check_finds_what_would_stop_a_run(
    settings: dict[str, object], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"--set={name}={value}" for name, value in {**SMALL, **settings}.items()]
    assert main(["check", str(EXAMPLES / "guess.toml"), *given]) == 2
    said = capsys.readouterr()
    assert why in said.out + said.err
