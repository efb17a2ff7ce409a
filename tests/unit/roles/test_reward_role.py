"""The reward role: four outcomes, chat in TRL's form, and a stop if the reward fails."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rillflow.errors import RewardError
from rillflow.models.bare import character_tokenizer
from rillflow.models.tokenizer import Tokenizer
from rillflow.records.batch import Batch
from rillflow.records.rollout import Finish, Rollout, rollout_batch
from rillflow.records.row import RowId
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import parse_function
from rillflow.rewards.workers import RewardWorkers
from rillflow.roles.reward import OUTCOMES, Reward

CODE = """
def reward(prompts, completions, answer, **columns):
    scores = []
    for text, right in zip(completions, answer):
        if text == "0":
            scores.append(None)
        elif text == "9":
            raise ValueError("nine")
        else:
            scores.append(float(text == right))
    return scores

def chat(prompts, completions, **columns):
    pairs = zip(prompts, completions)
    return [float(prompt[-1]["content"] == completion[0]["content"]) for prompt, completion in pairs]
"""


def rollouts(tokenizer: Tokenizer, answers: Sequence[str], prompt: object = "4+3=") -> Batch:
    columns = json.dumps({"prompt": prompt, "answer": "7"})
    rows = [
        Rollout.start(RowId(0, place // 2, place % 2), tokenizer.encode("4+3="), columns).sampled(
            tokens := tokenizer.encode_completions([answer])[0], [-1.0] * len(tokens), 0, Finish.STOP
        )
        for place, answer in enumerate(answers)
    ]
    return rollout_batch(rows)


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(character_tokenizer("0123456789+=", 16))


def score(folder: Path, name: str, tokenizer: Tokenizer, batch: Batch, max_failures: float = 0.5) -> Batch:
    (folder / "reward.py").write_text(CODE)
    with RewardWorkers(parse_function(f"reward.py:{name}", folder), RewardConfig()) as workers:
        return Reward(workers, tokenizer, max_failures=max_failures).score(batch)


def test_outcomes_are_told_apart_and_only_a_score_is_valid(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = score(tmp_path, "reward", tokenizer, rollouts(tokenizer, ["7", "8", "0", "9"]))
    assert [OUTCOMES[index] for index in found.dense("outcome").tolist()] == [
        "score",
        "score",
        "abstain",
        "error",
    ]
    assert found.dense("rewards").tolist() == [1.0, 0.0, 0.0, 0.0]
    assert found.dense("valid").tolist() == [True, True, False, False]
    assert "nine" in found.ragged("message").to_text()[3]
    assert found.ragged("completion").to_text() == ["7", "8", "0", "9"]


def test_too_many_failures_stop_the_run_and_name_the_first_row(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(RewardError, match=r"failed on 2 of 3 rows(?s:.*)prompt 0 sample 1(?s:.*)nine"):
        score(tmp_path, "reward", tokenizer, rollouts(tokenizer, ["7", "9", "9"]))


def test_as_many_failures_as_are_allowed_stop_nothing(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = score(tmp_path, "reward", tokenizer, rollouts(tokenizer, ["7", "9"]), max_failures=0.5)
    assert found.dense("valid").tolist() == [True, False]


def test_chat_prompts_get_chat_completions(tmp_path: Path, tokenizer: Tokenizer) -> None:
    batch = rollouts(tokenizer, ["7", "8"], prompt=[{"role": "user", "content": "7"}])
    assert score(tmp_path, "chat", tokenizer, batch).dense("rewards").tolist() == [1.0, 0.0]
