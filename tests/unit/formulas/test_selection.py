"""Selection: pairs and best rows as by hand, independent of row order; best of n below its bound."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rillflow import formulas
from rillflow.errors import FormulaError
from rillflow.formulas.config import Selector
from rillflow.records.ragged import Ragged

SELECTORS = get_args(Selector)


def rows_of(answers: list[list[list[int]]], rewards: list[list[float | None]]) -> dict[str, Any]:
    """Return the fields of some groups; a reward of None is a row without a score."""
    flat = [(group, sample) for group, rows in enumerate(rewards) for sample in range(len(rows))]
    texts = [answers[group][sample] for group, sample in flat]
    scores = [rewards[group][sample] for group, sample in flat]
    tokens = Ragged.from_rows([[9, *text] for text in texts])
    return {
        "rewards": torch.tensor([0.0 if score is None else score for score in scores]),
        "valid": torch.tensor([score is not None for score in scores], dtype=torch.bool),
        "ids": torch.tensor([[0, group, sample] for group, sample in flat], dtype=torch.int64).reshape(-1, 3),
        "groups": torch.tensor([group for group, _ in flat], dtype=torch.int64),
        "tokens": tokens,
        "loss_mask": tokens.with_values(tokens.positions > 0),
    }


def places(fields: dict[str, Any], selector: Any = "max_min", **options: Any) -> list[int]:
    found: list[int] = formulas.pair_places(**fields, selector=selector, **{"seed": 3, **options}).tolist()
    return found


LETTERS = [[1], [2], [3], [4]]


def test_the_best_is_paired_with_the_worst_or_the_second_best() -> None:
    fields = rows_of([LETTERS, LETTERS], [[0.5, 0.9, 0.1, 0.2], [None, 0.3, None, 0.4]])
    assert places(fields) == [0, 1, -1, 0, 0, -1, 0, 1]
    assert places(fields, "max_max") == [-1, 1, 0, 0, 0, -1, 0, 1]


def test_length_costs_nothing_by_default() -> None:
    fields = rows_of([[[1], [2, 2, 2], [3, 3]]], [[0.1, 0.9, 0.5]])
    assert places(fields) == places(fields, length_price=0.0) == [-1, 1, 0]
    assert places(fields, length_price=1.0) == [1, -1, 0]


@pytest.mark.parametrize("selector", SELECTORS)
def test_what_is_tied_identical_or_not_scored_makes_no_pair(selector: str) -> None:
    tied = rows_of([LETTERS], [[0.5] * 4])
    same = rows_of([[[1, 2]] * 3], [[0.1, 0.5, 0.9]])
    alone = rows_of([LETTERS], [[None, None, 0.5, None]])
    none = rows_of([LETTERS], [[None] * 4])
    for fields in (tied, same, alone, none, rows_of([], [])):
        assert not any(places(fields, selector))


def test_answers_of_one_beginning_or_one_length_are_not_identical() -> None:
    assert places(rows_of([[[1, 2], [1]]], [[0.0, 1.0]])) == [-1, 1]
    assert places(rows_of([[[1, 2], [1, 3]]], [[0.0, 1.0]])) == [-1, 1]


def test_a_price_of_length_turns_a_pair_around() -> None:
    fields = rows_of([[[1] * 8, [2, 2]]], [[1.0, 0.9]])
    assert places(fields) == [1, -1]
    assert places(fields, length_price=0.1) == [-1, 1]
    assert places(rows_of([[[1, 1], [2]]], [[0.5, 0.25]]), length_price=0.25) == [0, 0]


@pytest.mark.parametrize("selector", ["max_random", "random"])
def test_draws_are_even(selector: str) -> None:
    """600 groups of 4 rows: the frequency of each rank is right within 5 deviations."""
    fields = rows_of([LETTERS] * 600, [[4.0, 3.0, 2.0, 1.0]] * 600)
    made = torch.tensor(places(fields, selector)).view(-1, 4)
    assert (made.clamp_min(0).sum(1) == 1).all() and (made.clamp_max(0).sum(1) == -1).all()
    likely = {"max_random": [1.0, 1 / 3, 1 / 3, 1 / 3], "random": [1 / 2] * 4}[selector]
    for seen, p in zip((made != 0).double().mean(0).tolist(), likely, strict=True):
        assert abs(seen - p) <= 5 * math.sqrt(p * (1 - p) / 600)


@st.composite
def some_groups(draw: st.DrawFn) -> dict[str, Any]:
    score = st.one_of(st.none(), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
    answer = st.lists(st.integers(0, 2), max_size=3)
    row = st.tuples(answer, score)
    groups = draw(st.lists(st.lists(row, min_size=1, max_size=5), min_size=1, max_size=4))
    return rows_of([[each[0] for each in rows] for rows in groups], [[each[1] for each in g] for g in groups])


@settings(max_examples=25, deadline=None)
@given(fields=some_groups(), selector=st.sampled_from(SELECTORS), data=st.data())
def test_selection_is_order_blind_and_sound(fields: dict[str, Any], selector: Any, data: Any) -> None:
    made = torch.tensor(places(fields, selector))
    mixed = torch.tensor(data.draw(st.permutations(range(len(made)))))
    other = {
        name: each.select(mixed) if isinstance(each, Ragged) else each[mixed] for name, each in fields.items()
    }
    assert torch.equal(torch.tensor(places(other, selector)), made[mixed])
    best = formulas.best_rows(*best_fields(fields), keep=2)
    assert torch.equal(formulas.best_rows(*best_fields(other), keep=2), best[mixed])
    for group in fields["groups"].unique():
        mine = (fields["groups"] == group).nonzero().squeeze(1)
        chosen, rejected = (mine[made[mine] == place] for place in (1, -1))
        assert len(chosen) == len(rejected) <= 1
        assert bool(fields["valid"][chosen].all() and fields["valid"][rejected].all())
        assert bool((fields["rewards"][chosen] > fields["rewards"][rejected]).all())
        scored = fields["rewards"][mine][fields["valid"][mine]]
        if selector != "random" and len(chosen):
            assert fields["rewards"][chosen[0]] == scored.max()
        if selector == "max_min" and len(chosen):
            assert fields["rewards"][rejected[0]] == scored.min()


def best_fields(fields: dict[str, Any]) -> list[Tensor]:
    return [fields[name] for name in ("rewards", "valid", "ids", "groups")]


def test_the_best_rows_are_the_first_of_the_highest_above_the_threshold() -> None:
    fields = rows_of([LETTERS, LETTERS[:2]], [[1.0, 2.0, 2.0, None], [0.5, 0.5]])
    given_ = best_fields(fields)
    assert formulas.best_rows(*given_, keep=1).tolist() == [False, True, False, False, True, False]
    assert formulas.best_rows(*given_, keep=3).tolist() == [True, True, True, False, True, True]
    assert formulas.best_rows(*given_, keep=2, threshold=1.0).tolist() == [False, True, True] + [False] * 3


@settings(max_examples=25, deadline=None)
@given(fields=some_groups(), n=st.integers(1, 64))
def test_best_of_n_is_under_its_bound(fields: dict[str, Any], n: int) -> None:
    given_ = [fields[name] for name in ("rewards", "valid", "groups")]
    found = formulas.best_of_n_divergence(*given_, n=n)
    assert -1e-12 <= found <= formulas.best_of_n_bound(n=n) + 1e-12


def test_best_of_n_reaches_its_bound_where_no_two_answers_are_equal() -> None:
    count, n = 4000, 8
    rewards, one = torch.rand(count, generator=torch.Generator().manual_seed(0)), torch.zeros(count)
    found = formulas.best_of_n_divergence(rewards.double(), one == 0, one.long(), n=n)
    assert found == pytest.approx(math.log(8) - 7 / 8, abs=2e-3)
    halves = (torch.arange(4) >= 2).double()  # the better half is selected unless all 8 are from the other
    least, all_ = 0.5**8, torch.ones(4, dtype=torch.bool)
    by_hand = least * math.log(least / 0.5) + (1 - least) * math.log((1 - least) / 0.5)
    assert formulas.best_of_n_divergence(halves, all_, all_.long(), n=8) == pytest.approx(by_hand)
    assert formulas.best_of_n_divergence(halves, ~all_, all_.long(), n=8) == 0


def test_bad_options_are_refused() -> None:
    fields = rows_of([LETTERS], [[0.5, 0.9, 0.1, 0.2]])
    with pytest.raises(FormulaError, match=r"max_mim(?s:.*)'max_min'"):
        places(fields, "max_mim")
    with pytest.raises(FormulaError, match="length_price is -1"):
        places(fields, length_price=-1.0)
    with pytest.raises(FormulaError, match="valid has shape"):
        places({**fields, "valid": fields["valid"][:2]})
    with pytest.raises(FormulaError, match="keep is 0"):
        formulas.best_rows(*best_fields(fields), keep=0)
    with pytest.raises(FormulaError, match="n is 0"):
        formulas.best_of_n_bound(n=0)
