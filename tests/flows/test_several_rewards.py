"""Several rewards in one run: functions, a server, a judge over HTTP; weighed in the recipe or in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rillflow
from rillflow.cli.main import main
from rillflow.errors import ConfigError, RewardError
from tests.unit.rewards.score_server import served

NEW = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "context": 16, "alphabet": "0123456789+="}
RECIPE: dict[str, Any] = {
    "run": {"seed": 3, "threads": 1},
    "policy": {"lr": 1e-3, "model": {"new": NEW}},
    "rollout": {"max_tokens": 3},
    "algorithm": {"name": "grpo", "prompts_per_step": 2, "samples_per_prompt": 2, "steps": 1},
    "evaluate": {"problems": 2},
}
PROMPTS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(6)]
REWARDS = """
def brief(completions):
    return [1 - len(text) / 3 for text in completions]


def odd(completions, answer):
    return [float(len(text) % 2) if right != "1" else None for text, right in zip(completions, answer)]
"""


def answer(body: dict[str, Any], headers: dict[str, str]) -> tuple[int, object, dict[str, str]]:
    """Score an answer by its length, or rate it as a chat model does; only a right key is served."""
    if headers.get("Authorization") != "Bearer sk-secret":
        return 401, "no", {}
    if "messages" in body:
        return 200, {"choices": [{"message": {"content": f"{body['model']} says 4"}}]}, {}
    return 200, {"scores": [len(text) for text in body["completions"]]}, {}


def train(folder: Path, reward: Any = None, **settings: Any) -> rillflow.Run:
    (folder / "rewards.py").write_text(REWARDS)
    return rillflow.train(
        RECIPE, prompts=PROMPTS, reward=reward, dir=folder / "run", settings=settings, quiet=True, fresh=True
    )


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCORE_KEY", "sk-secret")


def test_functions_and_a_server_of_the_recipe_are_summed_by_weight(tmp_path: Path) -> None:
    with served(answer) as server:
        weights = {"rewards.py:brief": 0.5, "rewards.py:odd": -1.0, f"{server.url}/score": 0.25}
        run = train(tmp_path, **{"reward.functions": weights, "reward.key_variable": "SCORE_KEY"})
    (metrics,) = run.metrics
    assert {"rewards/brief/mean", "rewards/odd/mean", "rewards/score/mean"} <= metrics.keys()
    for row in run.rollouts():
        length = len(row.completion)
        parts = {"brief": pytest.approx(1 - length / 3), "odd": float(length % 2), "score": float(length)}
        if row.columns["answer"] == "1":
            del parts["odd"]
        assert row.parts == parts
        total = 0.5 * row.parts["brief"] - row.parts.get("odd", 0) + 0.25 * length
        assert row.reward == pytest.approx(total, abs=1e-6)
    kept = {path.name.rpartition("-")[0] for path in (run.path / "sources").iterdir()}
    assert kept == {"functions.brief", "functions.odd"}
    assert all(b"sk-secret" not in path.read_bytes() for path in run.path.rglob("*") if path.is_file())


def test_python_s_list_mixes_functions_with_what_a_recipe_can_name(tmp_path: Path) -> None:
    def flat(completions: list[str]) -> list[float]:
        return [1.0] * len(completions)

    run = train(tmp_path, [(flat, 2.0), "rewards.py:brief"])
    for row in run.rollouts():
        assert set(row.parts) == {"flat", "brief"}
        assert row.reward == pytest.approx(2 + row.parts["brief"], abs=1e-6)
    assert run.settings["reward"]["functions"] == {"rewards.py:brief": 1.0}  # type: ignore[index,call-overload]


def test_a_judge_over_http_scores_alone_or_with_a_function(tmp_path: Path) -> None:
    with served(answer) as server:
        judge = {"url": f"{server.url}/v1", "model_name": "critic", "key_variable": "SCORE_KEY"}
        run = train(tmp_path, **{"reward.judge": judge, "task.held_out": 2})
        assert {row.reward for row in run.rollouts()} == {4.0}
        assert [each.mean_reward for each in run.evaluations] == [4.0, 4.0]
        functions = {"rewards.py:brief": 1.0, "rewards.py:odd": 0.5}
        weights = {"function": 2.0, "judge": 0.5}
        run = train(
            tmp_path, **{"reward.judge": judge, "reward.functions": functions, "reward.weights": weights}
        )
    for row in run.rollouts():
        assert {"function", "judge", "brief"} <= set(row.parts)
        assert row.reward == pytest.approx(2 * row.parts["function"] + 2.0, abs=1e-6)
    assert {"rewards/judge/mean", "rewards/function/mean", "rewards/brief/mean"} <= run.metrics[0].keys()


def test_check_reports_a_server_that_is_not_there_before_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(answer) as server:
        url = server.url
    with pytest.raises(RewardError) as caught:
        train(tmp_path, url, **{"reward.http.retries": 0})
    assert "ConnectionRefusedError" in caught.value.what and "start or fix the server" in caught.value.fix
    assert not (tmp_path / "run").exists()


def test_a_replay_reads_functions_that_changed_since_from_the_run(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "run.toml").write_text(
        """
        run.threads = 1
        task = { held_out = 0, size = 8, digits = 1, operators = "+" }
        reward.functions = { "rewards.py:brief" = 1.0, "rewards.py:odd" = 0.5 }
        rollout.max_tokens = 3
        algorithm = { name = "grpo", prompts_per_step = 2, samples_per_prompt = 2, steps = 1 }
        [policy.model.new]
        hidden = 16
        layers = 1
        heads = 2
        kv_heads = 1
        context = 16
        alphabet = "0123456789+="
        """
    )
    assert main(["run", "run.toml", "--dir", "run"]) == 0
    (tmp_path / "rewards.py").write_text(REWARDS.replace("1 -", "5 -"))
    assert main(["replay", "run"]) == 0


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"reward.functions": {}}, "at least one function"),
        ({"reward.functions": {"rewards.py:odd": 1.0}, "reward.url": "http://a/b"}, "sets functions and url"),
        ({"reward.url": "localhost/score"}, "reward.url is 'localhost/score'"),
        ({"reward.key_variable": "KEY"}, "no reward has a url"),
        ({"reward.judge": {}}, "neither model nor url"),
        ({"reward.judge": {"url": "http://a/v1"}}, "reward.judge.model_name is not set"),
        ({"reward.judge": {"model": "judge", "model_name": "x"}}, "reward.judge.url is not set"),
        ({"reward.judge": {"url": "http://me:pw@a/v1", "model_name": "x"}}, "has a password for a"),
    ],
)
def test_what_contradicts_itself_is_refused(tmp_path: Path, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        train(tmp_path, **settings)


def test_two_rewards_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "more.py").write_text(REWARDS)
    with pytest.raises(RewardError, match=r"the rewards have the names \['odd', 'odd'\]"):
        train(tmp_path, **{"reward.functions": {"rewards.py:odd": 1.0, "more.py:odd": 1.0}})
