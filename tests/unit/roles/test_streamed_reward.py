"""Reward.advance and collect: fields of scores, group by group; failures count over a window of rows."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.errors import RewardError
from rillflow.models.bare import character_tokenizer
from rillflow.models.tokenizer import Tokenizer
from rillflow.records.batch import Batch, concatenate
from rillflow.records.ragged import Ragged
from rillflow.records.rollout import Finish, Rollout, rollout_batch
from rillflow.records.row import RowId
from rillflow.rewards.config import RewardConfig
from rillflow.rewards.function import parse_function
from rillflow.rewards.outcome import FAILED, Outcome
from rillflow.rewards.workers import RewardWorkers
from rillflow.roles.reward import COST_FIELDS, OUTCOMES, SCORE_FIELDS, WINDOW_ROWS, Cost, Reward, Scored
from rillflow.roles.sampler import GroupId

CODE = """
import time
def reward(completions, answer):
    while "99" in completions: time.sleep(0.01)
    return [None if text == "0" else "nine" if text == "9" else float(text == right)
            for text, right in zip(completions, answer)]
"""
PLENTY_S = 120.0
"""Longest wait of a test, in seconds; a quiet machine needs a hundredth."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(character_tokenizer("0123456789+=", 16))


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardWorkers]:
    folder = tmp_path_factory.mktemp("reward")
    (folder / "reward.py").write_text(CODE)
    config = RewardConfig(workers=2, timeout_s=PLENTY_S)
    with RewardWorkers(parse_function("reward.py:reward", folder), config) as workers:
        yield workers


@pytest.fixture
def reward(workers: RewardWorkers, tokenizer: Tokenizer) -> Reward:
    return Reward(workers, tokenizer, max_failures=0.5)


def rows(tokenizer: Tokenizer, prompt: int, answers: Sequence[str]) -> Batch:
    """Return rows of one prompt; a row without an answer has a failed agent."""
    made = []
    for sample, answer in enumerate(answers):
        columns: dict[str, object] = {"prompt": "4+3=", "answer": "7"}
        if not answer:
            columns[FAILED] = (Outcome.TIMEOUT, "the agent is late")
        tokens = tokenizer.encode_completions([answer])[0]
        start = Rollout.start(RowId(0, prompt, sample), tokenizer.encode("4+3="), json.dumps(columns))
        made.append(start.sampled(tokens, [-1.0] * len(tokens), 0, Finish.STOP))
    return rollout_batch(made)


def completed(reward: Reward, count: int, window: int = WINDOW_ROWS) -> list[GroupId]:
    """Advance until ``count`` groups are complete."""
    found: list[GroupId] = []
    until = time.monotonic() + PLENTY_S
    while len(found) < count:
        assert time.monotonic() < until, f"only {found} are complete"
        found += reward.advance(None, (), 1.0, window).complete
    return found


def equal(one: Batch, other: Batch) -> bool:
    def same(name: str) -> bool:
        left, right = one.field(name), other.field(name)
        if isinstance(left, Ragged):
            assert isinstance(right, Ragged)
            return torch.equal(left.values, right.values) and torch.equal(left.lengths, right.lengths)
        assert not isinstance(right, Ragged)
        return left.dtype == right.dtype and torch.equal(left, right)

    return (
        torch.equal(one.ids, other.ids)
        and set(one.fields) == set(other.fields)
        and all(map(same, one.fields))
    )


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_division_into_calls_gives_the_fields_of_score(
    workers: RewardWorkers, tokenizer: Tokenizer, data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from([Reward, Cost]))
    reward = kind(workers, tokenizer, max_failures=1.0)
    answers = st.lists(st.sampled_from(["7", "8", "0", "9", ""]), min_size=1, max_size=4)
    groups = [
        rows(tokenizer, prompt, each)
        for prompt, each in enumerate(data.draw(st.lists(answers, min_size=1, max_size=5)))
    ]
    found, place = list[GroupId](), 0
    while place < len(groups):
        stop = data.draw(st.integers(place + 1, len(groups)))
        found += reward.advance(
            concatenate(groups[place:stop]), (), data.draw(st.sampled_from([0, 0.01]))
        ).complete
        place = stop
    found += completed(reward, len(groups) - len(found))
    assert sorted(found) == [(0, prompt) for prompt in range(len(groups))]
    order = data.draw(st.permutations(range(len(groups))))
    batch = reward.score(concatenate([groups[prompt] for prompt in order]))
    cut = data.draw(st.integers(0, len(order)))
    parts = [reward.collect([(0, prompt) for prompt in some]) for some in (order[:cut], order[cut:]) if some]
    assert equal(concatenate(parts), batch)
    fields = {*SCORE_FIELDS, "parts"} if kind is Reward else {*COST_FIELDS}
    assert set(batch.fields) == {*fields, "logged"}


def test_a_group_that_hangs_is_given_up_and_sampled_again(reward: Reward, tokenizer: Tokenizer) -> None:
    hanging, quick = rows(tokenizer, 1, ["7", "99"]), rows(tokenizer, 2, ["7", "8"])
    assert reward.advance(concatenate([hanging, quick]), (), 0) == Scored(complete=[], waiting=2)
    assert completed(reward, 1) == [(0, 2)]
    assert reward.advance(None, (), 0) == Scored(complete=[], waiting=1)
    again = rows(tokenizer, 1, ["8", "7"])
    reward.advance(again, [(0, 1), (0, 2)], 0)
    assert completed(reward, 1) == [(0, 1)]
    assert reward.collect([(0, 1)]).dense("rewards").tolist() == [0.0, 1.0]
    with pytest.raises(RewardError, match="epoch 0 prompt 2 cannot be collected"):
        reward.collect([(0, 2)])


def test_a_group_whose_agents_all_failed_is_complete_without_a_call(
    reward: Reward, tokenizer: Tokenizer
) -> None:
    scored = reward.advance(rows(tokenizer, 1, ["", ""]), (), 0)
    assert scored == Scored(complete=[(0, 1)], waiting=0)
    assert [OUTCOMES[each] for each in reward.collect([(0, 1)]).dense("outcome").tolist()] == ["timeout"] * 2


def test_rows_of_a_group_may_lie_apart_and_keep_their_order(reward: Reward, tokenizer: Tokenizer) -> None:
    first, second = rows(tokenizer, 1, ["7", "8"]), rows(tokenizer, 2, ["8", "7"])
    reward.advance(concatenate([first, second]).select([3, 0, 2, 1]), (), 0)
    completed(reward, 2)
    found = reward.collect([(0, 1), (0, 2)])
    assert found.ids[:, 1:].tolist() == [[1, 0], [1, 1], [2, 1], [2, 0]]
    assert found.dense("rewards").tolist() == [1.0, 0.0, 1.0, 0.0]


def test_groups_that_cannot_be_meant_are_named(reward: Reward, tokenizer: Tokenizer) -> None:
    with pytest.raises(RewardError, match=r"prompt 5 cannot be given up(?s:.*)not given to this rank"):
        reward.advance(None, [(0, 5)], 0)
    hanging = rows(tokenizer, 1, ["99"])
    reward.advance(hanging, (), 0)
    with pytest.raises(RewardError, match=r"prompt 1 cannot be collected(?s:.*)still being scored"):
        reward.collect([(0, 1)])
    with pytest.raises(RewardError, match="prompt 1 is already being scored"):
        reward.advance(hanging, (), 0)
    assert reward.advance(None, [(0, 1)], 0) == Scored(complete=[], waiting=0)


def test_failures_are_judged_over_the_last_rows(reward: Reward, tokenizer: Tokenizer) -> None:
    """A whole group may fail; the run stops when half of the last 8 rows have failed."""
    failing, good = ["9"] * 4, ["7"] * 4
    for prompt, answers in enumerate([failing, good, failing, good, good, failing]):
        reward.advance(rows(tokenizer, prompt, answers), (), 0, 8)
        completed(reward, 1, 8)
    reward.advance(rows(tokenizer, 6, ["7", "9", "8", "8"]), (), 0, 8)
    told = r"failed on 5 of the last 8 rows; the last, row \(epoch 0 prompt 6 sample 1\)(?s:.*)'nine'"
    with pytest.raises(RewardError, match=told):
        completed(reward, 1, 8)


def test_rows_not_seen_yet_count_as_good(workers: RewardWorkers, tokenizer: Tokenizer) -> None:
    reward = Reward(workers, tokenizer, max_failures=0.0)
    reward.advance(rows(tokenizer, 0, ["7"]), (), 0)
    completed(reward, 1)
    reward.advance(rows(tokenizer, 1, ["9"]), (), 0)
    with pytest.raises(RewardError, match="failed on 1 of the last 256 rows"):
        completed(reward, 1)
