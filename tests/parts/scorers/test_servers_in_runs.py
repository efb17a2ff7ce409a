"""Rewards and judges over HTTP in whole runs, alone or weighed with functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rillflow.errors import ConfigError, RewardError
from tests.flows.test_several_rewards import train
from tests.parts.scorers.score_server import served

JUDGE = {"url": "http://a", "model_name": "x"}
PAIRS = {"frame": {"template": "{prompt} {first} {second}"}}
CHAT = {"frame": {**PAIRS["frame"], "chat": True}}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCORE_KEY", "sk-secret")


def answer(body: dict[str, Any], headers: dict[str, str]) -> tuple[int, object, dict[str, str]]:
    """Score an answer by its length, or rate it as a chat model does; only a right key is served."""
    if headers.get("Authorization") != "Bearer sk-secret":
        return 401, "no", {}
    if "messages" in body:
        return 200, {"choices": [{"message": {"content": f"{body['model']} says 4"}}]}, {}
    return 200, {"scores": [len(text) for text in body["completions"]]}, {}


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


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"reward.url": "localhost/score"}, "reward.url is 'localhost/score'"),
        ({"reward.functions": {"http://me:pw@a/b": 1.0}}, "has a password for a"),
        ({"reward.key_variable": "KEY"}, "no reward has a url"),
        ({"reward.judge": {"url": "http://a/v1"}}, "reward.judge.model_name is not set"),
        ({"reward.judge": {"url": "http://me:pw@a/v1", "model_name": "x"}}, "has a password for a"),
        ({"reward.judge": {"url": "a", "model_name": "x"}}, "reward.judge.url is 'a'"),
        (
            {"reward.judge": {"url": "http://a", "model_name": "x", **PAIRS}, "reward.workers": 2},
            "from one worker",
        ),
        ({"reward.judge": JUDGE | CHAT}, "reward.judge.frame.chat is true"),
    ],
)
def test_settings_of_servers_that_contradict_each_other_are_refused(
    tmp_path: Path, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        train(tmp_path, **settings)
