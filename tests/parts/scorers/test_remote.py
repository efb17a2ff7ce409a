"""Rewards and judges over HTTP, asked on real servers."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from rillflow.errors import RewardError
from rillflow.rewards.config import HttpConfig, JudgeConfig, RewardConfig
from rillflow.rewards.judge_prompt import FrameConfig
from rillflow.rewards.outcome import Outcome, Score
from rillflow.rewards.workers import RewardWorkers
from rillflow_parts.scorers.remote import remote_judge, remote_scores
from rillflow_parts.scorers.server_needs import url_problem
from tests.parts.scorers.score_server import Answer, served


def lengths(body: dict[str, Any], headers: dict[str, str]) -> tuple[int, object, dict[str, str]]:
    """Score an answer by its length; abstain from an empty one."""
    del headers
    return 200, {"scores": [len(each) or None for each in body["completions"]]}, {}


def scored(
    url: str, rows: int = 4, config: RewardConfig | None = None, **columns: list[object]
) -> list[Score]:
    config = config or RewardConfig()
    with RewardWorkers(remote_scores(url, config), config) as workers:
        return workers.score([f"p{row}" for row in range(rows)], ["a" * row for row in range(rows)], columns)


def test_a_server_gets_prompts_completions_and_columns_and_null_abstains() -> None:
    seen = []

    def answer(body: dict[str, Any], headers: dict[str, str]) -> tuple[int, object, dict[str, str]]:
        seen.append(body)
        return lengths(body, headers)

    with served(answer) as server:
        scores = scored(
            f"{server.url}/score", 3, RewardConfig(http=HttpConfig(rows_per_request=2)), level=[1, 2, 3]
        )
    assert [score.value for score in scores] == [None, 1.0, 2.0]
    assert scores[0].outcome is Outcome.ABSTAIN
    first = next(each for each in seen if len(each["prompts"]) == 2)
    assert first == {"prompts": ["p0", "p1"], "completions": ["", "a"], "columns": {"level": [1, 2]}}
    assert len(seen) == 2


def test_256_requests_are_answered_with_a_bounded_number_at_once() -> None:
    def slow(body: dict[str, Any], headers: dict[str, str]) -> tuple[int, object, dict[str, str]]:
        time.sleep(0.02)
        return lengths(body, headers)

    config = RewardConfig(timeout_s=60, http=HttpConfig(rows_per_request=1, concurrency=16))
    with served(slow) as server:
        scores = scored(server.url, 256, config)
    assert [score.value for score in scores[1:]] == [float(row) for row in range(1, 256)]
    assert server.num_requests == 256
    assert 1 < server.most_open <= 16


def test_a_failure_that_passes_is_repeated_and_one_that_stays_is_an_error_with_its_text() -> None:
    tries: list[str] = []

    def answer(body: dict[str, Any], headers: dict[str, str]) -> tuple[int, object, dict[str, str]]:
        del headers
        tries.append(body["prompts"][0])
        if body["prompts"][0] == "p0" and tries.count("p0") < 3:
            return 503, b"busy", {"Retry-After": "0"}
        if body["prompts"][0] == "p1":
            return 500, b"broken inside", {}
        if body["prompts"][0] == "p2":
            return 400, {"error": "no such column"}, {}
        return 200, {"scores": [1]}, {}

    with served(answer) as server:
        scores = scored(server.url, 4, RewardConfig(http=HttpConfig(rows_per_request=1, retries=2)))
    assert [score.outcome for score in scores] == [Outcome.SCORE, Outcome.ERROR, Outcome.ERROR, Outcome.SCORE]
    assert "answered 500" in scores[1].message and "broken inside" in scores[1].message
    assert "(3 tries)" in scores[1].message
    assert "answered 400" in scores[2].message and "no such column" in scores[2].message
    assert tries.count("p2") == 1


def test_a_late_server_is_a_timeout_of_its_rows_and_does_not_hold_the_others() -> None:
    held = threading.Event()

    def answer(body: dict[str, Any], headers: dict[str, str]) -> tuple[int, object, dict[str, str]]:
        if body["prompts"] == ["p1"]:
            held.wait(60)
        return lengths(body, headers)

    config = RewardConfig(timeout_s=2, http=HttpConfig(rows_per_request=1))
    with served(answer) as server:
        scores = scored(server.url, 3, config)
        held.set()
    assert scores[1].outcome is Outcome.TIMEOUT and "gave no answer within 1.5 s" in scores[1].message
    assert scores[2].value == 2.0


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        ({"scores": [1.0]}, "answered 4 rows with 1 scores"),
        ({"result": 3}, "no list of scores"),
        (b"<html>", "sent no JSON: <html>"),
        ({"scores": ["good", 1, 1, 1]}, "the score is 'good' (str), not a number"),
    ],
)
def test_a_reply_without_usable_scores_is_an_error(reply: object, told: str) -> None:
    with served(lambda *_: (200, reply, {})) as server:
        score = scored(server.url)[0]
    assert score.outcome is Outcome.ERROR
    assert told in score.message


def test_a_server_that_is_not_there_is_an_error_that_names_it() -> None:
    with served(lengths) as server:
        url = server.url
    (score,) = scored(url, 1, RewardConfig(http=HttpConfig(retries=0)))
    assert score.outcome is Outcome.ERROR
    assert url in score.message and "ConnectionRefusedError" in score.message


def test_a_redirect_is_not_followed() -> None:
    with served(lambda *_: (302, b"", {"Location": "http://elsewhere/"})) as server:
        (score,) = scored(server.url, 1)
    assert "302" in score.message and "redirects are not followed" in score.message


def test_no_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with served(lengths) as server:
        assert scored(server.url, 2)[1].value == 1.0


def test_the_key_is_read_in_the_child_and_appears_in_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORE_KEY", "sk-secret")

    def answer(body: dict[str, Any], headers: dict[str, str]) -> tuple[int, object, dict[str, str]]:
        del body
        return 401, f"wrong key {headers['Authorization']}".encode(), {}

    config = RewardConfig(key_variable="SCORE_KEY")
    with served(answer) as server:
        function = remote_scores(server.url, config)
        (score,) = scored(server.url, 1, config)
    assert "sk-secret" not in function.text
    assert score.message.count("wrong key Bearer ***") == 1


def test_a_missing_key_is_found_before_a_row_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCORE_KEY", raising=False)
    with pytest.raises(RewardError, match="environment variable SCORE_KEY, which holds the key, is not set"):
        scored("http://127.0.0.1:9/score", 1, RewardConfig(key_variable="SCORE_KEY"))


@pytest.mark.parametrize(
    ("url", "told"),
    [("localhost:9", "address like"), ("http://", "address like"), ("ftp://a/b", "address like")],
)
def test_an_address_that_is_none_is_refused(url: str, told: str) -> None:
    problem = url_problem("reward.url", url)
    assert problem is not None and told in problem.why and url in problem.what


def test_a_password_in_an_address_is_refused_without_repeating_it() -> None:
    problem = url_problem("reward.url", "http://me:hunter2@host/score")
    assert problem is not None
    assert "hunter2" not in str(problem) and "key_variable" in problem.fix


# ---- judges


def judged(answer: Answer, prompts: list[str], completions: list[str], **settings: Any) -> list[Score]:
    with served(answer) as server:
        judge = JudgeConfig(url=f"{server.url}/v1", model_name="critic", **settings)
        config = RewardConfig(judge=judge)
        with RewardWorkers(remote_judge(config, judge), config) as workers:
            return workers.score(prompts, completions, {})


def said(text: str) -> tuple[int, object, dict[str, str]]:
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}, {}


def test_a_judge_rates_by_the_last_label_of_its_reply() -> None:
    bodies = []

    def answer(body: dict[str, Any], headers: dict[str, str]) -> tuple[int, object, dict[str, str]]:
        bodies.append(body)
        content = body["messages"][0]["content"]
        return said("It is 1 of 2 words, so: **4**") if "good" in content else said("I cannot say.")

    scores = judged(answer, ["p", "q"], ["good", "bad"])
    assert scores[0].value == 4.0
    assert scores[1].outcome is Outcome.ERROR and "none of the labels 1, 2, 3, 4, 5" in scores[1].message
    assert {body["model"] for body in bodies} == {"critic"}
    assert "Question:\np\n" in min(bodies, key=str)["messages"][0]["content"] or len(bodies) == 2


def test_a_judge_compares_all_answers_to_a_prompt_in_both_orders() -> None:
    frame = FrameConfig(template="{prompt}|{first}|{second}", labels=("A", "B"))
    asked = []

    def answer(body: dict[str, Any], headers: dict[str, str]) -> tuple[int, object, dict[str, str]]:
        content = body["messages"][0]["content"]
        asked.append(content)
        _, first, second = content.split("|")
        return said("A" if len(first) >= len(second) else "B")  # of equal answers the first: a tie

    scores = judged(answer, ["p", "p", "p", "q"], ["a", "aaa", "bbb", "c"], frame=frame)
    assert [score.value for score in scores] == [0.0, 0.75, 0.75, None]
    assert scores[3].outcome is Outcome.ABSTAIN
    assert sorted(asked) == sorted(
        f"p|{one}|{other}"
        for one, other in [
            ("a", "aaa"),
            ("aaa", "a"),
            ("a", "bbb"),
            ("bbb", "a"),
            ("aaa", "bbb"),
            ("bbb", "aaa"),
        ]
    )
